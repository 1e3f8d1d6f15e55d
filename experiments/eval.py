"""Measures a run: held-out loss, or with --suite=long whether the model uses its window.

A run with pictures is also asked about held-out ones: exact answers by kind of question, beside chance.

  python -m experiments.eval --workdir=/tmp/run --batches=32
  python -m experiments.eval --workdir=/tmp/run --suite=long --lengths=512,1024 --tasks=needle,multi_query,variable

Both are of the newest checkpoint or that of --step. The suite hides answers in held-out text at 1/4, 1/2, 1 and 2 times
the trained window (or --lengths), asks for them, and reads held-out text with all and with a quarter of its context. It
writes long-STEP.json and pictures (figures/long-*.png) into the run's directory.
"""

import json
import sys

from absl.flags import DEFINE_enum, DEFINE_integer, DEFINE_list

from experiments.common import UsageError, command, define_step, define_workdir, workdir_of


def define(flags):
    define_workdir(flags, "directory of the run")
    define_step(flags)
    own = {"flag_values": flags}
    DEFINE_enum("suite", "heldout", ["heldout", "long"], "heldout: bits per byte; long: tasks by length", **own)
    DEFINE_integer("batches", None, "held-out batches; by default the run's train.eval_batches", lower_bound=1, **own)
    tasks = ["needle", "multi_key", "multi_query", "variable"]
    DEFINE_list("tasks", tasks, "long: tasks of trillium_moe/data/synthetic.py, or all", **own)
    DEFINE_list("lengths", [], "long: tokens of an example; by default 1/4, 1/2, 1 and 2 windows", **own)
    DEFINE_integer("answers", 200, "long: answers per task and length, if --tokens allows", lower_bound=1, **own)
    DEFINE_integer("tokens", 1 << 20, "long: tokens read per task and length at most", lower_bound=1, **own)
    DEFINE_integer("depths", 5, "long: depths of a needle", lower_bound=1, **own)
    DEFINE_integer("generate", 8, "long: examples that are also answered freely", lower_bound=0, **own)
    DEFINE_integer("rows", 4, "long: sequences read side by side", lower_bound=1, **own)
    DEFINE_integer("chunk", 256, "long: tokens of each read at once", lower_bound=2, **own)
    DEFINE_integer("threads", 1, "long: such groups read at the same time: 2 use two cores", lower_bound=1, **own)


def run(flags):
    workdir = workdir_of(flags, exists=True)
    return (run_long if flags.suite == "long" else run_heldout)(flags, workdir)


def run_heldout(flags, workdir):
    from trillium_moe.data.pipeline import make_pipeline
    from trillium_moe.evals import vision
    from trillium_moe.evals.heldout import heldout
    from trillium_moe.infer.generate import load_model
    from trillium_moe.train.step import make_eval_step

    model = load_model(workdir, flags.step)
    batches = make_pipeline(model.config, "heldout", workdir, tokenizer=model.tokenizer)
    n = min(flags.batches or model.config.train.eval_batches, len(batches))
    out = heldout(make_eval_step(model.config), model.params, model.router_bias, iter(batches),
                  model.tokenizer.token_bytes, n)
    if not flags.json:
        print(f"step {model.step}, {n} held-out batches: {out['heldout/bits_per_byte']:.4f} bits per byte, "
              f"{out['heldout/loss']:.4f} nats per token")
    if model.config.images.share:
        scores = vision.Suite(model.config, model.tokenizer)(model.params, model.router_bias)
        if not flags.json:
            print("\n".join(vision.table(scores)))
        out |= vision.as_metrics(scores)
    return {"workdir": workdir, "step": model.step, "batches": n, **out}


def run_long(flags, workdir):
    from etils import epath

    from trillium_moe.data.pipeline import make_pipeline
    from trillium_moe.data.synthetic import TASKS
    from trillium_moe.evals import long_figures
    from trillium_moe.evals.long import LongConfig, evaluate
    from trillium_moe.infer.generate import load_model
    from trillium_moe.train.report import png

    try:
        lengths = tuple(int(n) for n in flags.lengths)
    except ValueError:
        raise UsageError(f"flag --lengths={','.join(flags.lengths)}: must be whole numbers") from None
    model = load_model(workdir, flags.step)
    window = model.config.data.seq_len
    lengths = tuple(sorted(lengths or (window // 4, window // 2, window, 2 * window)))
    tasks = tuple(TASKS) if flags.tasks == ["all"] else tuple(flags.tasks)
    suite = LongConfig(tasks=tasks, lengths=lengths, answers=flags.answers, tokens=flags.tokens, depths=flags.depths,
                       generate=flags.generate, rows=flags.rows, chunk=flags.chunk, threads=flags.threads)
    documents = make_pipeline(model.config, "heldout", workdir, tokenizer=model.tokenizer, threads=0).rows.documents
    out = evaluate(model.config.model, model.params, model.router_bias, model.tokenizer, documents, suite,
                   lambda line: print(line, file=sys.stderr))
    if not flags.json:
        for text in out["text"]:
            print(f"held-out text of {text['length']:,} tokens: {text['loss']:.4f} nats per token; its last eighth "
                  f"gains {text['gain']:.4f} from the first three quarters")
    folder = epath.Path(workdir)
    (folder / f"long-{model.step}.json").write_text(json.dumps(out, indent=1) + "\n")
    (folder / "figures").mkdir(exist_ok=True)
    results = {f"step {model.step:,}": {"window": window, **out}}
    for name, draw in (("needles", long_figures.needle_maps), ("lengths", long_figures.lifts),
                       ("text", long_figures.text_losses)):
        if (figure := draw(results)) is not None:
            (folder / "figures" / f"long-{name}.png").write_bytes(png(figure))
    return {"workdir": workdir, "step": model.step, **out}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))

"""Measures held-out loss in bits per byte, for the newest checkpoint of a run or that of --step.

  python -m experiments.eval --workdir=/tmp/run --batches=32
"""

import sys

from absl.flags import DEFINE_integer

from experiments.common import command, define_step, define_workdir, workdir_of


def define(flags):
    define_workdir(flags, "directory of the run")
    define_step(flags)
    DEFINE_integer("batches", None, "held-out batches; by default the run's train.eval_batches", lower_bound=1,
                   flag_values=flags)


def run(flags):
    from trillium_moe.data.pipeline import make_pipeline
    from trillium_moe.evals.heldout import heldout
    from trillium_moe.infer.generate import load_model
    from trillium_moe.train.step import make_eval_step

    workdir = workdir_of(flags, exists=True)
    model = load_model(workdir, flags.step)
    batches = make_pipeline(model.config, "heldout", workdir, tokenizer=model.tokenizer)
    n = min(flags.batches or model.config.train.eval_batches, len(batches))
    out = heldout(make_eval_step(model.config), model.params, model.router_bias, iter(batches),
                  model.tokenizer.token_bytes, n)
    if not flags.json:
        print(f"step {model.step}, {n} held-out batches: {out['heldout/bits_per_byte']:.4f} bits per byte, "
              f"{out['heldout/loss']:.4f} nats per token")
    return {"workdir": workdir, "step": model.step, "batches": n, **out}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))

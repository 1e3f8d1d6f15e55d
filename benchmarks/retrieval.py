"""What finds a needle, attention or the recurrent state: needle accuracy of a run, as it is and with attention uniform.

  python -m benchmarks.retrieval --workdir=runs/ladder/8k --lengths=128,1024,4096

With the query weights of the attention layers set to zero every visible token gets the same attention, so whatever is
still found was carried by the recurrent state of KDA, which forgets.
"""

import sys

from absl.flags import DEFINE_integer, DEFINE_list

from experiments.common import command, define_workdir, workdir_of


def define(flags):
    define_workdir(flags, "directory of a run")
    own = {"flag_values": flags}
    DEFINE_list("lengths", ["128", "1024"], "tokens of an example", **own)
    DEFINE_integer("answers", 20, "needles per length", lower_bound=1, **own)
    DEFINE_integer("chunk", 512, "tokens read at once", lower_bound=2, **own)


def run(flags):
    import jax

    from trillium_moe.data.pipeline import make_pipeline
    from trillium_moe.evals.long import LongConfig, evaluate
    from trillium_moe.infer.generate import load_model

    model = load_model(workdir_of(flags, exists=True))
    held = make_pipeline(model.config, "heldout", tokenizer=model.tokenizer, threads=0).rows.documents
    lengths = tuple(sorted(map(int, flags.lengths)))
    suite = LongConfig(tasks=("needle",), lengths=lengths, answers=flags.answers, tokens=flags.answers * lengths[-1],
                       generate=0, text=False, rows=1, chunk=flags.chunk)
    query = "q_up" if model.config.model.mla.q_lora_rank else "q"
    blind = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if {"mla", query} <= {getattr(key, "key", None) for key in path} else x, model.params)
    out = {}
    for name, params in (("as it is", model.params), ("attention uniform", blind)):
        found = evaluate(model.config.model, params, model.router_bias, model.tokenizer, held, suite,
                         lambda line, name=name: print(f"{name:>17}: {line}", flush=True))
        out[name] = {cell["length"]: cell["accuracy"] for cell in found["cells"]}
    return out


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))

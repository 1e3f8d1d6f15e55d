"""Continues a prompt with a trained model.

  python -m experiments.generate --workdir=/tmp/run --prompt="def main(" --temperature=0.8 --top_p=0.95
"""

import sys

from absl.flags import DEFINE_float, DEFINE_integer, DEFINE_string

from experiments.common import command, define_step, define_workdir, workdir_of


def define(flags):
    define_workdir(flags, "directory of the run")
    define_step(flags)
    DEFINE_string("prompt", "def ", "text to continue", flag_values=flags)
    DEFINE_integer("tokens", 256, "tokens to add, at most; the model may end the document before", flag_values=flags)
    DEFINE_float("temperature", 0.8, "0 always takes the most probable token", flag_values=flags)
    DEFINE_integer("top_k", 0, "keep the k most probable tokens; 0: all", flag_values=flags)
    DEFINE_float("top_p", 1.0, "keep the most probable tokens up to this probability; 1: all", flag_values=flags)
    DEFINE_integer("seed", 0, "the same seed gives the same text", flag_values=flags)


def run(flags):
    from trillium_moe.infer.generate import Sampling, generate, load_model

    workdir = workdir_of(flags, exists=True)
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.seed)
    model = load_model(workdir, flags.step)
    text = generate(model, flags.prompt, flags.tokens, sampling)
    if not flags.json:
        print(flags.prompt + text)
    return {"workdir": workdir, "step": model.step, "prompt": flags.prompt, "text": text, "seed": flags.seed}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))

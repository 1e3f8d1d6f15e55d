"""Counts parameters from the config alone. Nothing is allocated: 2.8 trillion take seconds on a laptop.

  python -m experiments.params --config=configs/pretrain.py:scale=tiny

Active parameters are those one token meets: of the routed experts k of n count, the input embedding (a look-up) does
not.
"""

import os
import sys

from experiments.common import command, config_of, define_config


def define(flags):
    define_config(flags)


def run(flags):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # an accelerator would only have to be claimed
    from trillium_moe.train.counts import count_modules, human, totals

    config = config_of(flags)
    counts = count_modules(config.model)
    sums = totals(counts)
    if not flags.json:
        width = max(map(len, counts)) + 2
        active = sum(c.active for c in counts.values())
        print(f"{config.name}: {human(sums['total'])} parameters, "
              f"{human(sums['active_text_without_input_embedding'])} active per token\n")
        print(f"{'module':{width}}{'parameters':>22}{'active':>20}{'share':>8}")
        for name, count in counts.items():
            print(f"{name:{width}}{count.total:>22,}{count.active:>20,}{count.total / sums['total']:>8.1%}")
        print(f"{'all':{width}}{sums['total']:>22,}{active:>20,}{1:>8.1%}")
        print(f"{'active, without input embedding':{width}}{'':>22}{sums['active_text_without_input_embedding']:>20,}")
    return sums


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))

"""Trains a model, or resumes the run in --workdir where its newest checkpoint left off.

  python -m experiments.train --config=configs/pretrain.py:scale=tiny --workdir=/tmp/run
  python -m experiments.train --config=configs/pretrain.py:scale=tiny --workdir=/tmp/run --config.train.steps=600

The run directory gets config.json, metrics.jsonl, tensorboard/, arrays/, checkpoints/, and at the end report.html and
sample.txt. SIGTERM or Ctrl-C saves at the next step and exits with code 0; the same command resumes, bit for bit. A
loss that is not finite ends the run with code 1 and keeps the last good checkpoint.

--config.mesh.* arranges the devices (all of them, by default, on mesh.data). Over several processes, run the same
command in each: docs/pods.md.
"""

import sys

from experiments.common import (
    command,
    config_of,
    define_config,
    define_distributed,
    define_workdir,
    join_processes,
    workdir_of,
)


def define(flags):
    define_config(flags)
    define_workdir(flags, "directory of the run; made if missing, resumed if it holds one")
    define_distributed(flags)


def run(flags):
    from trillium_moe.train.loop import train

    join_processes(flags)
    workdir = workdir_of(flags, exists=False)
    outcome = train(config_of(flags), workdir)
    return {"workdir": workdir, "step": outcome.step, "finished": outcome.finished, **outcome.metrics}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))

"""Format SFT, then RL, then a report: one command, one run for each seed.

  python -m experiments.rl --workdir=runs/rl
  python -m experiments.rl --config=configs/rl.py:env=lookup,objective=grpo --workdir=runs/lookup --seeds=0
  python -m experiments.rl --workdir=runs/noise --config.task.noise=0.1 --config.rollout.lag=4

WORKDIR/seed<n> gets config.json, metrics.jsonl, checkpoints, trained.jsonl (which trajectories every update had),
trajectories.txt and sft_only.jsonl (the arm that only went on with SFT); WORKDIR/report.html shows all seeds. SIGTERM
or Ctrl-C saves after the update in progress, with the trajectories that are on the way; the same command goes on.
"""

import sys

from absl.flags import DEFINE_string

from experiments.common import UsageError, command, define_config, define_workdir, workdir_of

CONFIG = "configs/rl.py"


def define(flags):
    define_config(flags)
    define_workdir(flags, "directory of the runs; made if missing, resumed if it holds them")
    DEFINE_string("seeds", "0,1,2", "comma separated; each is a run of its own", flag_values=flags)


def run(flags):
    import dataclasses

    from trillium_moe.config_files import from_config_dict
    from trillium_moe.rl.config import RLConfig
    from trillium_moe.rl.loop import train
    from trillium_moe.rl.report import summary, write_report
    from trillium_moe.rl.run import Run

    workdir = workdir_of(flags, exists=False)
    if not all(s.strip().isdigit() for s in flags.seeds.split(",")):
        raise UsageError(f"flag --seeds={flags.seeds}: must be whole numbers, such as 0,1,2")
    seeds = [int(s) for s in flags.seeds.split(",")]
    config = from_config_dict(flags.config, RLConfig)
    programs, finished = Run(config), True
    for seed in seeds:
        finished = finished and train(dataclasses.replace(config, seed=seed), f"{workdir}/seed{seed}", programs)
    report = write_report(workdir)
    result = summary(workdir)
    if not flags.json:
        for line in result["text"]:
            print(line)
        print(f"report: {report}")
    return {"workdir": workdir, "finished": finished, **result}


def main(argv=None):
    from trillium_moe.rl.config import RLConfig

    return command(__doc__, define, run, argv, config=CONFIG, cls=RLConfig)


if __name__ == "__main__":
    sys.exit(main())

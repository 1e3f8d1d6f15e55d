"""Runs a sweep: several arms and seeds of one experiment, compared in one table and one report.html.

  python -m experiments.sweep --sweep=configs/ablations/balancing.py --workdir=runs/balancing --parallel=2
  python -m experiments.sweep --sweep=configs/ablations/balancing.py:scale=small --workdir=runs/b --gpus=0,1
  python -m experiments.sweep --sweep=configs/ablations/main.py --workdir=runs/m --parallel=4 --turn=/tmp/turn
  python -m experiments.sweep --sweep=configs/ablations/balancing.py --workdir=/shared/b --write=slurm
  python -m experiments.sweep --sweep=configs/ablations/balancing.py --workdir=runs/balancing --gather

The same command goes on where a sweep was stopped, or killed: what is done is skipped, what was begun is resumed from
its checkpoint, what failed is tried again. A run whose loss is not finite counts as diverged and is not repeated. Every
call ends by gathering what there is into runs.csv, table.csv, table.md and report.html in --workdir.

Exit codes: 0, also when stopped by a signal; 1 if a run failed (the others have been run); 2 for a wrong command line.
"""

import sys
from pathlib import Path

from experiments.common import UsageError, command, define_workdir, workdir_of


def define(flags):
    from absl import flags as absl_flags

    absl_flags.DEFINE_string("sweep", "", "a file of configs/ablations, with its options after a colon",
                             flag_values=flags)
    define_workdir(flags, "directory of the sweep; its runs are below it")
    absl_flags.DEFINE_integer("parallel", 1, "runs at a time, on each device", lower_bound=1, flag_values=flags)
    absl_flags.DEFINE_list("gpus", [], "GPUs to deal the runs to, by number; by default whatever is visible",
                           flag_values=flags)
    absl_flags.DEFINE_string("turn", "", "a file of this machine: programs compile --parallel at a time, but only the "
                             "one that holds its lock trains, on each of --gpus", flag_values=flags)
    absl_flags.DEFINE_list("only", [], "run these alone, by number, one after the other in this process",
                           flag_values=flags)
    absl_flags.DEFINE_integer("group", -1, "run the seeds of this arm alone: what one task of a cluster job does",
                              flag_values=flags)
    absl_flags.DEFINE_bool("list", False, "print the runs and what differs between them; run nothing",
                           flag_values=flags)
    absl_flags.DEFINE_bool("gather", False, "gather the results that there are; run nothing", flag_values=flags)
    absl_flags.DEFINE_enum("write", "", ["", "slurm", "xpk"], "write a job that runs the same list on a cluster; run "
                           "nothing", flag_values=flags)


def run(flags):
    from trillium_moe.sweep.plan import check_same_sweep, load_sweep

    if not flags.sweep:
        raise UsageError("flag --sweep is missing; name a sweep, such as --sweep=configs/ablations/balancing.py")
    sweep = load_sweep(flags.sweep)
    if flags.list:
        for r in sweep.runs:
            changed = {k: v for part in r.arm.parts if part.role != "rung" for k, v in part.overrides}
            print(f"{r.index:4d}  {r.arm.name}, seed {r.seed}  {changed or ''}".rstrip())
        return {"runs": len(sweep.runs)}
    if flags.turn and not Path(flags.turn).absolute().parent.is_dir():
        raise UsageError(f"flag --turn={flags.turn}: there is no such folder; name a file in one of this machine")
    workdir = workdir_of(flags, exists=flags.gather)
    check_same_sweep(flags.sweep, workdir)
    if flags.write:
        from trillium_moe.sweep.cluster import write_job

        path = write_job(flags.write, sweep, flags.sweep, workdir)
        print(f"{path}: {len(sweep.groups)} tasks of {len(sweep.seeds)} runs")
        return {"job": str(path)}
    if flags.only or flags.group >= 0:
        return _work(sweep, workdir, flags)
    if not flags.gather:
        from trillium_moe.sweep.execute import Launcher

        Launcher(sweep, flags.sweep, workdir, flags.parallel, flags.gpus, turn=flags.turn).run()
    return _gather(sweep, workdir, flags)


def _work(sweep, workdir, flags):
    from trillium_moe.sweep.execute import work

    try:
        picked = [int(i) for i in flags.only] or [r.index for r in sweep.groups[flags.group]]
        runs = [sweep.runs[i] for i in picked]
    except (ValueError, IndexError):
        raise UsageError(f"flag --only={','.join(flags.only)} --group={flags.group}: the sweep has {len(sweep.runs)} "
                         f"runs in {len(sweep.groups)} groups; --list prints them") from None
    finished = work(runs, workdir, probes=sweep.probes, turn=flags.turn)
    return {"workdir": workdir, "finished": finished}


def _gather(sweep, workdir, flags):
    from trillium_moe.sweep.gather import gather, write_tables
    from trillium_moe.sweep.report import write_report

    results = gather(sweep, workdir)
    table = write_tables(sweep, results, workdir)
    page = write_report(sweep, results, workdir)
    if not flags.json:
        print(table)
        print(f"report: {page}")
    failed = [f"{r.run.arm.name}, seed {r.run.seed}: {r.reason}" for r in results if r.status == "failed"]
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return {"workdir": workdir, "report": str(page), "failed": len(failed)}


def main(argv=None):
    result = {}
    code = command(__doc__, define, lambda flags: result.update(run(flags)) or result, argv)
    return code or int(result.get("failed", 0) > 0)


if __name__ == "__main__":
    sys.exit(main())

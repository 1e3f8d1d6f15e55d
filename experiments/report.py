"""Writes report.html of a run, finished or not: curves, expert loads, depth attention, decay half-lives.

  python -m experiments.report --workdir=/tmp/run
"""

import sys

from experiments.common import command, define_workdir, workdir_of


def define(flags):
    define_workdir(flags, "directory of the run")


def run(flags):
    from trillium_moe.train.report import write_report

    path = write_report(workdir_of(flags, exists=True))
    if not flags.json:
        print(path)
    return {"report": str(path)}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))

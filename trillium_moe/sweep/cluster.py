"""Jobs that run a sweep elsewhere: a SLURM array, or a set of xpk workloads on GKE. One task trains one arm's seeds."""

from __future__ import annotations

import re
import shlex

from etils import epath

from trillium_moe.sweep.plan import Sweep

SLURM = """#!/bin/bash
# {question}
# Submit with `sbatch {script}`, again to go on with what is left. Then: {gather}
#SBATCH --job-name={name}
#SBATCH --array=0-{last}
#SBATCH --ntasks=1
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --output={workdir}/logs/slurm-%a.txt
cd "${{SLURM_SUBMIT_DIR:-$PWD}}"
# SIGTERM, two minutes before the time is up, saves; --signal=B sends it to this shell, exec makes it the program's
exec .venv/bin/python -m experiments.sweep {flags} --group="$SLURM_ARRAY_TASK_ID"
"""

XPK = """#!/bin/bash
# {question}
# Run this where xpk and its credentials are, again to go on with what is left (a finished arm ends at once).
# Then, where the bucket can be read: {gather}
set -euo pipefail
CLUSTER="${{CLUSTER:?name of the GKE cluster}}"
TPU_TYPE="${{TPU_TYPE:-v6e-8}}"  # of one host: an arm is trained by one process
IMAGE="${{IMAGE:?image that holds this repository and its environment}}"
for group in $(seq 0 {last}); do
  xpk workload create --cluster="$CLUSTER" --workload="{name}-$group" --tpu-type="$TPU_TYPE" --num-slices=1 \\
    --docker-image="$IMAGE" --max-restarts=10 \\
    --command="python -m experiments.sweep {flags} --group=$group"
done
"""


def write_job(kind: str, sweep: Sweep, spec: str, workdir: epath.PathLike) -> epath.Path:
    """Writes `sweep.sbatch` or `sweep-xpk.sh` into `workdir`. Returns its path.

    Args:
      kind: slurm or xpk.
      spec: the sweep, as for `plan.load_sweep`.
    """
    workdir = epath.Path(workdir)
    path = workdir / {"slurm": "sweep.sbatch", "xpk": "sweep-xpk.sh"}[kind]
    flags = f"--sweep={shlex.quote(spec)} --workdir={shlex.quote(str(workdir))}"
    stem = spec.partition(":")[0].rsplit("/", 1)[-1].removesuffix(".py")
    (workdir / "logs").mkdir(parents=True, exist_ok=True)
    path.write_text({"slurm": SLURM, "xpk": XPK}[kind].format(
        question=sweep.question, name=re.sub(r"[^a-z0-9-]+", "-", stem.lower()), last=len(sweep.groups) - 1,
        flags=flags, workdir=shlex.quote(str(workdir)), script=path,
        gather=f"python -m experiments.sweep {flags} --gather",
    ))
    return path

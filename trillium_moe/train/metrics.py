"""Metrics on disk: one flat dict per logged step.

    workdir/metrics.jsonl              scalars; one line a step, with `step` and `time` (Unix seconds)
    workdir/arrays/<step>.npz          arrays: expert loads, biases, decays, attention-residual weights
    workdir/tensorboard/               the scalars again

On resume everything after the checkpoint's step is dropped, so that the files of a resumed run equal those of an
uninterrupted one in every value but `time` and `perf/*`.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath
from tensorboardX import SummaryWriter

from trillium_moe.shapes import Array


def is_timing(name: str) -> bool:
    """Whether a metric depends on the machine's speed and may differ between two equal runs."""
    return name == "time" or name.startswith("perf/")


class MetricWriter:
    """Appends to the files of one run, from process 0; on others it does nothing.

    `step` counts optimizer steps done; a resumed run passes its checkpoint's.
    """

    def __init__(self, workdir: epath.PathLike, resume_step: int = 0):
        self._main = jax.process_index() == 0
        if not self._main:
            return
        self._workdir = epath.Path(workdir)
        self._workdir.mkdir(parents=True, exist_ok=True)
        _truncate(self._workdir, resume_step)
        self._lines = (self._workdir / "metrics.jsonl").open("a")
        self._tensorboard = SummaryWriter(str(self._workdir / "tensorboard"), purge_step=resume_step + 1)

    def write(self, step: int, values: Mapping[str, Any], arrays: bool = True) -> None:
        """Writes one step. Scalars go to the line; values with axes go to the .npz if `arrays`."""
        if not self._main:
            return
        values = {name: np.asarray(value) for name, value in jax.device_get(dict(values)).items()}
        scalars = {name: value.item() for name, value in sorted(values.items()) if value.ndim == 0}
        self._lines.write(json.dumps({"step": step, "time": round(time.time(), 3), **scalars}) + "\n")
        self._lines.flush()
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, step)
        rest = {name: value for name, value in values.items() if value.ndim > 0}
        if arrays and rest:
            path = _array_path(self._workdir, step)
            path.parent.mkdir(exist_ok=True)
            content = io.BytesIO()
            np.savez_compressed(content, **rest)
            path.write_bytes(content.getvalue())

    def sync(self) -> None:
        """Forces the lines to disk. Called before a checkpoint, whose metrics must not be lost with the machine."""
        if not self._main:
            return
        self._lines.flush()
        os.fsync(self._lines.fileno())
        self._tensorboard.flush()

    def close(self) -> None:
        if not self._main:
            return
        self._lines.close()
        self._tensorboard.close()

    def __enter__(self) -> MetricWriter:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def read_metrics(workdir: epath.PathLike) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, oldest first; [] if there are none. A last line cut short is left out."""
    path = epath.Path(workdir) / "metrics.jsonl"
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break  # the run was killed while writing it
    return lines


def read_arrays(workdir: epath.PathLike, step: int | None = None) -> tuple[int, dict[str, np.ndarray]]:
    """The arrays of `step`, or the newest ones: (their step, arrays by name). (0, {}) if there are none."""
    steps = array_steps(workdir)
    if not steps:
        return 0, {}
    step = steps[-1] if step is None else step
    with np.load(io.BytesIO(_array_path(epath.Path(workdir), step).read_bytes())) as arrays:
        return step, dict(arrays)


def array_steps(workdir: epath.PathLike) -> list[int]:
    """Steps whose arrays were written, oldest first."""
    directory = epath.Path(workdir) / "arrays"
    return sorted(int(path.stem) for path in directory.glob("*.npz")) if directory.exists() else []


def _array_path(workdir: epath.Path, step: int) -> epath.Path:
    return workdir / "arrays" / f"{step:08d}.npz"


def _truncate(workdir: epath.Path, step: int) -> None:
    """Drops everything after `step`."""
    path = workdir / "metrics.jsonl"
    if path.exists():
        kept = [line for line in read_metrics(workdir) if line["step"] <= step]
        new = path.with_name("metrics.jsonl.tmp")
        new.write_text("".join(json.dumps(line) + "\n" for line in kept))
        new.replace(path)  # at once: a kill here loses nothing
    for later in array_steps(workdir):
        if later > step:
            _array_path(workdir, later).unlink()


def start_fetch(metrics: Mapping[str, Array]) -> None:
    """Starts the copies to the host that `MetricWriter.write` will wait for one step later."""
    for value in metrics.values():
        if isinstance(value, jax.Array):
            value.copy_to_host_async()

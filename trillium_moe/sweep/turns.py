"""A device that several runs take in turn: their programs compile side by side, one of them steps at a time.

Runs that are small for their device leave little of it idle, and side by side each slows the others by more than it
gains; compilation, which takes longer than a short run, does not use the device at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
from collections.abc import Iterator

import jax

from trillium_moe.shapes import PyTree
from trillium_moe.train.loop import Task


@contextlib.contextmanager
def in_turn(path: str | os.PathLike, task: Task) -> Iterator[Task]:
    """`task`, whose steps hold the lock of the file `path` of this machine.

    Its first step does not, because it compiles; nor does what begins with an evaluation, up to the next step. The
    lock is free again at the end, also of a process that is killed. It waits with the signal handlers of `fit` at work.

    Raises:
      OSError: if the file cannot be written.
    """
    first = True

    def step(state: PyTree, batch: PyTree):
        nonlocal first
        if first:
            first = False
            return jax.block_until_ready(task.step(state, batch))
        fcntl.flock(file, fcntl.LOCK_EX)  # which does nothing where it is held already
        return task.step(state, batch)

    def evaluate(state: PyTree) -> dict[str, float]:
        fcntl.flock(file, fcntl.LOCK_UN)
        return task.evaluate(state)

    with open(path, "w") as file:
        yield dataclasses.replace(task, step=step, evaluate=evaluate)

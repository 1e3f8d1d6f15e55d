"""Checkpoints: the train state, the data iterator's state, and a checksum of every array.

One checkpoint is `workdir/checkpoints/<step>/`, written by orbax in the background and renamed into place when it is
complete, so a killed run leaves a temporary directory, never half a checkpoint. It holds

    state   every leaf of the train state, by path: params, router_bias, opt_state, step
    host    JSON: the data iterator's state and the checksums

Orbax reads a damaged chunk as wrong numbers without an error, so each leaf's checksum is computed on its device before
the save and again after the restore. It is an integer sum, hence the same on every mesh.
"""

from __future__ import annotations

import contextlib
import gc
import logging as std_logging
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from trillium_moe.parallel import runtime
from trillium_moe.shapes import Array, PyTree, Shaped

MARKERS = ("commit_success.txt", "_CHECKPOINT_METADATA")  # orbax writes these two last


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used. The message is one line and names the directory or the leaf."""


class TornCheckpointError(CheckpointError):
    """A checkpoint that is incomplete or damaged; an older one may do."""


class NonFiniteError(RuntimeError):
    """A loss, gradient or state that is not a finite number. The message is one line and names the step."""


@dataclass(frozen=True)
class Restored:
    """What one checkpoint held."""

    step: int  # optimizer steps done
    state: PyTree  # like the abstract tree asked for; buffers of its own, safe to donate
    data_state: Any  # for the data iterator's `set_state`


def checkpoint_dir(workdir: epath.PathLike) -> epath.Path:
    """Absolute, which orbax insists on, unless the workdir is a URL."""
    path = epath.Path(workdir) / "checkpoints"
    return path if "://" in str(workdir) else path.resolve()


def steps(workdir: epath.PathLike) -> list[int]:
    """Steps that have a checkpoint directory, oldest first. Saves in progress are not among them."""
    directory = checkpoint_dir(workdir)
    if not directory.exists():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit())


def open_checkpoints(workdir: epath.PathLike, keep: int) -> ocp.training.Checkpointer:
    """A context manager that writes checkpoints and deletes all but the newest `keep`. Leaving it waits for the save
    in progress."""
    return ocp.training.Checkpointer(
        checkpoint_dir(workdir),
        context=_context(),
        preservation_policy=ocp.training.preservation_policies.LatestN(keep),
        cleanup_tmp_directories=True,
    )


def save(checkpointer: ocp.training.Checkpointer, step: int, state: PyTree, data_state: Any) -> None:
    """Starts writing `state` in the background, after any save still in progress. `state` may be donated on return.

    Raises:
      NonFiniteError: if a leaf holds nan or inf. Nothing is written then, so that no good checkpoint gives way to it.
    """
    leaves = _by_name(state)
    finite, checksums = jax.device_get(_inspect(leaves))
    bad = [name for name, ok in finite.items() if not ok]
    if bad:
        raise NonFiniteError(f"step {step}: {bad[0]} holds nan or inf ({len(bad)} of {len(leaves)} leaves do)")
    host = {"data": data_state, "checksums": {name: int(value) for name, value in checksums.items()}}
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.size}  # orbax refuses empty arrays
    checkpointer.save_checkpointables_async(step, {"state": leaves, "host": host}, force=True, overwrite=True)


def restore(workdir: epath.PathLike, abstract: PyTree, *, step: int | None = None, partial: bool = False) -> Restored:
    """Restores the newest usable checkpoint, or that of `step`.

    Args:
      abstract: tree of `jax.ShapeDtypeStruct`, from `jax.eval_shape`. Shardings are honoured; without one a leaf goes
        to the default device.
      partial: allow leaves in the checkpoint that `abstract` lacks (evaluation needs no optimizer state).

    Raises:
      CheckpointError: if there is none, or none is whole, or a leaf is missing or of another shape or dtype.
        Torn checkpoints are skipped with a warning while an older one remains.
    """
    found = steps(workdir) if step is None else [step]
    if not found or not (checkpoint_dir(workdir) / str(found[-1])).exists():
        have = f"it has steps {steps(workdir)}" if steps(workdir) else "train first"
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise CheckpointError(f"workdir={str(workdir)!r} holds {wanted}; {have}")
    for candidate in reversed(found):
        try:
            return _load(checkpoint_dir(workdir) / str(candidate), candidate, abstract, partial)
        except TornCheckpointError as error:
            if candidate == found[0]:
                raise
            logging.warning("skipping a torn checkpoint: %s", error)
    raise AssertionError("unreachable")


def set_aside(workdir: epath.PathLike, after: int) -> None:
    """Renames checkpoints newer than step `after` to `torn-<step>`, so that a resumed run can neither count them among
    the newest it keeps nor lose what may still be in them."""
    runtime.barrier("checkpoints read")
    for step in steps(workdir) if runtime.is_main() else ():
        if step > after:
            target = checkpoint_dir(workdir) / f"torn-{step}"
            if target.exists():
                target.rmtree()
            (checkpoint_dir(workdir) / str(step)).rename(target)
    runtime.barrier("checkpoints set aside")


def _load(path: epath.Path, step: int, abstract: PyTree, partial: bool) -> Restored:
    missing = [name for name in MARKERS if not (path / name).exists()]
    if missing:
        raise TornCheckpointError(f"{path} has no {missing[0]}: the save never finished")
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or device)
        for name, leaf in _by_name(abstract).items()
    }
    empty = {name: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
             for name, leaf in wanted.items() if not leaf.size}
    with _quiet(), _context():
        try:
            stored = dict(ocp.checkpointables_metadata(path).metadata["state"])
        except Exception as error:
            raise TornCheckpointError(f"{path} cannot be read: {_first_line(error)}") from error
        _check_leaves(path, wanted, stored | empty, partial)
        full = {name: leaf for name, leaf in wanted.items() if leaf.size}
        try:
            loaded = ocp.load_checkpointables(path, {"state": full, "host": None})
        except Exception as error:
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                raise  # the checkpoint may be whole; an older one would not fit either
            raise TornCheckpointError(f"{path} cannot be read: {_first_line(error)}") from error
    # Restored buffers can share memory with the reader, and donation then silently copies, one train state too much.
    # A copy leaf by leaf costs one leaf.
    leaves = empty
    for name in list(loaded["state"]):
        original = loaded["state"].pop(name)
        leaves[name] = jax.jit(jnp.copy, out_shardings=original.sharding)(original)
        original.delete()
    _, checksums = jax.device_get(_inspect(leaves))
    saved = loaded["host"]["checksums"]
    damaged = [name for name, value in checksums.items() if int(value) != saved[name]]
    if damaged:
        raise TornCheckpointError(f"{path} is damaged: the checksum of {damaged[0]} does not match")
    state = jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in wanted])
    return Restored(step, state, loaded["host"]["data"])


def _check_leaves(path: epath.Path, wanted: dict[str, Any], stored: dict[str, Any], partial: bool) -> None:
    """Raises CheckpointError for the first leaf that does not fit."""
    mend = "restore with the config the checkpoint was written with (config.json beside it)"
    for name, leaf in wanted.items():
        if name not in stored:
            raise CheckpointError(f"{path} has no leaf {name} {leaf.dtype.name}{list(leaf.shape)}; {mend}")
        have = stored[name]
        if tuple(have.shape) != tuple(leaf.shape) or have.dtype != leaf.dtype:
            raise CheckpointError(
                f"{path}: leaf {name} is {jnp.dtype(have.dtype).name}{list(have.shape)}, "
                f"the config asks for {leaf.dtype.name}{list(leaf.shape)}; {mend}")
    extra = sorted(set(stored) - set(wanted))
    if extra and not partial:
        raise CheckpointError(f"{path} holds leaf {extra[0]}, which the config does not have; {mend}")


@jax.jit
def _inspect(leaves: dict[str, Shaped[Array, "..."]]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Whether each leaf is finite, and the sum of its bits modulo 2^32."""
    def checksum(x):
        if jnp.issubdtype(x.dtype, jnp.bool_):
            x = x.astype(jnp.uint8)
        width = min(x.dtype.itemsize, 4)  # 64-bit values become pairs
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * width}"))
        return jnp.sum(bits, dtype=jnp.uint32)

    def finite(x):
        return jnp.all(jnp.isfinite(x)) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.bool_(True)

    return {n: finite(x) for n, x in leaves.items()}, {n: checksum(x) for n, x in leaves.items()}


def _by_name(tree: PyTree) -> dict[str, Any]:
    """Leaves by path, such as `params/kda/q/w`, in the order of `jax.tree.leaves`."""
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
    return {name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _context() -> ocp.Context:
    context = ocp.Context()
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="host")
    context.checkpointables.registry = registry
    context.pytree.loading.partial_load = True  # `_check_leaves` decides what may be left out
    return context


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160] if str(error).strip() else ''}"


@contextlib.contextmanager
def _quiet():
    """Silences what orbax prints about each unfinished read when another one has failed."""
    loggers = std_logging.getLogger("asyncio"), logging.get_absl_logger()
    levels, hook = [logger.level for logger in loggers], sys.unraisablehook
    try:
        for logger in loggers:
            logger.setLevel(std_logging.CRITICAL)
        sys.unraisablehook = lambda _: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield
            except Exception:
                gc.collect()  # unfinished reads speak up when they are collected
                raise
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
        sys.unraisablehook = hook

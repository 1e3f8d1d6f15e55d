"""A model written as a released checkpoint: config.json, safetensors cut by size, their index.

Tensors leave the devices one at a time, already cast and transposed; the host holds one. Everything is written into a
directory beside the target, which takes its place when it is complete.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from pallas_kernels.mxfp4 import GROUP, pack
from trillium_moe.config import ConfigError, ModelConfig, check, check_choice
from trillium_moe.interop import configs, layout
from trillium_moe.interop.layout import Stored
from trillium_moe.interop.safetensors import (
    DTYPES,
    INDEX,
    Planned,
    header_bytes,
    index_of,
    shard_names,
    split,
)
from trillium_moe.parallel import runtime
from trillium_moe.shapes import PyTree

SHARD_BYTES = 5 << 30
WIDTHS = {"bfloat16": "BF16", "float32": "F32"}


def export(
    directory: str | Path,
    config: ModelConfig,
    params: PyTree,
    router_bias: PyTree,
    *,
    naming: str = "",
    dtype: str = "bfloat16",
    experts: str = "",
    shard_bytes: int = SHARD_BYTES,
    extra: dict[str, Any] | None = None,
) -> list[Path]:
    """Writes a checkpoint into a new directory. Every process calls it; process 0 writes.

    Args:
      naming: a key of `layout.NAMINGS`; "" for the released one that holds the architecture.
      dtype: of weights, bfloat16 or float32; what releases keep in float32 is float32 anyway.
      experts: mxfp4 packs routed experts (packed ones stay so), "" writes them as other weights.
      shard_bytes: of a file, unless a tensor is larger.
      extra: fields added to config.json, such as token ids.

    Returns:
      The files.

    Raises:
      ConfigError: the directory holds something already, or no released layout holds the architecture.
    """
    directory = Path(directory).expanduser()
    check_choice("dtype", dtype, tuple(WIDTHS))
    check_choice("experts", experts, ("", "mxfp4"))
    naming = naming or configs.naming_for(config)
    check_choice("naming", naming, tuple(layout.NAMINGS))
    packed = config.moe.experts_format == "mxfp4"
    mxfp4 = packed or experts == "mxfp4"
    if mxfp4 and naming == layout.LIBRARY:
        raise ConfigError("naming='transformers': that library keeps experts in one tensor, which cannot be MXFP4; use "
                          "naming=kimi_linear")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"out={str(directory)!r}: exists and is not empty; name a new directory")
    raw = configs.describe(config, naming, mxfp4) | (extra or {})
    files: list[Path] = []
    arrays = {path: v[...] for state in (params, router_bias) for path, v in nnx.to_flat_state(state)}
    tensors = list(layout.tensors(config, naming))
    planned = {s.name: plan(s, WIDTHS[dtype], mxfp4) for s in tensors}
    shards = split([t for s in tensors for t in planned[s.name]], shard_bytes)
    values = (x for s in tensors for x in values_of(s, planned[s.name], arrays, packed))
    with complete(directory) if runtime.is_main() else contextlib.nullcontext() as part:
        if part is not None:
            (part / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
            configs.check_expressible(config, configs.read_config(part, config.dtypes))
        for name, shard in zip(shard_names(len(shards)), shards):
            files.append(directory / name)
            write(None if part is None else part / name, shard, values)
        if part is not None and len(shards) > 1:
            (part / INDEX).write_text(json.dumps(index_of(shards), indent=2) + "\n")
    runtime.barrier("checkpoint exported")
    return files


@contextlib.contextmanager
def complete(directory: Path) -> Iterator[Path]:
    """A folder beside `directory` that takes its place at the end; if anything fails, nothing of it is left."""
    part = directory.with_name(f"{directory.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        if directory.exists():
            directory.rmdir()
        part.replace(directory)
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"out={str(directory)!r}: cannot be written ({error.strerror}); name another") from error
        raise


def plan(stored: Stored, width: str, mxfp4: bool) -> list[Planned]:
    """The tensors written for one of the table."""
    shape = stored.shapes[0]
    if stored.routed and mxfp4:
        out, inner = shape
        check(inner % GROUP == 0, f"{stored.name} width", inner, f"must be a multiple of {GROUP} to be MXFP4")
        return [Planned(f"{stored.name}_packed", "U8", (out, inner // 2)),
                Planned(f"{stored.name}_scale", "U8", (out, inner // GROUP))]
    return [Planned(stored.name, "F32" if stored.dtype == "F32" else width, shape)]


def values_of(stored: Stored, planned: list[Planned], arrays: dict, packed: bool) -> Iterator[np.ndarray]:
    """The values of `plan`, in its order."""
    if len(planned) == 2:
        part = stored.parts[0]
        if packed:
            for name, perm in (("codes", (0, 1)), ("scales", (1, 0))):
                piece = _piece(arrays[(*part.path[:-1], f"{part.path[-1]}_{name}")], part.at)
                yield np.asarray(piece).transpose(perm)
        else:
            yield from map(np.asarray, _packed(_piece(arrays[part.path], part.at)))
        return
    (tensor,) = planned
    out = np.zeros(tensor.shape, DTYPES[tensor.dtype])
    for part in stored.parts:
        inverse = tuple(int(i) for i in np.argsort(part.perm))
        piece = _cast(_piece(arrays[part.path], part.at), inverse, jnp.dtype(out.dtype))
        view = out.reshape(part.view)
        view[part.take or ...] = np.asarray(piece)
    yield out


def write(path: Path | None, tensors: list[Planned], values: Iterator[np.ndarray]) -> None:
    """One file of the next values; without a path they are only produced."""
    if path is None:
        for _ in zip(tensors, values):
            pass
        return
    with path.open("wb") as file:
        file.write(header_bytes(tensors))
        for tensor, value in zip(tensors, values):
            if value.shape != tensor.shape or value.dtype != DTYPES[tensor.dtype]:
                raise AssertionError(f"{tensor} planned, {value.dtype}{value.shape} made")
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())


def _piece(array: jax.Array, at: tuple[int, ...]) -> jax.Array:
    """array[at], on every device of the mesh that array lies on."""
    sharding = array.sharding
    whole = NamedSharding(sharding.mesh, jax.P()) if isinstance(sharding, NamedSharding) else None
    return _index(array, at, whole)


@functools.partial(jax.jit, static_argnums=2)
def _index(array, at, sharding):
    for i in at:
        array = jax.lax.dynamic_index_in_dim(array, i, 0, keepdims=False)
    return array if sharding is None else jax.lax.with_sharding_constraint(array, sharding)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cast(x, perm, dtype):
    return x.transpose(perm).astype(dtype)


@jax.jit
def _packed(w_IO):
    # rounded to bfloat16 first, as training with model.moe.quantise rounds
    return pack(w_IO.T.astype(jnp.bfloat16))

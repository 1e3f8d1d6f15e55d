"""What a sequence leaves behind for its next token: one pytree for a batch of sequences.

    MLA layer   latents: kv_lora_rank + rope_dim numbers per token, for `capacity` tokens per sequence
    KDA layer   recurrent state [H, K, V], at least float32, and the last taps - 1 inputs of the convolutions
    length      tokens seen, per sequence; what lies past it in the latents is never read

Attention residuals mix over depth within one token and leave nothing. Every array has the sequences in front, so that
a sequence is a row of every leaf: slots are rows, forking is copying a row, a snapshot is a row.

Latents are stored in the compute dtype, in bfloat16, or in int8 with one float32 scale per token for the latent and
one for the shared key part (`Latents`).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from trillium_moe.config import ConfigError, ModelConfig, check, check_choice
from trillium_moe.parallel import sharding
from trillium_moe.shapes import Array, Float, Int, PyTree

LATENT_DTYPES = ("", "float32", "bfloat16", "int8")  # "": the compute dtype
ALIGN = 64  # capacities are multiples of it, so that attention finds blocks that divide them


class Latents(NamedTuple):
    """Latents of one MLA layer. Pytree fields are untyped: arrays, shapes or specs."""

    values: Any  # [B, C, R + P]: the normed latent and the key part that all heads share
    scale: Any = None  # int8 only: [B, C, 2] float32, of the latent and of the key part

    def write(self, rows_S: Array | None, position_ST: Array, x_STX: Float[Array, "S T X"], split: int) -> Latents:
        """Puts tokens at their positions; those at positions past the capacity are left out."""
        rows = _rows(rows_S, x_STX)[:, None]
        put = lambda to, x: to.at[rows, position_ST].set(x.astype(to.dtype), mode="drop", unique_indices=True)
        if self.scale is None:
            return Latents(put(self.values, x_STX))
        values, scale = quantise(x_STX, split)
        return Latents(put(self.values, values), put(self.scale, scale))

    def read(self, rows_S: Array | None, start: int | Array, size: int, dtype: Any, split: int) -> Array:
        """Tokens [start, start + size) of some sequences (None: of all), [S, size, R + P], as `dtype`."""

        def part(x):
            if rows_S is None:
                return x if size == x.shape[1] else jax.lax.dynamic_slice_in_dim(x, start, size, 1)
            # one gather of what is asked for: taking whole rows first would copy them
            return jax.vmap(lambda row: jax.lax.dynamic_slice(x, (row, start, 0), (1, size, x.shape[2]))[0])(rows_S)

        values = part(self.values)
        if self.scale is None:
            return values.astype(dtype)
        latent, key = jnp.split(values.astype(jnp.float32), [split], axis=-1)
        scale = part(self.scale)
        return jnp.concatenate([latent * scale[..., :1], key * scale[..., 1:]], axis=-1).astype(dtype)


class Recurrent(NamedTuple):
    """State of one KDA layer."""

    state: Any  # [B, H, K, V], at least float32
    taps: Any  # [B, taps - 1, 3, H, K]: inputs of the convolutions on q, k, v, oldest first


class Cache(NamedTuple):
    """State of a batch of sequences, by layer of each kind."""

    length: Any  # [B] int32
    mla: tuple[Latents, ...]
    kda: tuple[Recurrent, ...]
    mtp: Latents | None = None  # of the multi-token-prediction layer

    @property
    def capacity(self) -> int:
        """Tokens that each sequence has room for."""
        latents = (*self.mla, *([self.mtp] if self.mtp else []))
        return latents[0].values.shape[1] if latents else 1 << 30


def quantise(x_X: Float[Array, "*b X"], split: int) -> tuple[Int[Array, "*b X"], Float[Array, "*b 2"]]:
    """int8, a scale for x[:split] and one for the rest: a step is 1/127 of the largest value, the error half of it."""
    parts = jnp.split(x_X.astype(jnp.float32), [split], axis=-1)
    scales = [jnp.maximum(jnp.abs(p).max(-1, keepdims=True), 1e-30) / 127 for p in parts]
    values = [jnp.round(p / s).astype(jnp.int8) for p, s in zip(parts, scales)]
    return jnp.concatenate(values, -1), jnp.concatenate(scales, -1)


def _rows(rows_S, x):
    return jnp.arange(x.shape[0]) if rows_S is None else rows_S


def abstract_cache(
    config: ModelConfig, n_sequences: int, capacity: int, latents: str = "", *, mtp: bool = False
) -> Cache:
    """The cache as shapes; nothing is allocated.

    Args:
      capacity: tokens per sequence, rounded up to a multiple of ALIGN.
      latents: one of LATENT_DTYPES.
      mtp: with latents of the multi-token-prediction layer.

    Raises:
      ConfigError: for an argument out of range, or a model whose router looks ahead.
    """
    check(n_sequences > 0, "infer.slots", n_sequences, "must be greater than 0")
    check(capacity > 0, "infer.capacity", capacity, "must be greater than 0")
    check_choice("infer.latents", latents, LATENT_DTYPES)
    check("moe" not in config.ffns or config.moe.balancing != "batch_threshold", "model.moe.balancing",
          config.moe.balancing, "lets later tokens choose an earlier one's experts, so the model cannot generate; "
          "train with another rule")
    check(not mtp or config.n_mtp > 0, "model.n_mtp", config.n_mtp, "speculation needs a model with n_mtp=1")
    B, C = n_sequences, -(-capacity // ALIGN) * ALIGN
    compute = jnp.dtype(config.dtypes.compute)
    shape = jax.ShapeDtypeStruct

    def of_mla():
        width = config.mla.kv_lora_rank + config.mla.rope_dim
        scale = shape((B, C, 2), jnp.float32) if latents == "int8" else None
        return Latents(shape((B, C, width), jnp.dtype(latents or compute)), scale)

    def of_kda():
        c = config.kda
        state = shape((B, c.n_heads, c.head_dim, c.head_dim), jnp.promote_types(compute, jnp.float32))
        return Recurrent(state, shape((B, max(c.conv_size - 1, 0), 3, c.n_heads, c.head_dim), compute))

    layers = lambda kind, make: tuple(make() for mixer in config.mixers if mixer == kind)
    return Cache(shape((B,), jnp.int32), layers("mla", of_mla), layers("kda", of_kda), of_mla() if mtp else None)


def nbytes(cache: PyTree) -> int:
    """Bytes of all leaves."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(cache))


def token_bytes(cache: Cache) -> float:
    """Bytes per token of context: the latents'."""
    return nbytes((cache.mla, cache.mtp)) / (cache.length.shape[0] * cache.capacity) if cache.mla or cache.mtp else 0.0


def full_head_bytes(config: ModelConfig) -> int:
    """Bytes per token of keys and values of all heads in bfloat16, were every layer plain attention of MLA's sizes."""
    c = config.mla
    return config.n_layers * c.n_heads * (c.nope_dim + c.rope_dim + c.v_dim) * 2


def check_memory(cache: Cache, device: jax.Device) -> None:
    """Raises ConfigError if the cache does not fit into what is free on a device that says how much that is."""
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return
    free, need = stats["bytes_limit"] - stats.get("bytes_in_use", 0), nbytes(cache)
    B, C = cache.length.shape[0], cache.capacity
    if need > free:
        raise ConfigError(f"config infer.slots={B}, infer.capacity={C}: the cache takes {need / 2**30:.2f} GiB and "
                          f"{free / 2**30:.2f} GiB are free on {device.device_kind}; lower one of them")


def make_cache(
    config: ModelConfig, n_sequences: int, capacity: int, latents: str = "", *, mtp: bool = False
) -> Cache:
    """An empty cache, laid out by `cache_specs` on the mesh in context. Raises as `abstract_cache`, `check_memory`."""
    abstract = abstract_cache(config, n_sequences, capacity, latents, mtp=mtp)
    mesh = sharding.current_mesh()
    if mesh is None:
        check_memory(abstract, jax.devices()[0])
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
    check(mesh.shape.get("context", 1) == 1, "mesh.context", mesh.shape.get("context", 1),
          "must be 1 to generate: every device attends over whole contexts")
    zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
    return jax.jit(zeros, out_shardings=cache_specs(abstract, dict(mesh.shape)))()


def cache_specs(cache: Cache, sizes: dict[str, int]) -> Cache:
    """How the cache lies on a mesh: sequences over data and expert, KDA heads over model, latents (which all heads
    share) whole."""
    batch: tuple[str, ...] = ()
    for axis in ("replica", "data", "expert"):
        taken = math.prod(sizes.get(a, 1) for a in (*batch, axis))
        if sizes.get(axis, 1) > 1 and cache.length.shape[0] % taken == 0:
            batch = (*batch, axis)
    rows = batch or None
    latents = lambda x: Latents(P(rows), None if x.scale is None else P(rows))

    def recurrent(x):
        model = "model" if sizes.get("model", 1) > 1 and x.state.shape[1] % sizes["model"] == 0 else None
        return Recurrent(P(rows, model), P(rows, None, None, model))

    return Cache(P(rows), tuple(map(latents, cache.mla)), tuple(map(recurrent, cache.kda)),
                 None if cache.mtp is None else latents(cache.mtp))


# --- rows


def copy_rows(cache: Cache, source_S: Int[Array, " S"], target_S: Int[Array, " S"]) -> Cache:
    """The cache with sequences copied into other rows; targets past the last row are left out."""
    return jax.tree.map(lambda x: x.at[target_S].set(x[source_S], mode="drop"), cache)


def clear_rows(cache: Cache, rows_S: Int[Array, " S"]) -> Cache:
    """The cache with some sequences empty again. Latents stay: what lies past the length is never read."""
    empty = lambda tree: jax.tree.map(lambda x: x.at[rows_S].set(0, mode="drop"), tree)
    return cache._replace(length=empty(cache.length), kda=empty(cache.kda))

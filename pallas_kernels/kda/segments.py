"""Packed rows rearranged so that every segment starts a chunk of its own, for one state per segment."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def segment_layout(ids_BT: Int[Array, "B T"], S: int, C: int) -> tuple[Int[Array, "B T"], Int[Array, "B N"]]:
    """Where each token goes if every segment starts a chunk, and the segment of each chunk.

    N = ceil(T / C) + S chunks always suffice. Tokens of no segment go past the end; spare chunks, which hold no token,
    count as the last segment's.
    """
    T = ids_BT.shape[1]
    N = -(-T // C) + S
    segments_S = jnp.arange(S, dtype=ids_BT.dtype)
    start_BS, stop_BS = (
        jax.vmap(functools.partial(jnp.searchsorted, side=side), (0, None))(ids_BT, segments_S)
        for side in ("left", "right")
    )
    chunks_BS = -(-(stop_BS - start_BS) // C)
    end_BS = jnp.cumsum(chunks_BS, axis=-1)
    move_BS = (end_BS - chunks_BS) * C - start_BS
    place_BT = jnp.take_along_axis(move_BS, jnp.clip(ids_BT, 0, S - 1), axis=1) + jnp.arange(T)
    place_BT = jnp.where((ids_BT >= 0) & (ids_BT < S), place_BT, N * C)
    slot_BN = jax.vmap(functools.partial(jnp.searchsorted, side="right"), (0, None))(end_BS, jnp.arange(N))
    return place_BT, jnp.minimum(slot_BN, S - 1)


def spread(x_BT: Array, place_BT: Int[Array, "B T"], length: int, fill: float = 0.0) -> Array:
    """Moves every token to its place in rows of the given length. A place without a token holds `fill`."""
    one_row = lambda x, place: jnp.full((length, *x.shape[1:]), fill, x.dtype).at[place].set(x, mode="drop")
    return jax.vmap(one_row)(x_BT, place_BT)


def collect(x_BT: Array, place_BT: Int[Array, "B T"]) -> Array:
    """Undoes `spread`. A token of no segment gets zeros."""
    return jax.vmap(lambda x, place: x.at[place].get(mode="fill", fill_value=0))(x_BT, place_BT)

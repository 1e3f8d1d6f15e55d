"""MXFP4 matrices as bfloat16 ones for the Hopper kernels, where many rows share a matrix: one pass over memory.

Two codes are turned into two bfloat16 numbers at once, by integer operations on words of 32 bits. Nibbles i and i + 4
of a word are such a pair, so the result has the 8 codes of a word in the order 0 4 1 5 2 6 3 7; rows that are
multiplied by it are put into that order (`shuffled`), which costs less than putting matrices back.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.mxfp4 import GROUP, Packed

PAIRS, NAN = 4, 0x7FC0  # pairs of a word; bfloat16's


def unpack_shuffled(w: Packed):
    """bfloat16 [*b, N, K] of packed [*b, K, N]: as the codes lie, every 8 of K in the order of `shuffled`.

    Exact for powers of two from 2^-125 to 2^125. Larger ones, which no product survives, and byte 255 give nan; under
    smaller ones a number is off by less than 2^-124.
    """
    words = lax.bitcast_convert_type(w.codes.reshape(*w.codes.shape[:-1], -1, 4), jnp.uint32)[..., None]
    scale = lax.optimization_barrier(jnp.swapaxes(w.scales, -1, -2))  # turned as bytes, not as what is made of them
    scale = jnp.repeat(scale.astype(jnp.uint32), GROUP // 8, axis=-1)[..., None]
    u32 = jnp.uint32
    turned = words >> (4 * jnp.arange(PAIRS, dtype=u32))  # nibble i to bits 0-3, nibble i + 4 to bits 16-19
    # in both halves: a code's magnitude m to bits 6-8, the last two of the exponent and the first of the mantissa
    m, sign = (turned << 6) & u32(0x01C001C0), (turned << 12) & u32(0x80008000)
    normal = (m | m >> 1) & u32(0x00800080)  # bit 7: m > 1
    some = (normal | m << 1) & u32(0x00800080)  # bit 7: m > 0
    m = m & (normal >> 1 | u32(0x01800180))  # a half is a power of two: no mantissa
    bits = sign | (some * (jnp.maximum(scale, 1) - 1) + m)
    bits = jnp.where(scale > 252, u32(NAN << 16 | NAN), bits)
    # a barrier, or each number of a pair is computed on its own; what follows only renames bytes
    pairs = lax.bitcast_convert_type(lax.optimization_barrier(bits), jnp.bfloat16)
    return pairs.reshape(*w.codes.shape[:-1], -1)


def shuffled(x):
    """[*b, K] with every 8 of the last axis in the order of `unpack_shuffled`."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, 2, PAIRS), -1, -2).reshape(x.shape)


def unshuffled(x):
    """Undoes `shuffled`."""
    return jnp.swapaxes(x.reshape(*x.shape[:-1], -1, PAIRS, 2), -1, -2).reshape(x.shape)

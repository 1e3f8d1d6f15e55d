"""Quantisation-aware training of routed experts: weights MXFP4, the inputs of their matrices MXFP8 (Kimi K3, 4.5).

Forward computes with the rounded values, backward passes the gradient through unchanged (straight-through); the master
weights stay what the optimizer keeps. Training, prefill and decoding call the same two functions, and `interop.export`
packs weights by the first, so a model is sampled and released as it was trained.

What the report leaves open is decided here: E4M3 for MXFP8, scales from the largest magnitude of each 32 elements along
the contraction, rounding to nearest even, gradients of saturated values passed as well.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.mxfp4 import GROUP, pack, unpack
from pallas_kernels.rounding import widened
from trillium_moe.shapes import Array, Float


@jax.custom_vjp
def mxfp4_weights(w_EIO: Float[Array, "*b I O"]) -> Float[Array, "*b I O"]:
    """The matrices as MXFP4 has them, in their dtype.

    Quantised from bfloat16, whatever the master weights are: sharded training and generation hand out that, and it is
    what a checkpoint holds.
    """
    codes, scales = pack(jnp.swapaxes(w_EIO.astype(jnp.bfloat16), -1, -2))
    return jnp.swapaxes(unpack(codes, scales, w_EIO.dtype), -1, -2)


@jax.custom_vjp
def mxfp8(x: Float[Array, "*b I"]) -> Float[Array, "*b I"]:
    """Activations as MXFP8 has them: E4M3, one power of two per 32 elements, saturating at 448."""
    wide = widened(x).astype(jnp.float32).reshape(*x.shape[:-1], -1, GROUP)
    largest = jnp.abs(wide).max(-1, keepdims=True)
    exponent = (jax.lax.bitcast_convert_type(largest, jnp.uint32) >> 23).astype(jnp.int32)
    exponent = jnp.clip(exponent - 8, 1, 245)  # the largest magnitude lands in [256, 512)
    power = lambda e: jax.lax.bitcast_convert_type(e << 23, jnp.float32)  # 2^(e - 127)
    scaled = jnp.clip(wide * power(254 - exponent), -448, 448)  # nan stays nan
    return (_e4m3(scaled) * power(exponent)).reshape(x.shape).astype(x.dtype)


def _e4m3(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """What float8_e4m3fn holds of float32 numbers up to 448.

    Not a cast there and back: on GPUs XLA leaves out both (`pallas_kernels.rounding`), and nothing is rounded.
    """
    fixed = jnp.round(x * 512) / 512  # below the normal numbers, steps of 2^-9; halves to even
    return jnp.where(jnp.abs(x) < 2**-6, fixed, jax.lax.reduce_precision(x, 8, 3))


mxfp4_weights.defvjp(lambda w: (mxfp4_weights(w), None), lambda _, d: (d,))
mxfp8.defvjp(lambda x: (mxfp8(x), None), lambda _, d: (d,))

"""MXFP4 matrices: E2M1 codes, two per byte, one power of two (E8M0) per 32 elements (OCP Microscaling 1.0).

Linear weights are released [out, in], packed along the input:

    codes   uint8 [N, K / 2]    element 2j of a row in the low nibble of byte j, element 2j + 1 in the high one
    scales  uint8 [N, K / 32]   byte s means 2^(s - 127); 255 means not a number

A code's bit 3 is the sign, bits 0-2 the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from pallas_kernels.rounding import widened

GROUP = 32  # elements that share a scale
_BITS = {2: (jnp.uint16, 7), 4: (jnp.uint32, 23)}  # bytes of a float: its bits, those of its mantissa


@jax.tree_util.register_pytree_node_class
class Packed:
    """A stack of packed matrices that stands where arrays [*b, K, N] do. A pytree.

    codes: uint8 [*b, N, K / 2], as released.
    scales: uint8 [*b, K / 32, N], transposed: a kernel fetches those of many columns at once.
    """

    def __init__(self, codes: Any, scales: Any):
        self.codes, self.scales = codes, scales

    def tree_flatten(self):
        return (self.codes, self.scales), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)

    @property
    def shape(self) -> tuple[int, ...]:
        """[*b, K, N]."""
        *b, N, half = self.codes.shape
        return (*b, 2 * half, N)

    def astype(self, dtype) -> Packed:
        """Itself: `unpack` gives values in the dtype of whatever they multiply."""
        return self

    def unpack(self, dtype) -> Float[Array, "*b K N"]:
        return jnp.swapaxes(unpack(self.codes, jnp.swapaxes(self.scales, -1, -2), dtype), -1, -2)


def unpack(
    codes: UInt8[Array, "*b N half"], scales: UInt8[Array, "*b N groups"], dtype=jnp.float32
) -> Float[Array, "*b N K"]:
    """The exact values in float32, which holds them all; in bfloat16 too, apart from those below 2^-133.

    Built from bits, because XLA's CPU and TPU backends flush what float arithmetic gives below 2^-126.

    Raises:
      ValueError: codes and scales are not of one matrix.
    """
    if codes.shape[-1] * 2 != scales.shape[-1] * GROUP:
        raise ValueError(f"codes {codes.shape} and scales {scales.shape} do not fit groups of {GROUP}")
    dtype = jnp.dtype(dtype)
    if dtype.itemsize not in _BITS or dtype == jnp.float16:
        return unpack(codes, scales).astype(dtype)
    bits, mantissa = _BITS[dtype.itemsize]
    pairs = (codes[..., None] >> jnp.array([0, 4], jnp.uint8)) & 15  # a stack would be an array of its own on GPUs
    nibble = pairs.reshape(*scales.shape, GROUP).astype(jnp.int32)
    scale = scales[..., None].astype(jnp.int32)
    m = nibble & 7
    # value = (2 + odd) 2^(m >> 1) 2^(s - 129) from m = 2 on, (0 or 1) 2^(s - 128) below
    exponent = jnp.where(m < 2, scale - 1, scale + (m >> 1) - 1)  # biased, of the leading bit
    fraction = jnp.where(m < 2, 0, (m & 1) << (mantissa - 1))
    normal = (exponent << mantissa) | fraction
    whole = (1 << mantissa) | fraction  # with its leading bit, for the subnormal range
    small = jnp.clip(1 - exponent, 0, mantissa)
    value = jnp.where(exponent > 0, normal, whole >> small)
    infinity = 255 << mantissa
    value = jnp.where(exponent > 254, infinity, value)
    value = jnp.where(m == 0, 0, value) | ((nibble >> 3) << (8 * dtype.itemsize - 1))
    value = jnp.where(scale == 255, infinity | (1 << (mantissa - 1)), value)
    out = jax.lax.bitcast_convert_type(value.astype(bits), dtype)
    return out.reshape(*codes.shape[:-1], -1)


def pack(w: Float[Array, "*b N K"]) -> tuple[UInt8[Array, "*b N half"], UInt8[Array, "*b N groups"]]:
    """The nearest codes (ties to even) at the scale 2^(floor(log2 largest magnitude) - 2), so up to 8 saturates at 6.

    Returns:
      codes, scales. A group of zeros has scale byte 0; one that holds nan or infinity has 255, which unpacks to nan.

    Raises:
      ValueError: K is not a multiple of 32.
    """
    if w.shape[-1] % GROUP:
        raise ValueError(f"matrix {w.shape}: the last axis must be a multiple of {GROUP} to be MXFP4")
    x = widened(w).astype(jnp.float32).reshape(*w.shape[:-1], -1, GROUP)
    size = jnp.abs(x)
    exponent = (jax.lax.bitcast_convert_type(size.max(-1), jnp.uint32) >> 23).astype(jnp.int32)
    scale = jnp.where(exponent == 255, 255, jnp.maximum(exponent - 2, 0))
    up = jax.lax.bitcast_convert_type(jnp.clip(254 - scale, 0, 254) << 23, jnp.float32)  # 2^(127 - scale), exact
    y = size * up[..., None]
    # between 0, .5, 1, 1.5, 2, 3, 4, 6; a tie goes to the even code
    code = sum((y > limit).astype(jnp.uint8) for limit in (0.25, 1.25, 2.5, 5.0))
    code += sum((y >= limit).astype(jnp.uint8) for limit in (0.75, 1.75, 3.5))
    code |= jnp.signbit(x).astype(jnp.uint8) << 3
    code = code.reshape(*w.shape[:-1], -1, 2)
    return code[..., 0] | (code[..., 1] << 4), scale.astype(jnp.uint8)

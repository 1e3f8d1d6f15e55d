"""RMS normalisation (model.md 2.2)."""

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import rounded, scaled
from trillium_moe.model.params import wide
from trillium_moe.shapes import Array, Float


def rms_norm(
    x: Float[Array, "... D"], weight_D: Float[Array, " D"] | None = None, eps: float = 1e-5
) -> Float[Array, "... D"]:
    """x / rms(x), in x's dtype, times the weight. Statistics in float32: a bfloat16 mean of squares is two digits."""
    y = wide(x)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return rounded(y, x.dtype) if weight_D is None else scaled(y, weight_D, x.dtype)

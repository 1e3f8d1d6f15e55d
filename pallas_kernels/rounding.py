"""Roundings that stay.

XLA leaves out a cast to fewer bits whose result is widened again, if both meet in one program
(`xla_allow_excess_precision`). So whether a number is rounded hangs on what surrounds it, and two forms of the same
sums, as training and generation are, go on with different numbers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rounded(x: Float[Array, "*s"], dtype: Any) -> Float[Array, "*s"]:
    """x in a dtype of float32's range, for certain."""
    return _as(x, dtype).astype(dtype)


def widened(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """x in at least float32, as its own dtype holds it for certain."""
    return _as(x.astype(jnp.promote_types(x.dtype, jnp.float32)), x.dtype)


def scaled(x: Float[Array, "*s D"], weight_D: Float[Array, " D"], dtype: Any) -> Float[Array, "*s D"]:
    """x times a weight in a dtype: both rounded to it, and their product."""
    weight_D = _as(weight_D.astype(jnp.promote_types(weight_D.dtype, x.dtype)), dtype)
    return rounded(_as(x, dtype) * weight_D.astype(x.dtype), dtype)


def _as(x, dtype):
    """x, of a wider dtype, with the bits of a narrower one."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant) if info.bits < jnp.finfo(x.dtype).bits else x

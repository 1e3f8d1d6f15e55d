"""Grouped matmul by its definition: every row looks up the matrix of its group."""

import jax
import jax.numpy as jnp

from pallas_kernels.mxfp4 import Packed


def grouped_matmul(lhs_MK, rhs_GKN, group_sizes_G, *, align, dtype=None):
    group_M = jnp.searchsorted(jnp.cumsum(group_sizes_G), jnp.arange(lhs_MK.shape[0]), side="right")
    rhs_GKN = rhs_GKN.unpack(lhs_MK.dtype) if isinstance(rhs_GKN, Packed) else rhs_GKN
    rhs_MKN = jnp.take(rhs_GKN, group_M, axis=0, mode="fill", fill_value=0)
    lhs_MK = jnp.where((group_M < rhs_GKN.shape[0])[:, None], lhs_MK, 0)
    wide = jnp.promote_types(lhs_MK.dtype, jnp.float32)
    out = jnp.einsum("mk,mkn->mn", lhs_MK, rhs_MKN, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST)
    return out.astype(dtype or lhs_MK.dtype)

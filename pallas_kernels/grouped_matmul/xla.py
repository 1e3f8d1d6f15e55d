"""Grouped matmul as a batched matmul over blocks of rows that belong to one group each.

The cost does not grow with the number of groups: a block looks its matrix up. `jax.lax.ragged_dot` on CPU and (by
default) on GPU multiplies every row by every group's matrix. The gradient of rhs is a sum over blocks, never a dense
one-hot product.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.products import grouped
from pallas_kernels.mxfp4 import Packed

_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def grouped_matmul(lhs_MK, rhs_GKN, group_sizes_G, *, align, dtype):
    return grouped(XlaProducts(align), lhs_MK, rhs_GKN, group_sizes_G, dtype)


@dataclasses.dataclass(frozen=True)
class XlaProducts:
    """`products.Products` for groups of a multiple of `align` rows."""

    align: int

    def rows(self, lhs, rhs, group_sizes_G, transposed=False, dtype=None):
        M, G = lhs[0].shape[0], rhs[0].shape[0]
        wide, group_B = jnp.promote_types(lhs[0].dtype, jnp.float32), self._group(M, group_sizes_G)
        spec = "bck,bfk->bcf" if transposed else "bck,bkf->bcf"
        if isinstance(rhs[0], Packed):
            products = [self._unpacked(x, y, group_B, transposed) for x, y in zip(lhs, rhs)]
        else:
            take = lambda rhs_GKN: jnp.take(rhs_GKN, group_B, axis=0, mode="clip")
            products = [_dot(spec, self._split(x), take(y), preferred_element_type=wide) for x, y in zip(lhs, rhs)]
        out = jnp.where((group_B < G)[:, None, None], sum(products[1:], products[0]), 0)
        return out.reshape(M, -1).astype(dtype or lhs[0].dtype)

    def _unpacked(self, lhs_MK, rhs_GKN, group_B, transposed):
        """Products of blocks of rows, [B, C, N], one after the other: one matrix is unpacked at a time."""
        wide = jnp.promote_types(lhs_MK.dtype, jnp.float32)
        spec = "ck,fk->cf" if transposed else "ck,kf->cf"

        def block(args):
            x_CK, group = args
            one = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, group, 0, keepdims=False), rhs_GKN)
            return _dot(spec, x_CK, one.unpack(lhs_MK.dtype), preferred_element_type=wide)

        return jax.lax.map(block, (self._split(lhs_MK), group_B))

    def groups(self, lhs_MK, d_MN, group_sizes_G, dtype):
        group_B = self._group(lhs_MK.shape[0], group_sizes_G)
        wide = jnp.promote_types(lhs_MK.dtype, jnp.float32)
        per_block = _dot("bck,bcf->bkf", self._split(lhs_MK), self._split(d_MN), preferred_element_type=wide)
        zeros = jnp.zeros((group_sizes_G.shape[0], lhs_MK.shape[1], d_MN.shape[1]), wide)
        return zeros.at[group_B].add(per_block, mode="drop", indices_are_sorted=True).astype(dtype)

    def _split(self, x_MK):
        return x_MK.reshape(-1, self.align, x_MK.shape[-1])

    def _group(self, M, group_sizes_G):
        """Group of every block of rows; past the last group the number of groups."""
        starts_B = jnp.arange(M // self.align) * self.align
        return jnp.searchsorted(jnp.cumsum(group_sizes_G), starts_B, side="right", method="compare_all")

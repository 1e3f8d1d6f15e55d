"""The three products every implementation of the grouped matmul has, and the gradient made of them."""

from __future__ import annotations

import functools
from typing import Protocol, runtime_checkable

import jax

from pallas_kernels.mxfp4 import Packed


@runtime_checkable
class Products(Protocol):
    """An implementation for one kind of call; hashable. Groups are consecutive rows, multiples of its alignment."""

    def rows(self, lhs, rhs, group_sizes_G, transposed=False, dtype=None):
        """Sum over i of lhs[i] [M, K_i] times rhs[i] [G, K_i, N], or [G, N, K_i] transposed, by groups: [M, N]
        in dtype, or else lhs'.

        rhs may be packed if the implementation's function takes that.
        Rows past the last group are zero, whatever lhs holds there.
        """

    def groups(self, lhs_MK, d_MN, group_sizes_G, dtype):
        """lhs[rows of g]^T d[rows of g] of every group g: [G, K, N] in dtype, exact zeros for a group without rows."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def grouped(products: Products, lhs_MK, rhs_GKN, group_sizes_G, dtype=None):
    """`api.grouped_matmul` by `products`; the gradient of rhs has rhs' dtype, accumulated and rounded once."""
    return products.rows([lhs_MK], [rhs_GKN.astype(lhs_MK.dtype)], group_sizes_G, dtype=dtype)


def _forward(products, lhs_MK, rhs_GKN, group_sizes_G, dtype):
    return grouped(products, lhs_MK, rhs_GKN, group_sizes_G, dtype), (lhs_MK, rhs_GKN, group_sizes_G)


def _backward(products, dtype, saved, d_MN):
    lhs_MK, rhs_GKN, group_sizes_G = saved
    d_MN = d_MN.astype(lhs_MK.dtype)  # as the products take it
    d_lhs_MK = products.rows([d_MN], [rhs_GKN.astype(lhs_MK.dtype)], group_sizes_G, transposed=True)
    return d_lhs_MK, gradient_of(products, rhs_GKN, lhs_MK, d_MN, group_sizes_G), None


def refuse_packed(*matrices) -> None:
    """Raises NotImplementedError if any of them is packed."""
    if any(isinstance(x, Packed) for x in matrices):
        raise NotImplementedError("MXFP4 matrices; implementation xla multiplies them")


def gradient_of(products: Products, rhs_GKN, lhs_MK, d_MN, group_sizes_G):
    """Of the matrices, in their dtype; packed ones have none."""
    if isinstance(rhs_GKN, Packed):
        return None
    return products.groups(lhs_MK, d_MN, group_sizes_G, rhs_GKN.dtype)


grouped.defvjp(_forward, _backward)

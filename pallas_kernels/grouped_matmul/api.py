"""The public grouped matmul."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.grouped_matmul import pallas_gpu, pallas_tpu, reference, xla
from pallas_kernels.mxfp4 import Packed

IMPLEMENTATIONS = {
    "reference": reference.grouped_matmul,
    "xla": xla.grouped_matmul,
    "pallas_gpu": pallas_gpu.grouped_matmul,
    "pallas_tpu": pallas_tpu.grouped_matmul,
}


def grouped_matmul(
    lhs_MK: Float[Array, "M K"],
    rhs_GKN: Float[Array, "G K N"] | Packed,
    group_sizes_G: Int[Array, " G"],
    *,
    align: int,
    dtype: Any = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Multiplies consecutive groups of rows of `lhs` by their own matrices.

    Rows [start_g, start_g + size_g) of the result are those rows of lhs times rhs[g]; rows past the last group are
    zero, whatever lhs holds there. Differentiable in lhs and rhs; a group without rows has an exactly zero gradient.

    Args:
      lhs_MK: rows, sorted by group.
      rhs_GKN: one matrix per group, rounded to lhs' dtype; its gradient has the dtype given. Packed matrices are
        unpacked where they are multiplied and have no gradient.
      group_sizes_G: rows per group, each a multiple of `align`; their sum is at most M.
      align: the promised divisor of every group size, so that no block of `align` rows straddles two groups.
      dtype: of the result; None: lhs'. Products accumulate in at least float32 and are rounded to it once.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      [M, N].

    Raises:
      ValueError: `align` does not divide M.
      NotImplementedError: the implementation asked for does not serve the call.
    """
    if lhs_MK.shape[0] % align:
        raise ValueError(f"grouped_matmul: align={align} must divide the {lhs_MK.shape[0]} rows of lhs; pad lhs")
    how = {"align": align, "dtype": jnp.dtype(dtype or lhs_MK.dtype)}
    return dispatch("grouped_matmul", IMPLEMENTATIONS, implementation, lhs_MK, rhs_GKN, group_sizes_G, **how)

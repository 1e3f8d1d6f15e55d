"""Grouped matmul on TPUs (Pallas Mosaic-TPU).

Rows are cut into blocks regardless of groups. The grid walks visits, pairs of a group and a block that share rows,
which are listed before the kernel runs and prefetched as scalars. What belongs to other groups is masked by select, so
groups may start anywhere and their neighbours may hold anything.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import target
from pallas_kernels.grouped_matmul.products import grouped, refuse_packed

LANES = 128
VMEM = 32 * 2**20  # bytes that every TPU since v5 has for a kernel
_BUFFERS = 24 * 2**20  # of them, for blocks on their way in and out


def grouped_matmul(lhs_MK, rhs_GKN, group_sizes_G, *, align, dtype):
    """`api.grouped_matmul`; any alignment.

    Raises:
      NotImplementedError: no TPU, no float32 or bfloat16, or K or N is not a multiple of 128.
    """
    refuse_packed(rhs_GKN)
    return grouped(products(lhs_MK, rhs_GKN.shape[1:]), lhs_MK, rhs_GKN, group_sizes_G, dtype)


def products(lhs_MK, widths: tuple[int, ...]) -> TpuProducts:
    """The products for such rows and for matrices of these widths, or NotImplementedError."""
    if target()[0] != "tpu":
        raise NotImplementedError("a TPU is needed")
    if lhs_MK.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"rows are {lhs_MK.dtype}; bfloat16 and float32 are supported")
    if any(width % LANES for width in widths):
        raise NotImplementedError(f"K, N = {widths}; multiples of {LANES} are supported")
    return TpuProducts()


@dataclasses.dataclass(frozen=True)
class TpuProducts:
    """`products.Products`."""

    interpret: bool = False

    def rows(self, lhs, rhs, group_sizes_G, transposed=False, dtype=None):
        return rows_product(lhs, rhs, group_sizes_G, transposed=transposed, dtype=dtype, interpret=self.interpret)

    def groups(self, lhs_MK, d_MN, group_sizes_G, dtype):
        return groups_product(lhs_MK, d_MN, group_sizes_G, dtype, interpret=self.interpret)


def visits(group_sizes_G, M: int, block: int, every_group: bool):
    """(count, [4, V] of group, row block, first row, end): every pair of a group and a block of rows that share some.

    In order of groups, so of blocks as well. With every_group a group without rows has a visit too; else the rows after
    the last group are visited as a group of their own, number G, so that every block is. Past the count the last visit
    is repeated.
    """
    sizes = group_sizes_G.astype(jnp.int32)
    if not every_group:
        sizes = jnp.append(sizes, M - sizes.sum())
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    blocks = -(-M // block)
    first = jnp.minimum(starts // block, blocks - 1)
    n = jnp.where(sizes > 0, (ends - 1) // block - first + 1, int(every_group))
    visit_ends = jnp.cumsum(n)
    v = jnp.minimum(jnp.arange(blocks + sizes.shape[0]), visit_ends[-1] - 1)
    group = jnp.searchsorted(visit_ends, v, side="right", method="compare_all")
    row_block = first[group] + v - (visit_ends - n)[group]
    work = jnp.stack([group, row_block, starts[group], ends[group]])
    return visit_ends[-1:].astype(jnp.int32), work.astype(jnp.int32)


def _divisor(size: int, most: int) -> int:
    """The largest multiple of LANES that divides size and is at most `most`."""
    return max(d for d in range(LANES, max(most, LANES) + 1, LANES) if size % d == 0)


def _row_block(M: int, G: int) -> int:
    """A matrix fetched for 128 rows waits for memory; a group with fewer rows than that gains nothing from more."""
    return 128 if M < 384 * G else 256


def _own_rows(work, v, block: int):
    """Mask [block, 1] of the rows that visit v owns."""
    row = work[1, v] * block + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
    return (row >= work[2, v]) & (row < work[3, v])


def _precision(dtype):
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None  # else one bfloat16 pass


def rows_product(lhs, rhs, group_sizes_G, *, transposed: bool = False, dtype=None, interpret: bool = False):
    """Sum over i of lhs[i] [M, K_i] times rhs[i] [G, K_i, N], or [G, N, K_i] transposed, by groups of rows."""
    (M, _), G, N = lhs[0].shape, rhs[0].shape[0], rhs[0].shape[1 if transposed else 2]
    operand, block = lhs[0].dtype, _row_block(M, G)
    tn = _divisor(N, 512)
    room = _BUFFERS // (2 * operand.itemsize * len(lhs)) // (block + tn)  # two buffers of each operand
    tk = [_divisor(x.shape[1], room) for x in lhs]
    steps = [x.shape[1] // t for x, t in zip(lhs, tk)]
    begins = [sum(steps[:i]) for i in range(len(steps))]
    count, work = visits(group_sizes_G, M, block, every_group=False)

    def kernel(count, work, *refs):
        *operands, out, acc = refs
        v, k = pl.program_id(1), pl.program_id(2)

        @pl.when(v < count[0])
        def _():
            @pl.when(k == 0)
            def _():
                acc[...] = jnp.zeros_like(acc)

            for i, (begin, n) in enumerate(zip(begins, steps)):

                @pl.when((work[0, v] < G) & (k >= begin) & (k < begin + n))
                def _(i=i):
                    dims = ((1,), (1 if transposed else 0,)), ((), ())
                    a, b = operands[i][...], operands[len(lhs) + i][...]
                    acc[...] += lax.dot_general(
                        a, b, dims, precision=_precision(operand), preferred_element_type=jnp.float32
                    )

            @pl.when(k == sum(steps) - 1)
            def _():
                seen = (v > 0) & (work[1, jnp.maximum(v - 1, 0)] == work[1, v])
                before = jnp.where(seen, out[...].astype(jnp.float32), 0)  # what an unseen block holds is anything
                out[...] = jnp.where(_own_rows(work, v, block), acc[...], before).astype(out.dtype)

    def at(i, k):
        return jnp.clip(k - begins[i], 0, steps[i] - 1)

    def lhs_at(i, n, v, k, count, work):
        return work[1, v], at(i, k)

    def rhs_at(i, n, v, k, count, work):
        group = jnp.minimum(work[0, v], G - 1)
        return (group, n, at(i, k)) if transposed else (group, at(i, k), n)

    index = range(len(lhs))
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((M, N), dtype or operand),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(N // tn, work.shape[1], sum(steps)),
            in_specs=[pl.BlockSpec((block, tk[i]), functools.partial(lhs_at, i)) for i in index]
            + [
                pl.BlockSpec((None, tn, tk[i]) if transposed else (None, tk[i], tn), functools.partial(rhs_at, i))
                for i in index
            ],
            out_specs=pl.BlockSpec((block, tn), lambda n, v, k, count, work: (work[1, v], n)),
            scratch_shapes=[pltpu.VMEM((block, tn), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        interpret=interpret,
    )(count, work, *lhs, *rhs)


def groups_product(lhs_MK, d_MN, group_sizes_G, dtype, *, interpret: bool = False):
    """lhs[rows of g]^T d[rows of g] of every group: [G, K, N]."""
    (M, K), N, G = lhs_MK.shape, d_MN.shape[1], group_sizes_G.shape[0]
    block = _row_block(M, G)
    tk, tn = _divisor(K, 1024), _divisor(N, 1024)
    count, work = visits(group_sizes_G, M, block, every_group=True)

    def kernel(count, work, lhs, d, out, acc):
        v = pl.program_id(2)
        group = work[0, v]

        @pl.when(v < count[0])
        def _():
            @pl.when((v == 0) | (work[0, jnp.maximum(v - 1, 0)] != group))
            def _():
                acc[...] = jnp.zeros_like(acc)

            @pl.when(work[3, v] > work[2, v])
            def _():
                own = _own_rows(work, v, block)
                a, b = (jnp.where(own, x[...].astype(jnp.float32), 0).astype(x.dtype) for x in (lhs, d))
                dims = ((0,), (0,)), ((), ())
                acc[...] += lax.dot_general(
                    a, b, dims, precision=_precision(a.dtype), preferred_element_type=jnp.float32
                )

            @pl.when((v == count[0] - 1) | (work[0, jnp.minimum(v + 1, count[0] - 1)] != group))
            def _():
                out[...] = acc[...].astype(out.dtype)

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((G, K, N), dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(K // tk, N // tn, work.shape[1]),
            in_specs=[
                pl.BlockSpec((block, tk), lambda k, n, v, count, work: (work[1, v], k)),
                pl.BlockSpec((block, tn), lambda k, n, v, count, work: (work[1, v], n)),
            ],
            out_specs=pl.BlockSpec((None, tk, tn), lambda k, n, v, count, work: (work[0, v], k, n)),
            scratch_shapes=[pltpu.VMEM((tk, tn), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        interpret=interpret,
    )(count, work, lhs_MK, d_MN)

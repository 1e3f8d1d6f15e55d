"""Grouped matmul on Hopper GPUs (Pallas Mosaic-GPU): which kernels compute the products, and two of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import is_hopper, target
from pallas_kernels.grouped_matmul.config import gpu_tiles, packed_tiles
from pallas_kernels.grouped_matmul.gpu_kernel import (
    PEER,
    ROWS,
    STEP,
    Tiles,
    copy_to_cluster,
    each_slice,
    multiprocessors,
    run_tiles,
    store_tile,
    workers,
)
from pallas_kernels.grouped_matmul.gpu_narrow import NarrowTiles, narrow_product
from pallas_kernels.grouped_matmul.gpu_packed import COLUMNS, PackedTiles, packed_product
from pallas_kernels.grouped_matmul.gpu_unpack import shuffled, unpack_shuffled, unshuffled
from pallas_kernels.grouped_matmul.products import grouped
from pallas_kernels.grouped_matmul.row_tiles import row_tiles
from pallas_kernels.mxfp4 import Packed

ROW = plgpu.Layout.WGMMA.reduce(1)  # a vector over the rows of a tile


def grouped_matmul(lhs_MK, rhs_GKN, group_sizes_G, *, align, dtype):
    """`api.grouped_matmul`.

    Raises:
      NotImplementedError: anything but bfloat16 rows in groups of eights, K and N multiples of 64, on Hopper.
    """
    return grouped(products(lhs_MK, rhs_GKN.shape[1:], align), lhs_MK, rhs_GKN, group_sizes_G, dtype)


def products(lhs_MK, widths: tuple[int, ...], align: int) -> GpuProducts:
    """The products for such rows and for matrices of these widths, or NotImplementedError."""
    if not is_hopper():
        raise NotImplementedError("a GPU of compute capability 9.0 (H100, H200) is needed")
    if lhs_MK.dtype != jnp.bfloat16:
        raise NotImplementedError(f"rows are {lhs_MK.dtype}; bfloat16 is supported")
    if align % ROWS:
        raise NotImplementedError(f"align={align}; multiples of {ROWS} rows are supported")
    if any(width % STEP for width in widths):
        raise NotImplementedError(f"K, N = {widths}; multiples of {STEP} are supported")
    return GpuProducts(target()[1])


@dataclasses.dataclass(frozen=True)
class GpuProducts:
    """`products.Products` on a kind of device."""

    kind: str

    def rows(self, lhs, rhs, group_sizes_G, transposed=False, dtype=None):
        if isinstance(rhs[0], Packed):
            M, (G, K, N) = lhs[0].shape[0], rhs[0].shape
            if not transposed and (tiles := packed_tiles(M, G, K, N)):
                return sum(packed_rows(x, w, group_sizes_G, tiles, dtype) for x, w in zip(lhs, rhs))
            # many rows of each matrix: unpacked first, and as they lie, for turning them takes longer than multiplying
            rhs = [unpack_shuffled(w) for w in rhs]
            if transposed:
                return unshuffled(self.rows(lhs, rhs, group_sizes_G, dtype=dtype))
            lhs, transposed = [shuffled(x) for x in lhs], True
        G, N = rhs[0].shape[0], rhs[0].shape[1 if transposed else 2]
        kind, narrow = "transposed" if transposed else "rows", dtype in (None, jnp.bfloat16)
        tiles = gpu_tiles(self.kind, kind, lhs[0].shape[0], G, lhs[0].shape[1], N, narrow)
        return product_by_rows(lhs, rhs, group_sizes_G, tiles, transposed=transposed, dtype=dtype)

    def groups(self, lhs_MK, d_MN, group_sizes_G, dtype):
        (M, K), N, G = lhs_MK.shape, d_MN.shape[1], group_sizes_G.shape[0]
        return groups_product(lhs_MK, d_MN, group_sizes_G, gpu_tiles(self.kind, "groups", M, G, K, N), dtype)


def product_by_rows(lhs, rhs, group_sizes_G, tiles: Tiles, *, transposed=False, dtype=None):
    """Sum over i of lhs[i] [M, K_i] times rhs[i], by groups of rows: [M, N], by the kernel that the tiles are of.

    dtype: of the result; None: lhs', the only one that `NarrowTiles` give.
    """
    if isinstance(tiles, NarrowTiles):
        return narrow_product(lhs, rhs, group_sizes_G, tiles, transposed=transposed)
    return rows_product(lhs, rhs, group_sizes_G, tiles, transposed=transposed, dtype=dtype)[0]


def packed_rows(lhs_MK, rhs_GKN: Packed, group_sizes_G, tiles: PackedTiles, dtype=None):
    """lhs [M, K] times packed matrices, by groups of rows: [M, N]."""
    M, columns = lhs_MK.shape[0], rhs_GKN.shape[2] // (tiles.consumers * COLUMNS)
    count, table = row_tiles(group_sizes_G, M, columns, tiles, multiprocessors())
    return packed_product(lhs_MK, rhs_GKN.codes, rhs_GKN.scales, count, table, tiles, dtype or lhs_MK.dtype).T


def rows_product(
    lhs, rhs, group_sizes_G, tiles: Tiles, *, transposed=False, vectors=(), outs=None, epilogue=None, dtype=None
):
    """Sum over i of lhs[i] [M, K_i] times rhs[i] [G, K_i, N], or [G, N, K_i] transposed, by groups of rows.

    Args:
      rhs: per lhs one matrix stack, or a tuple of P: the same rows times each of them, for `epilogue`.
      vectors: [M] each, float32, for `epilogue`.
      outs: number of results; all [M, N].
      dtype: of the results; None: lhs'.
      epilogue: (a part of the P products, the vectors broadcast to its shape, float32) -> that part of the results.
    """
    rhs = [x if isinstance(x, tuple) else (x,) for x in rhs]
    parts, flat = len(rhs[0]), [part for x in rhs for part in x]
    (M, _), G, N = lhs[0].shape, flat[0].shape[0], flat[0].shape[1 if transposed else 2]
    steps = [x.shape[1] // STEP for x in lhs]
    m, n, C = tiles.m, tiles.n, tiles.consumers
    count, table = row_tiles(group_sizes_G, M, N // n, tiles, workers(tiles))
    vectors = [jnp.pad(x, (0, tiles.rows)) for x in vectors]  # the last tile may reach past the rows
    first_rhs, first_vector = 2 + len(lhs), 2 + len(lhs) + len(flat)

    def fetch(refs, t):
        group, row, rows, column = (refs[1][t, i] for i in range(4))
        if tiles.cluster == 2:  # the blocks share the consumers' parts that have rows
            half = ((rows + (2 * m - 1)) // (2 * m)) * m
            first = lax.axis_index(PEER) == 0
            row, rows = jnp.where(first, row, row + half), jnp.where(first, jnp.minimum(rows, half), rows - half)
        return jnp.where(group < G, sum(steps), 0), group, row, rows, column

    def load(refs, tile, s, a_s, b_s, barrier, many):
        _, group, row, _, column = tile
        columns = pl.ds(column * n, n)

        def copies(i, k):
            for c in range(C):
                rows = pl.ds(pl.multiple_of(row + c * m, ROWS), m)
                plgpu.copy_gmem_to_smem(refs[2 + i].at[rows, k], a_s.at[c], barrier)
            for p in range(parts):
                b = refs[first_rhs + i * parts + p]
                b = b.at[group, columns, k] if transposed else b.at[group, k, columns]
                copy_to_cluster(b, b_s.at[p], barrier, tiles)

        each_slice(steps, s, copies)

    def multiplied(tile, c):
        return jnp.where(tile[3] > c * m, tile[0], 0)

    def product(accs, a_s, b_s):
        for p, acc in enumerate(accs):
            plgpu.wgmma(acc, a_s, b_s.at[p].transpose((1, 0)) if transposed else b_s.at[p])

    def store(refs, tile, c, values, out_s):
        _, _, row, rows, column = tile
        valid, row = jnp.clip(rows - c * m, 0, m), pl.multiple_of(row + c * m, ROWS)

        @pl.when(valid > 0)
        def _():
            refs_of, outs = refs[first_vector : first_vector + len(vectors)], refs[first_vector + len(vectors) :]

            def on_the_way(values, row):
                shape = values[0].shape
                of_rows = [plgpu.load(x.at[pl.ds(row, shape[0])], layout=ROW, optimized=False) for x in refs_of]
                return epilogue(values, [lax.broadcast_in_dim(x, shape, [0]) for x in of_rows])

            store_tile(values, outs, row, valid, column * n, out_s, on_the_way if epilogue else None)

    return run_tiles(
        (count, table, *lhs, *flat, *vectors),
        [jax.ShapeDtypeStruct((M, N), dtype or lhs[0].dtype)] * (outs or 1),
        tiles,
        a_shape=(m, STEP),
        b_shape=(parts, n, STEP) if transposed else (parts, STEP, n),
        loads=C + parts,
        parts=parts,
        count=lambda refs: refs[0][0],
        fetch=fetch,
        load=load,
        multiplied=multiplied,
        product=product,
        store=store,
    )


def groups_product(lhs_MK, d_MN, group_sizes_G, tiles: Tiles, dtype):
    """lhs[rows of g]^T d[rows of g] of every group: [G, K, N]."""
    (M, K), N, G = lhs_MK.shape, d_MN.shape[1], group_sizes_G.shape[0]
    m, n, C = tiles.m, tiles.n, tiles.consumers
    sizes = group_sizes_G.astype(jnp.int32)
    starts = (jnp.cumsum(sizes) - sizes).astype(jnp.int32)
    blocks, columns = K // tiles.block, N // n

    def fetch(refs, t):
        group, place = t // (blocks * columns), lax.rem(t, jnp.int32(blocks * columns))
        panel = place // (tiles.panel * columns)
        height = jnp.minimum(blocks - panel * tiles.panel, tiles.panel)
        place = place - panel * (tiles.panel * columns)
        block = panel * tiles.panel + lax.rem(place, height)
        size, k = refs[1][group], block * tiles.block + lax.axis_index(PEER) * tiles.rows
        return (size + (STEP - 1)) // STEP, group, refs[0][group], size, k, (place // height) * n

    def ragged(tile, s):
        return (s + 1) * STEP > tile[3]

    def load(refs, tile, s, a_s, b_s, barrier, many):
        _, _, start, size, k, column = tile
        first = start + s * STEP

        def copies(rows, to):
            for c in range(C):
                plgpu.copy_gmem_to_smem(refs[2].at[rows, pl.ds(k + c * m, m)], a_s.at[c, to], barrier)
            copy_to_cluster(refs[3].at[rows, pl.ds(column, n)], b_s.at[to], barrier, tiles)

        if not many:
            return copies(pl.ds(pl.multiple_of(first, ROWS), STEP), pl.ds(0, STEP))
        for i in range(0, STEP, ROWS):
            row = jnp.where(s * STEP + i < size, first + i, M)  # TMA fills rows past the end with zeros
            copies(pl.ds(pl.multiple_of(row, ROWS), ROWS), pl.ds(i, ROWS))

    def product(accs, a_s, b_s):
        plgpu.wgmma(accs[0], a_s.transpose((1, 0)), b_s)

    def store(refs, tile, c, values, out_s):
        _, group, _, _, k, column = tile
        store_tile(values, [refs[-1].at[group]], k + c * m, m, column, out_s)

    (out,) = run_tiles(
        (starts, sizes, lhs_MK, d_MN),
        [jax.ShapeDtypeStruct((G, K, N), dtype)],
        tiles,
        a_shape=(STEP, m),
        b_shape=(STEP, n),
        loads=C + 1,
        parts=1,
        count=lambda refs: jnp.int32(G * blocks * columns),
        fetch=fetch,
        load=load,
        multiplied=lambda tile, c: tile[0],
        product=product,
        store=store,
        ragged=ragged,
    )
    return out

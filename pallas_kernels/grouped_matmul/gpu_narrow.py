"""Products over rows of groups on Hopper GPUs with the rows as the narrow side: for groups of up to 256 rows.

The tensor cores take 64 rows of their left operand at a time and 8 columns of their right one. Groups of 150 rows fill
steps of 64 to three quarters, so here the matrices stand left, transposed, and a tile of a few hundred columns meets
all rows of its group, padded to the next of `NarrowTiles.steps`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.gpu_kernel import ROWS, SLOTS, STEP, Tiles, each_slice, run_tiles, workers
from pallas_kernels.grouped_matmul.row_tiles import row_tiles


@dataclasses.dataclass(frozen=True, order=True)
class NarrowTiles(Tiles):
    """`Tiles` of the transposed product: a consumer's part has m columns and up to n rows, which all consumers share.

    Attributes:
      step: a tile of r rows is multiplied as the next multiple of `step`; each is a program of its own.
    """

    step: int = 32

    @property
    def block(self) -> int:
        """Rows of a row block of the work list."""
        return self.n

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.m * self.consumers


def narrow_product(lhs, rhs, group_sizes_G, tiles: NarrowTiles, *, transposed=False):
    """Sum over i of lhs[i] [M, K_i] times rhs[i] [G, K_i, N], or [G, N, K_i] transposed, by groups of rows: [M, N]."""
    (M, _), G, N = lhs[0].shape, rhs[0].shape[0], rhs[0].shape[1 if transposed else 2]
    steps = [x.shape[1] // STEP for x in lhs]
    m, n, C = tiles.m, tiles.n, tiles.consumers
    count, table = row_tiles(group_sizes_G, M, N // tiles.width, tiles, workers(tiles))

    def fetch(refs, t):
        group, row, rows, column = (refs[1][t, i] for i in range(4))
        return jnp.where(group < G, sum(steps), 0), group, row, rows, column

    def load(refs, tile, s, a_s, b_s, barrier, many):
        _, group, row, _, column = tile

        def copies(i, k):
            for c in range(C):
                columns = pl.ds(column * tiles.width + c * m, m)
                w = refs[2 + len(lhs) + i]
                w = w.at[group, columns, k] if transposed else w.at[group, k, columns]
                plgpu.copy_gmem_to_smem(w, a_s.at[c], barrier)
            plgpu.copy_gmem_to_smem(refs[2 + i].at[pl.ds(pl.multiple_of(row, ROWS), n), k], b_s, barrier)

        each_slice(steps, s, copies)

    def product(accs, a_s, b_s):
        (acc,) = accs
        rows = b_s.at[pl.ds(0, acc.shape[1])]
        plgpu.wgmma(acc, a_s if transposed else a_s.transpose((1, 0)), rows.transpose((1, 0)))

    def store(refs, tile, c, values, out_s):
        _, _, row, rows, column = tile
        store_transposed(values[0], refs[-1], row, rows, column * tiles.width + c * m, out_s)

    (out,) = run_tiles(
        (count, table, *lhs, *rhs),
        [jax.ShapeDtypeStruct((M, N), lhs[0].dtype)],
        tiles,
        a_shape=(m, STEP) if transposed else (STEP, m),
        b_shape=(n, STEP),
        loads=C + 1,
        parts=1,
        count=lambda refs: refs[0][0],
        fetch=fetch,
        load=load,
        multiplied=lambda tile, c: tile[0],
        product=product,
        store=store,
        shapes=lambda tile: [((m, top), (tile[3] > top - tiles.step) & (tile[3] <= top))
                             for top in range(tiles.step, n + 1, tiles.step)],
    )  # fmt: skip
    return out


def store_transposed(value, out, row, valid, column, out_s):
    """Stores value [columns, rows] at (row, column) of out, of which the first `valid` rows, a multiple of ROWS, exist.

    Args:
      out_s: [SLOTS, ..], the parts that leave at a time.
    """
    m, n = value.shape
    _, height, width = out_s.shape
    slots = itertools.cycle(range(SLOTS))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile may have ended with any slot
    for left, top in itertools.product(range(0, m, width), range(0, n, height)):
        tall = min(height, n - top)
        slot = out_s.at[next(slots)]
        plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
        # a part without rows starts no copy, so counting them says nothing
        pl.when(valid < n)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        part = value[left : left + width, top : top + tall].astype(out.dtype)
        part = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
        slot.at[pl.ds(0, tall)].transpose((1, 0))[...] = part
        plgpu.commit_smem()

        def copy(first, rows, slot=slot, top=top, left=left):
            place = pl.ds(pl.multiple_of(row + top + first, ROWS), rows)
            plgpu.copy_smem_to_gmem(slot.at[pl.ds(first, rows)], out.at[place, pl.ds(column + left, width)])

        pl.when(valid >= top + tall)(functools.partial(copy, 0, tall))

        @pl.when(valid < top + tall)
        def _(copy=copy, top=top, tall=tall):
            for first in range(0, tall, ROWS):
                pl.when(top + first < valid)(functools.partial(copy, first, ROWS))

"""The Hopper kernels of the grouped matmul: products over rows of groups, and over the rows of each group.

One thread block per multiprocessor walks a list of output tiles. In it one or two streams: a producer warpgroup feeds
slices of 64 of the contraction by TMA into a ring in shared memory, the consumer warpgroups of the stream multiply them
on the tensor cores, each its own part of the tile. With two streams one stores its tile while the other multiplies.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

STEP = 64  # of the contraction, one stage of the ring: 128 bytes, the widest swizzle
ROWS = 8  # TMA moves whole tiles of a swizzled buffer: rows of groups come in eights
PEER = "peer"  # axis of the blocks of a cluster
_PRODUCERS = 40  # registers of a producer's thread; consumers share what is left of 512 for one of each warpgroup
SLOTS = 2  # parts of a tile on their way out of shared memory

f32, bf16 = jnp.float32, jnp.bfloat16
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
)


@dataclasses.dataclass(frozen=True, order=True)
class Tiles:
    """How the work is cut.

    Attributes:
      m, n: rows and columns of a consumer's part of a tile. Its accumulators take m n / 128 of 255 registers a thread.
      consumers: warpgroups of a stream; they share its columns.
      streams: independent streams of a thread block.
      stages: slices of the contraction in flight, per stream.
      cluster: neighbouring thread blocks, 1 or 2, that work on the same columns of neighbouring rows: each fetches half
        of the right operand for both.
      panel: row blocks of a group that are worked on together, column after column.
      light_last: row tiles of at most half the rows come after all others, so that every worker gets its share of them.
        Where most groups have one, that would read the groups' matrices twice.
    """

    m: int
    n: int
    consumers: int = 2
    streams: int = 1
    stages: int = 4
    cluster: int = 1
    panel: int = 8
    light_last: bool = True

    @property
    def rows(self) -> int:
        """Of a thread block."""
        return self.m * self.consumers

    @property
    def block(self) -> int:
        """Rows of a cluster: a row block of the work list."""
        return self.rows * self.cluster

    @property
    def width(self) -> int:
        """Columns of a tile."""
        return self.n


def shared(*shape: int, dtype=bf16):
    """Shared memory in tiles of 8 rows of 128 bytes, swizzled: what tensor cores and TMA take."""
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    )


def copy_to_cluster(src, dst, barrier, tiles: Tiles):
    """Every block of the cluster gets src; each fetches its part of it."""
    plgpu.copy_gmem_to_smem(src, dst, barrier, collective_axes=(PEER,) if tiles.cluster > 1 else None)


def each_slice(steps: Sequence[int], s, act: Callable) -> None:
    """act(i, part of the contraction) for the operand i that slice s of a sum over operands of `steps` slices is of."""
    before = 0
    for i, own in enumerate(steps):
        mine = (s >= before) & (s < before + own)
        pl.when(mine)(functools.partial(act, i, pl.ds((s - before) * STEP, STEP)))
        before += own


def multiprocessors() -> int:
    """Of the device that the program is for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.num_cores if device else jax.devices()[0].core_count


def workers(tiles: Tiles) -> int:
    """Streams that take tiles in turns, on the device the program is for."""
    return multiprocessors() // tiles.cluster * tiles.streams


def run_tiles(
    inputs: Sequence[jax.Array],
    out_types: Sequence[jax.ShapeDtypeStruct],
    tiles: Tiles,
    *,
    a_shape: tuple[int, int],
    b_shape: tuple[int, ...],
    loads: int,
    parts: int,
    count: Callable,
    fetch: Callable,
    load: Callable,
    multiplied: Callable,
    product: Callable,
    store: Callable,
    ragged: Callable | None = None,
    shapes: Callable | None = None,
) -> tuple[jax.Array, ...]:
    """The pipeline that the kernels share. `refs` in the callbacks: inputs, then outputs.

    Args:
      a_shape, b_shape: one stage of a consumer's left operand, and of the right operands of all consumers.
      loads: TMA copies of a stage.
      parts: accumulators [m, n] of a consumer.
      count: (refs) -> number of tiles.
      fetch: (refs, t) -> scalars of tile t, the first the number of slices; read one tile ahead.
      load: (refs, tile, slice, a_s [consumers, *a_shape], b_s, barrier, many) starts the copies of a slice.
      multiplied: (tile, consumer) -> how many slices the consumer multiplies. It passes over the rest.
      product: (accs, a_s, b_s) multiplies a slice.
      store: (refs, tile, consumer, values, out_s) for the accumulators' values.
      ragged: (tile, slice) -> `many`: whether the slice comes in STEP / ROWS times as many copies.
      shapes: (tile) -> shapes of a consumer's accumulators, each with the condition under which it is the tile's;
        (m, n) for all if None.
    """
    S, C, Q = tiles.streams, tiles.consumers, tiles.stages
    grid = multiprocessors() // tiles.cluster
    empty = functools.partial(plgpu.ClusterBarrier, collective_axes=(PEER,)) if tiles.cluster > 1 else plgpu.Barrier

    def entry(*refs):
        def scope(a_s, b_s, out_s, full, empty, pieces=None):
            sm, wg = lax.axis_index("sm"), lax.axis_index("wg")
            total = count(refs)

            def each_tile(stream, body):
                """body(tile, slices before it) -> slices after it, for every tile of the stream."""
                me = sm * S + stream
                last = jnp.maximum(total - 1, 0)

                def step(i, carry):
                    at, tile = carry
                    ahead = fetch(refs, jnp.minimum(me + (i + 1) * (grid * S), last))
                    return body(tile, at), ahead

                mine = jnp.maximum(total - me + (grid * S - 1), 0) // (grid * S)
                lax.fori_loop(0, mine, step, (jnp.int32(0), fetch(refs, jnp.minimum(me, last))))

            def on_either(tile, i, act):
                """act(barriers that the copies of slice i arrive at, whether they are many)."""
                if ragged is None:
                    return act(full, False)
                pl.when(ragged(tile, i))(lambda: act(pieces, True))
                pl.when(~ragged(tile, i))(lambda: act(full, False))

            def produce():
                plgpu.set_max_registers(_PRODUCERS, action="decrease")
                stream = wg - S * C

                def slices(tile, at):
                    @pl.loop(0, tile[0])
                    def _(i):
                        slot = stream * Q + lax.rem(at + i, jnp.int32(Q))
                        plgpu.barrier_wait(empty.at[slot])
                        feed = functools.partial(load, refs, tile, i, a_s.at[slot], b_s.at[slot])
                        on_either(tile, i, lambda barriers, many: feed(barriers.at[slot], many))

                    return at + tile[0]

                each_tile(stream, slices)
                for q in range(Q):
                    plgpu.barrier_wait(empty.at[stream * Q + q])

            def consume():
                plgpu.set_max_registers(min(232, (512 // S - _PRODUCERS) // C // 8 * 8), action="increase")
                stream, c = lax.rem(wg, jnp.int32(S)), wg // S
                for q in range(Q):
                    plgpu.barrier_arrive(empty.at[stream * Q + q])

                def slices(tile, at):
                    slot_of = lambda i: stream * Q + lax.rem(at + i, jnp.int32(Q))
                    n = multiplied(tile, c)
                    arrived = lambda i, slot: on_either(tile, i, lambda at, _: plgpu.barrier_wait(at.at[slot]))

                    def accumulate(*accs):
                        @pl.loop(0, n)
                        def _(i):
                            slot = slot_of(i)
                            arrived(i, slot)
                            product(accs, a_s.at[slot, c], b_s.at[slot])
                            plgpu.wgmma_wait(parts)  # for the slice before this one

                            @pl.when(i > 0)
                            def _():
                                plgpu.barrier_arrive(empty.at[slot_of(i - 1)])

                        plgpu.wgmma_wait(0)

                        @pl.when(n > 0)
                        def _():
                            plgpu.barrier_arrive(empty.at[slot_of(n - 1)])

                        @pl.loop(n, tile[0])
                        def _(i):
                            slot = slot_of(i)
                            arrived(i, slot)
                            plgpu.barrier_arrive(empty.at[slot])

                        return [acc[...] for acc in accs]

                    def multiply(shape):
                        values = pl.run_scoped(accumulate, *[plgpu.ACC(shape, f32)] * parts)
                        store(refs, tile, c, values, out_s.at[wg])

                    if shapes is None:
                        multiply((tiles.m, tiles.n))
                    else:
                        for shape, mine in shapes(tile):
                            pl.when(mine)(functools.partial(multiply, shape))
                    return at + tile[0]

                each_tile(stream, slices)
                plgpu.wait_smem_to_gmem(0)

            pl.when(wg < S * C)(consume)
            pl.when(wg >= S * C)(produce)

        out_dtype = out_types[0].dtype
        pl.run_scoped(
            scope,
            shared(S * Q, C, *a_shape),
            shared(S * Q, *b_shape),
            shared(S * C, SLOTS, 64, 128 // out_dtype.itemsize, dtype=out_dtype),
            plgpu.Barrier(num_arrivals=loads, num_barriers=S * Q),
            empty(num_arrivals=C, num_barriers=S * Q),
            *([] if ragged is None else [plgpu.Barrier(num_arrivals=loads * STEP // ROWS, num_barriers=S * Q)]),
            collective_axes="wg",
        )

    run = plgpu.kernel(
        entry,
        out_type=tuple(out_types),
        grid=(grid,),
        grid_names=("sm",),
        cluster=(tiles.cluster,),
        cluster_names=(PEER,),
        num_threads=S * (C + 1),
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
    )
    return tuple(run(*inputs))


def store_tile(values, outs, row, valid, column, out_s, epilogue=None):
    """Stores a tile at (row, column), of which the first `valid` rows, a multiple of ROWS, exist.

    Args:
      values: [m, n] each; to one out each, or through `epilogue` (parts of them, index of their first row in outs).
      out_s: [SLOTS, ..], the parts that leave at a time.
    """
    m, n = values[0].shape
    _, height, width = out_s.shape
    slots = itertools.cycle(range(SLOTS))
    if (m // height) * (n // width) * len(outs) % SLOTS:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # this tile begins with the slot the last one ended with

    def leave(part, out, top, columns):
        slot = out_s.at[next(slots)]
        plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
        # a part without rows starts no copy, so counting them says nothing
        pl.when(valid < m)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        slot[...] = part.astype(out.dtype)
        plgpu.commit_smem()

        def copy(first, rows):
            plgpu.copy_smem_to_gmem(slot.at[pl.ds(first, rows)], out.at[pl.ds(row + top + first, rows), columns])

        @pl.when(valid >= top + height)
        def _():
            copy(0, height)

        @pl.when(valid < top + height)
        def _():
            for first in range(0, height, ROWS):
                pl.when(top + first < valid)(functools.partial(copy, first, ROWS))

    for top, left in itertools.product(range(0, m, height), range(0, n, width)):
        parts = [x[top : top + height, left : left + width] for x in values]
        for part, out in zip(epilogue(parts, row + top) if epilogue else parts, outs, strict=True):
            leave(part, out, top, pl.ds(column + left, width))

"""The Hopper kernel for MXFP4 matrices: codes are unpacked in registers, on their way from shared memory to the tensor
cores.

The matrices are the left operand, [64 columns of a matrix, K] in registers, and rows of lhs the right one, so a group
of 8 rows costs 8 rows, and the result comes out transposed. A producer warpgroup feeds codes, scales and rows by TMA
into a ring; each consumer warpgroup has 64 columns of its own. What a thread loads at once, 8 bytes of codes, is 16
neighbours in K, which one scale covers; where they then lie in the wgmma operand is undone by the order of lhs'
columns (`interleave`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.grouped_matmul.gpu_kernel import COMPILER_PARAMS, ROWS, STEP, multiprocessors, shared

COLUMNS = 64  # of a consumer
TILE, ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
f32, bf16, u32 = jnp.float32, jnp.bfloat16, jnp.uint32


@dataclasses.dataclass(frozen=True, order=True)
class PackedTiles:
    """How the work is cut.

    Attributes:
      rows: of a tile, a multiple of 8, at most 256.
      steps: slices of 64 of K in a stage: 1, 2 or 4, a divisor of K / 64.
      stages: in flight.
      consumers: warpgroups, 64 columns each.
      panel: row blocks of a group that are worked on together, column after column.
      light_last: deal tiles of few rows after all others, as in `config.Tiles`.
    """

    rows: int
    steps: int
    stages: int = 4
    consumers: int = 2
    panel: int = 8
    light_last: bool = False

    @property
    def block(self) -> int:
        return self.rows


def interleave(x_MK):
    """Columns of x in the order that the kernel unpacks matrices in, 64 by 64.

    Column 8 (4 w + i) + 2 q + e of a wgmma operand belongs to thread q of a row. It loads 8 bytes, words w = 0, 1, and
    takes nibbles i and i + 4 of a word as a pair: element 16 q + 8 w + i + 4 e of the 64.
    """
    M, K = x_MK.shape
    x = x_MK.reshape(M, K // 64, 4, 2, 2, 4)  # q, w, e, i
    return x.transpose(0, 1, 3, 5, 2, 4).reshape(M, K)


def packed_product(lhs_MK, codes_GNH, scales_GSN, count, table, tiles: PackedTiles, dtype=bf16):
    """lhs[rows of g] times the packed matrix of g: [N, M] in dtype, transposed.

    Args:
      codes_GNH, scales_GSN: as in `mxfp4.Packed`.
      count, table: of `pallas_gpu.row_tiles`, for columns of 64 consumers.
    """
    (M, K), (G, N, _) = lhs_MK.shape, codes_GNH.shape
    steps, C, Q, R = tiles.steps, tiles.consumers, tiles.stages, tiles.rows
    grid, slices, n = multiprocessors(), K // (STEP * tiles.steps), C * COLUMNS
    # words of 4 bytes, so that a thread's 8 bytes are a pair of elements
    words = lax.bitcast_convert_type(codes_GNH.reshape(G, N, K // 8, 4), u32)

    def entry(count, table, x, words, scales, out):
        def scope(x_s, words_s, scales_s, out_s, full, empty):
            sm, wg = lax.axis_index("sm"), lax.axis_index("wg")
            total = count[0]
            mine = jnp.maximum(total - sm + (grid - 1), 0) // grid

            def fetch(i):
                t = jnp.minimum(sm + i * grid, jnp.maximum(total - 1, 0))
                group, row, rows, column = (table[t, j] for j in range(4))
                return jnp.where(group < G, slices, 0), group, row, rows, column

            def each_tile(body):
                def step(i, carry):
                    at, tile = carry
                    ahead = fetch(i + 1)
                    body(tile, at)
                    return at + tile[0], ahead

                lax.fori_loop(0, mine, step, (jnp.int32(0), fetch(jnp.int32(0))))

            def produce():
                plgpu.set_max_registers(40, action="decrease")

                def tile_slices(tile, at):
                    _, group, row, _, column = tile

                    @pl.loop(0, tile[0])
                    def _(i):
                        slot = lax.rem(at + i, jnp.int32(Q))
                        plgpu.barrier_wait(empty.at[slot])
                        barrier, columns = full.at[slot], pl.ds(column * n, n)
                        k = pl.ds(i * (8 * steps), 8 * steps)
                        plgpu.copy_gmem_to_smem(words.at[group, columns, k], words_s.at[slot], barrier)
                        k = pl.ds(i * (2 * steps), 2 * steps)
                        plgpu.copy_gmem_to_smem(scales.at[group, k, columns], scales_s.at[slot], barrier)
                        for s in range(steps):
                            k = pl.ds((i * steps + s) * STEP, STEP)
                            rows = pl.ds(pl.multiple_of(row, ROWS), R)
                            plgpu.copy_gmem_to_smem(x.at[rows, k], x_s.at[slot, s], barrier)

                each_tile(tile_slices)
                for q in range(Q):
                    plgpu.barrier_wait(empty.at[q])

            def consume():
                plgpu.set_max_registers(232, action="increase")
                for q in range(Q):
                    plgpu.barrier_arrive(empty.at[q])

                def tile_slices(tile, at):
                    _, group, row, rows, column = tile

                    def accumulate(acc):
                        @pl.loop(0, tile[0])
                        def _(i):
                            slot = lax.rem(at + i, jnp.int32(Q))
                            plgpu.barrier_wait(full.at[slot])
                            own = pl.ds(wg * COLUMNS, COLUMNS)
                            loaded = plgpu.load(words_s.at[slot, own], layout=TILE)
                            for s in range(steps):
                                scale = [
                                    plgpu.load(scales_s.at[slot, 2 * s + g, own], layout=ROW, optimized=False)
                                    for g in range(2)
                                ]
                                a = unpack(loaded[:, 8 * s : 8 * s + 8], *scale)
                                plgpu.wgmma(acc, a, x_s.at[slot, s].transpose((1, 0)))
                                plgpu.wgmma_wait(0)
                            plgpu.barrier_arrive(empty.at[slot])

                        return acc[...]

                    value = pl.run_scoped(accumulate, plgpu.ACC((COLUMNS, R), f32))
                    first = column * n + wg * COLUMNS
                    for left in range(0, R, ROWS):
                        slot = out_s.at[wg, left // ROWS % 2]

                        @pl.when(left < rows)
                        def _(left=left, slot=slot):
                            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                            slot[...] = value[:, left : left + ROWS].astype(dtype)
                            plgpu.commit_smem()
                            to = out.at[pl.ds(first, COLUMNS), pl.ds(pl.multiple_of(row + left, ROWS), ROWS)]
                            plgpu.copy_smem_to_gmem(slot, to)

                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

                each_tile(tile_slices)
                plgpu.wait_smem_to_gmem(0)

            pl.when(wg < C)(consume)
            pl.when(wg >= C)(produce)

        swizzle = 32 * steps
        transforms = (plgpu.TilingTransform((8, 8 * steps)), plgpu.SwizzleTransform(swizzle))
        pl.run_scoped(
            scope,
            shared(Q, steps, R, STEP),
            plgpu.SMEM((Q, n, 8 * steps), u32, transforms=transforms),
            plgpu.SMEM((Q, 2 * steps, n), jnp.uint8),
            plgpu.SMEM((C, 2, COLUMNS, ROWS), dtype),
            plgpu.Barrier(num_arrivals=2 + steps, num_barriers=Q),
            plgpu.Barrier(num_arrivals=C, num_barriers=Q),
            collective_axes="wg",
        )

    run = plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct((N, M), dtype),
        grid=(grid,),
        grid_names=("sm",),
        num_threads=C + 1,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
    )
    return run(count, table, interleave(lhs_MK), words, scales_GSN)


def unpack(words, scale_0, scale_1):
    """[64, 64] bfloat16, columns as `interleave` says, of codes [64, 8] and of scales [64] of K's first and last 32."""
    types = (TILE, ROW, ROW)
    of = plgpu.inline_mgpu(arg_types=types, return_type=plgpu.ShapeDtypeStruct((64, 64), bf16, layout=TILE))
    return of(_unpack)(words, scale_0, scale_1)


def _unpack(ctx, words, scale_0, scale_1):
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    c = lambda value: utils.c(value, i32)
    one = ir.VectorType.get((1,), i32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    lane = arith.andi(utils.thread_idx(), c(3))
    first = arith.cmpi(arith.CmpIPredicate.ult, lane, c(2))
    at = lambda reg, e: vector.extract(reg, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e]))
    out = np.empty((8, 2), object)  # of a thread: tile of 8 columns, half of 16 rows
    for h in range(2):
        scale = [_scalar(s.registers.reshape(-1)[h]) for s in (scale_0, scale_1)]
        scale = arith.extui(i32, arith.select(first, *scale))
        scale = arith.muli(scale, c(0x00800080))  # both halves: 2^(scale - 127) as bfloat16
        reg = words.registers.reshape(-1)[h]
        for w in range(2):
            word = at(reg, w)
            for i in range(4):
                # nibble i to the low half, nibble i + 4 to the high one: sign to bit 15, magnitude to bits 6 to 8
                up = arith.shli(word, c(6 - 4 * i)) if 4 * i <= 6 else arith.shrui(word, c(4 * i - 6))
                sign = arith.shli(word, c(12 - 4 * i)) if i < 3 else word
                bits = arith.ori(arith.andi(up, c(0x01C001C0)), arith.andi(sign, c(0x80008000 - (1 << 32))))
                value = llvm.inline_asm(
                    i32,
                    [bits, c(0x7E807E80), scale],
                    # the bits are 2^-126 times the value: exact, and so is the scale
                    "{.reg .b32 t; mul.rn.bf16x2 t, $1, $2; mul.rn.bf16x2 $0, t, $3;}",
                    "=r,r,r,r",
                    has_side_effects=False,
                )
                out[4 * w + i, h] = vector.bitcast(pair, vector.broadcast(one, value))
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64, 64))
    return mgpu.FragmentedArray(_registers=out.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


def _scalar(reg):
    if isinstance(reg.type, ir.VectorType):
        return vector.extract(reg, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0]))
    return reg

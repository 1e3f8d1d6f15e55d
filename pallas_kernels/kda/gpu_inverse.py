"""KDA on Hopper: the inverse of a chunk's unit triangular matrix (Pallas Mosaic-GPU).

By doubling the diagonal blocks: Y <- Y - Y (A restricted to the new corners) Y. Every Y is an inverse of diagonal
blocks, with entries in [-1, 1] for unit keys and beta <= 1; no power series. Up to blocks of 16 a warp does its own in
registers; the last two doublings go through shared memory, and each of their dependent products costs a round trip.
"""

import numpy as np
from jax import numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array

from pallas_kernels.kda.gpu_tiles import TILE, C, bf16, f32, index, product


def inverse_transposed(A: Array, y_s, m_s) -> None:
    """(I + A)^-1 in y_s, for A [C, C] that is zero unless row < column."""
    i_xor_j = index(0, C) ^ index(1, C)

    def corners(w):
        """A where row and column are in the two halves of one block of 2 w."""
        return jnp.where((i_xor_j >= w) & (i_xor_j < 2 * w), A, 0.0)

    Y = diagonal_inverses(A)
    for w in (16, 32):
        y_s[...] = Y.astype(bf16)
        plgpu.commit_smem()
        m_s[...] = product((C, C), (corners(w).astype(bf16), y_s)).astype(bf16)
        plgpu.commit_smem()
        Y = Y - product((C, C), (Y.astype(bf16), m_s))
    y_s[...] = Y.astype(bf16)
    plgpu.commit_smem()


def diagonal_inverses(A: Array) -> Array:
    """The inverses of the diagonal 16 x 16 blocks of I + A [C, C], and zero elsewhere. Warp w holds rows 16 w on."""
    return plgpu.inline_mgpu(arg_types=(TILE,), return_type=plgpu.ShapeDtypeStruct((C, C), f32, layout=TILE))(
        _diagonal_inverses
    )(A)


class _Block:
    """A warp's 16 x 16 block. Lane l holds, for tile t of 8 columns and half h of 8 rows, the elements of row
    8 h + l / 4 and columns 8 t + 2 (l % 4) + e, e = 0, 1: what `mma.m16n8k16` takes and gives.
    """

    def __init__(self, values):
        self.values = values  # [t, h, e]

    def packed(self):
        """In bfloat16, two to a register, in the order t, h."""
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        one = ir.VectorType.get((1,), _i32())
        registers = []
        for t, h in np.ndindex(2, 2):
            x = vector.from_elements(ir.VectorType.get((2,), _f32()), list(self.values[t, h]))
            x = vector.bitcast(one, arith.truncf(pair, x))
            registers.append(vector.extract(x, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0])))
        return registers

    def map(self, f, *others):
        values = np.empty((2, 2, 2), object)
        for at in np.ndindex(2, 2, 2):
            values[at] = f(at, self.values[at], *(x.values[at] for x in others))
        return _Block(values)


def _i32():
    return ir.IntegerType.get_signless(32)


def _f32():
    return ir.F32Type.get()


def _times_transposed(a, b):
    """a b^T of packed blocks: a fragment of b read as the right operand is b^T."""
    values = np.empty((2, 2, 2), object)
    zero = utils.c(0.0, _f32())
    instruction = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    asm = f"{instruction} {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
    for t in range(2):
        out = llvm.inline_asm(
            llvm.StructType.get_literal([_f32()] * 4),
            [*a, b[t], b[2 + t], *[zero] * 4],
            asm,
            ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4),
            has_side_effects=False,
        )
        for h, e in np.ndindex(2, 2):
            values[t, h, e] = llvm.extractvalue(_f32(), out, [2 * h + e])
    return _Block(values)


def _diagonal_inverses(ctx, A: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    del ctx
    i32 = _i32()
    thread = utils.thread_idx()
    lane = arith.andi(thread, utils.c(31, i32))
    warp = arith.andi(arith.shrui(thread, utils.c(5, i32)), utils.c(3, i32))
    zero, one = utils.c(0.0, _f32()), utils.c(1.0, _f32())
    equal = lambda x, n: arith.cmpi(arith.CmpIPredicate.eq, x, utils.c(n, i32))

    # (row xor column) is 8 (h xor t) plus this; it lies in [w, 2 w) in the corners of blocks of 2 w
    pair = arith.muli(utils.c(2, i32), arith.andi(lane, utils.c(3, i32)))
    low = [arith.xori(arith.shrui(lane, utils.c(2, i32)), arith.addi(pair, utils.c(e, i32))) for e in range(2)]
    on_diagonal = [equal(x, 0) for x in low]
    in_corner = {w: [equal(arith.shrui(x, utils.c(w.bit_length() - 1, i32)), 1) for x in low] for w in (1, 2, 4)}

    def where(tests, x):
        """x where tests[e], and only in the two 8 x 8 blocks on the diagonal."""
        return x.map(lambda at, value: arith.select(tests[at[2]], value, zero) if at[0] == at[1] else zero)

    def corners(w, x):
        if w == 8:
            return x.map(lambda at, value: zero if at[0] == at[1] else value)
        return where(in_corner[w], x)

    registers = A.registers.reshape(C // 8, 2)  # of a lane: tile of 8 columns, half of 16 rows
    values = np.empty((2, 2, 2), object)
    for t, h, e in np.ndindex(2, 2, 2):
        of_warp = [
            vector.extract(registers[2 * w + t, h], dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([e]))
            for w in range(4)
        ]
        x = of_warp[3]
        for w in range(3):
            x = arith.select(equal(warp, w), of_warp[w], x)
        values[t, h, e] = x
    M = _Block(values)
    minus = lambda x, y: x.map(lambda _, a, b: arith.subf(a, b), y)
    identity = where(on_diagonal, M.map(lambda *_: one))

    M_T = _times_transposed(identity.packed(), M.packed())
    Y, Y_T = (minus(identity, corners(1, x)) for x in (M, M_T))
    for w in (2, 4, 8):
        corner, y, y_T = (x.packed() for x in (corners(w, M), Y, Y_T))
        v_T = _times_transposed(y_T, corner).packed()  # V = corner Y
        Y, Y_T = minus(Y, _times_transposed(y, v_T)), minus(Y_T, _times_transposed(v_T, y))

    out = np.empty((C // 8, 2), object)
    for tile, h in np.ndindex(C // 8, 2):
        mine = equal(warp, tile // 2)
        two = [arith.select(mine, Y.values[tile % 2, h, e], zero) for e in range(2)]
        out[tile, h] = vector.from_elements(ir.VectorType.get((2,), _f32()), two)
    return mgpu.FragmentedArray(
        _registers=out.reshape(A.registers.shape), _layout=A.layout, _is_signed=None
    )

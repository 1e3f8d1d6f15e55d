"""What one lane of a warp computes with, in `plgpu.inline_mgpu`: 32-bit registers and the exchanges between lanes.

Pallas describes whole arrays; selecting the largest few of a row is faster as a warp program (shuffles, a scatter into
shared memory). An algorithm is written against `Warp` and plain operators, so a test can run it on numpy arrays of 32
elements instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, math, memref, nvvm, scf

ALL = 0xFFFFFFFF  # lanes of a warp


def _u32():
    return ir.IntegerType.get_signless(32)


def _f32():
    return ir.F32Type.get()


def _same(x: Reg, y: Reg | int | float) -> Reg:
    return y if isinstance(y, Reg) else Reg(utils.c(y, x.value.type))


@dataclasses.dataclass(frozen=True)
class Reg:
    """A register: unsigned 32 bits, float32 or a predicate."""

    value: ir.Value

    @property
    def is_float(self) -> bool:
        return isinstance(self.value.type, ir.F32Type)

    def _with(self, other, integer, floating=None) -> Reg:
        op = floating if self.is_float else integer
        return Reg(op(self.value, _same(self, other).value))

    def _compare(self, other, integer, floating) -> Reg:
        y = _same(self, other).value
        if self.is_float:
            return Reg(arith.cmpf(floating, self.value, y))
        return Reg(arith.cmpi(integer, self.value, y))

    def __add__(self, other):
        return self._with(other, arith.addi, arith.addf)

    def __sub__(self, other):
        return self._with(other, arith.subi, arith.subf)

    def __mul__(self, other):
        return self._with(other, arith.muli, arith.mulf)

    def __truediv__(self, other):
        return self._with(other, None, arith.divf)

    def __rtruediv__(self, other):
        return _same(self, other) / self

    def __floordiv__(self, other):
        return self._with(other, arith.divui)

    def __mod__(self, other):
        return self._with(other, arith.remui)

    def __and__(self, other):
        return self._with(other, arith.andi)

    def __or__(self, other):
        return self._with(other, arith.ori)

    def __xor__(self, other):
        return self._with(other, arith.xori)

    def __rshift__(self, other):
        return self._with(other, arith.shrui)

    def __gt__(self, other):
        return self._compare(other, arith.CmpIPredicate.ugt, arith.CmpFPredicate.OGT)

    def __ge__(self, other):
        return self._compare(other, arith.CmpIPredicate.uge, arith.CmpFPredicate.OGE)

    def __lt__(self, other):
        return self._compare(other, arith.CmpIPredicate.ult, arith.CmpFPredicate.OLT)

    def __le__(self, other):
        return self._compare(other, arith.CmpIPredicate.ule, arith.CmpFPredicate.OLE)


class Warp:
    """The lanes of this thread's warp.

    Attributes:
      thread: index in the block.
      lane: index in the warp.
      scratch: address of 64 words of shared memory, the warp's own, for `put` and `get`.
    """

    def __init__(self):
        self.thread = Reg(utils.thread_idx())
        self.lane = self.thread % 32
        self.scratch: ir.Value | None = None

    def u32(self, x: int) -> Reg:
        return Reg(utils.c(x, _u32()))

    def f32(self, x: float) -> Reg:
        return Reg(utils.c(x, _f32()))

    def select(self, where: Reg, x: Reg, y: Reg | int | float) -> Reg:
        return Reg(arith.select(where.value, x.value, _same(x, y).value))

    def equal(self, x: Reg, y: Reg | int) -> Reg:
        return Reg(arith.cmpi(arith.CmpIPredicate.eq, x.value, _same(x, y).value))

    def max(self, x: Reg, y: Reg) -> Reg:
        return Reg(arith.maxui(x.value, y.value))

    def min(self, x: Reg, y: Reg) -> Reg:
        return Reg(arith.minui(x.value, y.value))

    def bits(self, x: Reg) -> Reg:
        return Reg(arith.bitcast(_u32(), x.value))

    def floating(self, x: Reg) -> Reg:
        return Reg(arith.bitcast(_f32(), x.value))

    def floor(self, x: Reg) -> Reg:
        return Reg(math.floor(x.value))

    def clip(self, x: Reg, low: float, high: float) -> Reg:
        """NaN becomes `low`."""
        return Reg(arith.minnumf(arith.maxnumf(x.value, self.f32(low).value), self.f32(high).value))

    def integer(self, x: Reg) -> Reg:
        return Reg(arith.fptoui(_u32(), x.value))

    def exp(self, x: Reg) -> Reg:
        return Reg(math.exp(x.value))

    # between lanes

    def shuffle_xor(self, x: Reg, mask: int) -> Reg:
        return Reg(utils.shfl_bfly(x.value, mask))

    def shuffle_up(self, x: Reg, by: int) -> Reg:
        """x of the lane `by` lower; unspecified where there is none."""
        args = self.u32(ALL).value, x.value, self.u32(by).value, self.u32(0).value
        return Reg(nvvm.shfl_sync(*args, nvvm.ShflKind.up))

    def of_lane(self, x: Reg, lane: int) -> Reg:
        """x of one lane, in all of them."""
        args = self.u32(ALL).value, x.value, self.u32(lane).value, self.u32(31).value
        return Reg(nvvm.shfl_sync(*args, nvvm.ShflKind.idx))

    def largest(self, x: Reg) -> Reg:
        return Reg(nvvm.redux_sync(x.value, nvvm.ReductionKind.UMAX, self.u32(ALL).value))

    def smallest(self, x: Reg) -> Reg:
        return Reg(nvvm.redux_sync(x.value, nvvm.ReductionKind.UMIN, self.u32(ALL).value))

    def put(self, place: Reg, key: Reg, tag: Reg, where: Reg) -> None:
        """Stores a pair at place < 32 of the scratch memory."""
        self.shared("st.shared.v2.b32 [$0], {$1, $2};", self.scratch, place + place, key, tag, where=where)

    def get(self) -> tuple[Reg, Reg]:
        """The pair at this lane's place, after all lanes' `put`s and before their next."""
        self.sync()
        pair = tuple(self.shared_load(self.scratch, self.lane + self.lane + half) for half in (0, 1))
        self.sync()
        return pair

    def sync(self) -> None:
        utils.inline_ptx("bar.warp.sync 0xffffffff;", convergent=True)

    # control flow

    def cond(self, uniform: Reg, yes: Callable[[], Sequence[Reg]], no: Callable[[], Sequence[Reg]]) -> list[Reg]:
        """The branches return two u32 registers. The predicate is the same in all lanes."""
        op = scf.IfOp(uniform.value, [_u32(), _u32()], has_else=True)
        for block, branch in ((op.then_block, yes), (op.else_block, no)):
            with ir.InsertionPoint(block):
                scf.yield_([x.value for x in branch()])
        return [Reg(x) for x in op.results]

    def loop(self, n: int, body: Callable[[Reg, list[Reg]], list[Reg]], carry: list[Reg]) -> list[Reg]:
        """carry = body(i, carry) for i in range(n)."""
        bound = self.u32(n).value
        result = utils.fori(bound, [x.value for x in carry])(
            lambda i, values: [x.value for x in body(Reg(i), [Reg(v) for v in values])]
        )
        return [Reg(x) for x in result.results]

    # memory; shared memory goes through volatile instructions alone, which keep their order

    def shared(self, ptx: str, base: ir.Value, index: Reg, *values: Reg, where: Reg | None = None) -> None:
        predicate = None if where is None else where.value
        utils.inline_ptx(ptx, address(base, index), *(x.value for x in values), predicate=predicate)

    def shared_load(self, base: ir.Value, index: Reg) -> Reg:
        load = "ld.shared.b32 $0, [$1];"
        return Reg(utils.inline_ptx(load, address(base, index), result_types=_u32(), has_side_effects=True))

    def shared_store(self, base: ir.Value, index: Reg, x: Reg, where: Reg | None = None) -> None:
        self.shared("st.shared.b32 [$0], $1;", base, index, x, where=where)

    def shared_add(self, base: ir.Value, index: Reg, x: Reg, where: Reg) -> None:
        self.shared("red.shared.add.u32 [$0], $1;", base, index, x, where=where)


def base(ref: ir.Value) -> ir.Value:
    """The address of an array of 32-bit words in shared memory."""
    return utils.memref_ptr(ref)


def address(base: ir.Value, index: Reg) -> ir.Value:
    return utils.getelementptr(base, [index.value], _u32())


def at(*index: Reg) -> list[ir.Value]:
    return [arith.index_castui(ir.IndexType.get(), i.value) for i in index]


def load(ref: ir.Value, *index: Reg) -> Reg:
    return Reg(memref.load(ref, at(*index)))


def store(x: Reg, ref: ir.Value, *index: Reg) -> None:
    memref.store(x.value, ref, at(*index))


def when(where: Reg):
    return utils.when(where.value)


def block() -> Reg:
    return Reg(utils.block_idx())


def barrier() -> None:
    """Of all threads of the block."""
    gpu.barrier()


def strided(first: Reg, bound: Reg, step: int, body: Callable[[Reg], None]) -> None:
    """body(i) for i in range(first, bound, step)."""
    op = scf.ForOp(first.value, bound.value, utils.c(step, _u32()), [])
    with ir.InsertionPoint(op.body):
        body(Reg(op.induction_variable))
        scf.yield_([])

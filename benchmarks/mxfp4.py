"""MXFP4 matrices against bfloat16 ones in the grouped matmul: python -m benchmarks.mxfp4 [--tune] [--turn=FILE]

Random codes, scales around 2^-4, normal rows; as many rows for each group as a random choice of group per eight gives
(or exactly 8 each). bfloat16 matrices are the values of the packed ones. All operands are many times the L2 cache.
Floors: every operand and the result moved once, or the multiplications. Everything is compiled before anything runs;
with --turn the runs then wait for the lock of that file, so that several programs can share a card.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import time
from collections.abc import Callable

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.moe import BYTES, FLOPS, group_sizes, median_ms
from benchmarks.turns import turn
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.gpu_packed import PackedTiles
from pallas_kernels.grouped_matmul.pallas_gpu import packed_rows
from pallas_kernels.mxfp4 import GROUP, Packed


def make(seed, G: int, M: int, K: int, N: int) -> tuple[jax.Array, Packed]:
    """Rows and packed matrices, a group at a time: the bits of all at once would not fit beside them."""
    byte = lambda *args: lambda i: jax.random.randint(jax.random.fold_in(jax.random.key(seed), i), *args, jnp.uint8)
    parts = byte((N, K // 2), 0, 255), byte((K // GROUP, N), 119, 126)
    x = jax.random.normal(jax.random.key(seed), (M, K), jnp.bfloat16)
    return x, Packed(*(jax.lax.map(part, jnp.arange(G)) for part in parts))


def values(w: Packed) -> jax.Array:
    return jax.lax.map(lambda w: w.unpack(jnp.bfloat16), w)


def sizes_of(G: int, M: int) -> np.ndarray:
    return np.full(G, 8, np.int32) if M == 8 * G else group_sizes(G, M)


def error(got, x, w: Packed, group, first, rows: int):
    """Of `rows` rows of a group, in the norm, against float32 products of the values."""
    cut = lambda a: jax.lax.dynamic_slice_in_dim(a, first, rows).astype(jnp.float32)
    matrix = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, group, keepdims=False), w).unpack(jnp.float32)
    want = jnp.dot(cut(x), matrix, precision=jax.lax.Precision.HIGHEST)
    return jnp.linalg.norm(cut(got) - want) / jnp.linalg.norm(want)


def candidates(M: int, G: int, K: int) -> list[PackedTiles]:
    rows = (8, 16) if M == 8 * G else (64, 128, 256)
    out = [PackedTiles(r, s, stages) for r in rows for s in (1, 2, 4) for stages in (3, 4, 6)]
    room = lambda t: t.stages * (t.steps * t.rows * 128 + 128 * 32 * t.steps + 256 * t.steps) < 200_000
    return [t for t in out if K % (64 * t.steps) == 0 and room(t)]


@dataclasses.dataclass
class Case:
    """One shape: what is to be run on it, by name, and what was compiled."""

    G: int
    M: int
    K: int
    N: int
    calls: dict[str, tuple[Callable, bool]]  # name -> (f(rows, matrices, group sizes), whether they are packed)
    programs: dict[str, jax.stages.Compiled] = dataclasses.field(default_factory=dict)

    def lowered(self):
        """(name, lowered program) of all that `run` calls."""
        sizes, number = jax.ShapeDtypeStruct((self.G,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        made = functools.partial(make, G=self.G, M=self.M, K=self.K, N=self.N)
        x, w = jax.eval_shape(made, number)
        dense, out = jax.eval_shape(values, w), jax.ShapeDtypeStruct((self.M, self.N), jnp.bfloat16)
        yield "make", jax.jit(made).lower(number)
        yield "values", jax.jit(values).lower(w)
        yield "error", jax.jit(functools.partial(error, rows=8)).lower(out, x, w, number, number)
        for name, (f, packed) in self.calls.items():
            try:
                yield name, jax.jit(f).lower(x, w if packed else dense, sizes)
            except Exception as problem:
                print(f"  {name}: {str(problem)[:100]}", flush=True)

    def floor(self, nbytes: float) -> float:
        """Milliseconds of the product of matrices with `nbytes` for each number."""
        G, M, K, N = self.G, self.M, self.K, self.N
        return 1e3 * max(2 * M * K * N / FLOPS, (2 * M * (K + N) + nbytes * G * K * N) / BYTES)

    def run(self) -> None:
        G, M, K, N = self.G, self.M, self.K, self.N
        sizes = sizes_of(G, M)
        floors = {True: self.floor((1 + 1 / 16) / 2), False: self.floor(2)}
        print(f"{G} groups, {M} rows, {K} -> {N}: floors {floors[True]:.3f} ms MXFP4, {floors[False]:.3f} ms bfloat16",
              flush=True)
        x, packed = self.programs["make"](np.int32(0))
        dense = self.programs["values"](packed)
        where = np.flatnonzero(sizes)
        where = where[[0, len(where) // 2, -1]]
        firsts = (np.cumsum(sizes) - sizes).astype(np.int32)
        times = {}
        for name, (_, is_packed) in self.calls.items():
            if name not in self.programs:
                continue
            call = functools.partial(self.programs[name], x, packed if is_packed else dense, sizes)
            off = max(float(self.programs["error"](call(), x, packed, np.int32(g), firsts[g])) for g in where)
            times[name] = ms = median_ms(call, jax.block_until_ready, repeats=4, samples=5)
            print(f"  {name:72s} {ms:8.3f} ms  {2 * M * K * N / ms / 1e9:6.1f} TFLOP/s  "
                  f"{floors[is_packed] / ms:4.0%} of its floor  error {off:.1e}", flush=True)
        for name in times:
            if name.startswith("bfloat16") and "MXFP4 pallas_gpu" in times:
                ratio = times[name] / times["MXFP4 pallas_gpu"]
                print(f"  MXFP4 is {ratio:.2f} times as fast as {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="64,512;896,7168;56,32768", help="experts,rows;...")
    parser.add_argument("--products", default="3584,6144;3072,3584", help="K,N;...")
    parser.add_argument("--tune", action="store_true", help="time tile sizes")
    parser.add_argument("--rivals", default="pallas_gpu", help="implementations for bfloat16 matrices")
    parser.add_argument("--turn", default="", help="file whose lock is held while the card is used")
    args = parser.parse_args()
    pairs = lambda text: [tuple(map(int, x.split(","))) for x in text.split(";")]
    op = lambda how: functools.partial(grouped_matmul, align=8, implementation=how)
    cases = []
    for G, M in pairs(args.groups):
        for K, N in pairs(args.products):
            calls = {"MXFP4 pallas_gpu": (op("pallas_gpu"), True)}
            calls |= {f"bfloat16 {how}": (op(how), False) for how in args.rivals.split(",")}
            if args.tune:
                calls |= {str(t): (functools.partial(packed_rows, tiles=t), True) for t in candidates(M, G, K)}
            cases.append(Case(G, M, K, N, calls))

    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [(case, name, pool.submit(lowered.compile)) for case in cases for name, lowered in case.lowered()]
        for case, name, program in waiting:
            try:
                case.programs[name] = program.result()
            except Exception as problem:
                print(f"  {name}: {str(problem)[:100]}", flush=True)
    print(f"{len(waiting)} programs compiled in {time.perf_counter() - began:.0f} s", flush=True)
    with turn(args.turn):
        began = time.perf_counter()
        for case in cases:
            case.run()
        print(f"the card was used for {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()

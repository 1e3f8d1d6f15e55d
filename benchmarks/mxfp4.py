"""MXFP4 matrices against bfloat16 ones in the grouped matmul: python -m benchmarks.mxfp4 [--tune]

Random codes, scales around 2^-4, normal rows; as many rows for each group as a random choice of group per eight gives
(or exactly 8 each). bfloat16 matrices are the values of the packed ones. All operands are many times the L2 cache.
Floors: every operand and the result moved once, or the multiplications.
"""

import argparse
import dataclasses
import functools
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.moe import BYTES, FLOPS, group_sizes, median_ms
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.gpu_packed import PackedTiles
from pallas_kernels.grouped_matmul.pallas_gpu import packed_rows
from pallas_kernels.mxfp4 import Packed


def operands(G: int, M: int, K: int, N: int):
    bits = jax.jit(lambda i, shape, low, high: jax.random.randint(jax.random.key(i), shape, low, high, jnp.uint8),
                   static_argnums=(1, 2, 3))
    codes = jnp.stack([bits(i, (N, K // 2), 0, 255) for i in range(G)])
    x = jax.random.normal(jax.random.key(1), (M, K), jnp.bfloat16)
    return x, Packed(codes, bits(0, (G, K // 32, N), 119, 126))


def sizes_of(G: int, M: int) -> np.ndarray:
    return np.full(G, 8, np.int32) if M == 8 * G else group_sizes(G, M)


def error(got, x, w: Packed, sizes, groups=(0, 1, -1)) -> float:
    """Of the rows of some groups, in the norm, against float32 products of the values."""
    ends = np.cumsum(sizes)
    worst = 0.0
    for g in groups:
        rows = slice(ends[g] - sizes[g], ends[g])
        values = jax.tree.map(lambda a, g=g: a[g], w).unpack(jnp.float32)
        want = jnp.dot(x[rows].astype(jnp.float32), values, precision=jax.lax.Precision.HIGHEST)
        worst = max(worst, float(jnp.linalg.norm(got[rows] - want) / jnp.linalg.norm(want)))
    return worst


def candidates(M: int, G: int, K: int):
    rows = (8, 16) if M == 8 * G else (64, 128, 256)
    out = [PackedTiles(r, s, stages) for r in rows for s in (1, 2, 4) for stages in (3, 4, 6)]
    room = lambda t: t.stages * (t.steps * t.rows * 128 + 128 * 32 * t.steps + 256 * t.steps) < 200_000
    return [t for t in out if K % (64 * t.steps) == 0 and room(t)]


@dataclasses.dataclass
class Case:
    """One product to be timed."""

    x: jax.Array
    w: Packed
    sizes: np.ndarray
    flops: int

    def show(self, name, f, matrices, floor) -> float:
        """Milliseconds of f(rows, matrices, group sizes), printed with its error."""
        call = functools.partial(jax.jit(f), self.x, matrices, jnp.asarray(self.sizes))
        off = error(call(), self.x, self.w, self.sizes)
        ms = median_ms(call, jax.block_until_ready, repeats=4, samples=5)
        print(f"  {name:72s} {ms:8.3f} ms  {self.flops / ms / 1e9:6.1f} TFLOP/s  {floor / ms:4.0%} of its floor  "
              f"error {off:.1e}", flush=True)
        return ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="448,3584;56,32768", help="experts,rows;...")
    parser.add_argument("--products", default="3584,6144;3072,3584", help="K,N;...")
    parser.add_argument("--tune", action="store_true", help="time tile sizes")
    parser.add_argument("--rivals", default="pallas_gpu", help="implementations for bfloat16 matrices")
    args = parser.parse_args()
    pairs = lambda text: [tuple(map(int, x.split(","))) for x in text.split(";")]
    for G, M in pairs(args.groups):
        for K, N in pairs(args.products):
            x, w = operands(G, M, K, N)
            s = sizes_of(G, M)
            floors = [1e3 * max(2 * M * K * N / FLOPS, (2 * M * (K + N) + b * G * K * N) / BYTES) for b in (17 / 32, 2)]
            print(f"{G} groups, {M} rows, {K} -> {N}: floors {floors[0]:.3f} ms MXFP4, {floors[1]:.3f} ms bfloat16",
                  flush=True)

            case = Case(x, w, s, 2 * M * K * N)
            if args.tune:
                for t in candidates(M, G, K):
                    try:
                        case.show(str(t), functools.partial(packed_rows, tiles=t), w, floors[0])
                    except Exception as problem:
                        print(f"  {t}: {str(problem)[:100]}", flush=True)
            op = lambda how: functools.partial(grouped_matmul, align=8, implementation=how)
            packed = case.show("MXFP4 pallas_gpu", op("pallas_gpu"), w, floors[0])
            values = jax.lax.map(lambda w: w.unpack(jnp.bfloat16), w)
            for how in args.rivals.split(","):
                dense = case.show(f"bfloat16 {how}", op(how), values, floors[1])
                print(f"  MXFP4 is {dense / packed:.2f} times as fast as bfloat16 {how}", flush=True)
            del values


if __name__ == "__main__":
    main()

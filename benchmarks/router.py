"""The router op against its floor, XLA's top_k and histogram, and torch.topk: python -m benchmarks.router --help

Scores are float32 sigmoids of normal logits, the bias that of ten steps of quantile balancing's scale; the op returns
experts, weights, cutoff, loads and, with --bins, the histogram. Calls are chained inside one program, so host time is
not in the figures; the scores (117 MB at 32768 x 896) are larger than the L2 cache. torch runs in a process of its own.
"""

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the rival needs memory too

BANDWIDTH = 4.3e12  # bytes a second, what one H200 reached in large copies
CHAIN = 10  # calls in one program


def inputs(M: int, E: int, kind: str = "random"):
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    scores = 1 / (1 + np.exp(-rng.normal(size=(M, E)).astype(np.float32)))
    bias = (0.2 * rng.normal(size=E)).astype(np.float32)
    if kind == "ties":
        scores, bias = np.round(scores * 64) / 64, np.zeros_like(bias)
    elif kind == "sorted":
        scores, bias = np.sort(scores, axis=1), np.sort(bias)
    elif kind == "equal":
        scores, bias = np.full_like(scores, 0.5), np.zeros_like(bias)
    elif kind == "barred":
        bias[::7] = -np.inf
    return jnp.asarray(scores), jnp.asarray(bias)


def milliseconds(step, scores, bias) -> tuple[float, float]:
    """(median time of step(scores, bias) -> float, spread) on the device, CHAIN calls at a time."""
    import jax

    @jax.jit
    def chain(scores, bias):
        for _ in range(CHAIN):
            bias = bias + 0 * step(scores, bias)  # each call waits for the one before
        return bias

    jax.block_until_ready(chain(scores, bias))
    samples = []
    for _ in range(15):
        start = time.perf_counter()
        jax.block_until_ready([chain(scores, bias) for _ in range(4)])
        samples.append((time.perf_counter() - start) / 4 / CHAIN * 1e3)
    return statistics.median(samples), max(samples) - min(samples)


def step_of(select, k: int, bins: int, **options):
    """Chains a selection: its cutoff and a count keep every output alive."""
    import jax.numpy as jnp

    def step(scores, bias):
        found = select(scores, bias, jnp.ones(len(scores), bool), k=k, bins=bins, sigmoid=False, **options)
        alive = found.cutoff_M[0] + found.load_E[0] + found.experts_MK[0, 0] + found.chosen_MK[0, 0]
        return alive + found.histogram[0, 0] if bins else alive

    return step


def check(M: int, E: int, k: int, bins: int) -> None:
    """The kernels against XLA at full size: every integer and every cutoff must be equal."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.router.pallas_gpu import select_pallas_gpu
    from pallas_kernels.router.xla import select

    for kind in ("random", "ties", "sorted", "barred", "equal"):
        scores, bias = inputs(M, E, kind)
        real = jnp.arange(M) % 5 > 0
        got, want = (
            jax.jit(lambda s, b, r, f=f: f(s, b, r, k=k, bins=bins, sigmoid=False))(scores, bias, real)
            for f in (select_pallas_gpu, select)
        )
        different = {name: int((np.asarray(a) != np.asarray(b)).sum()) for name, a, b in zip(got._fields, got, want)}
        print(f"  {kind:8s} entries that differ from XLA: {different}", flush=True)


def times_torch(M: int, E: int, k: int) -> float:
    import torch
    from triton.testing import do_bench

    generator = torch.Generator(device="cuda").manual_seed(0)
    scores = torch.sigmoid(torch.randn(M, E, generator=generator, device="cuda"))
    bias = 0.2 * torch.randn(E, generator=generator, device="cuda")
    return do_bench(lambda: torch.topk(scores + bias, k + 1), warmup=50, rep=200, return_mode="median")


def show(name: str, ms: float, spread: float, M: int, E: int) -> None:
    floor = 4 * M * E / BANDWIDTH * 1e3
    print(f"  {name:44s} {ms:8.4f} ms (spread {spread:.4f})  floor {floor:.4f} ms ({floor / ms:4.0%})", flush=True)


def sweep(scores, bias, k: int, bins: int) -> None:
    from pallas_kernels.router.config import GPUConfig
    from pallas_kernels.router.pallas_gpu import select_pallas_gpu

    for warpgroups, blocks in ((1, 528), (1, 1056), (2, 264), (3, 132), (5, 132), (6, 132), (7, 132), (8, 132)):
        config = GPUConfig(blocks=blocks, select_warpgroups=warpgroups)
        step = step_of(select_pallas_gpu, k, 0, config=config)
        show(f"select, {blocks} blocks of {warpgroups} warpgroups", *milliseconds(step, scores, bias), *scores.shape)
    cuts = ((8, 1), (16, 2), (16, 4), (16, 7), (32, 4), (32, 8), (56, 8))
    for (experts, parts), warpgroups, unroll in itertools.product(cuts, (4, 8), (4, 8, 16)):
        config = GPUConfig(experts=experts, parts=parts, warpgroups=warpgroups, unroll=unroll)
        name = f"{experts} experts {parts} parts {warpgroups} warpgroups unroll {unroll}"
        try:
            step = step_of(select_pallas_gpu, k, bins, config=config)
            show(name, *milliseconds(step, scores, bias), *scores.shape)
        except Exception as error:  # shared memory or threads that a block cannot have
            print(f"  {name} failed:", str(error).splitlines()[0], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="32768,896,16;8192,896,16;32768,256,8", help="M,E,k;...")
    parser.add_argument("--bins", type=int, default=1000)
    parser.add_argument("--implementation", action="append", help="repeatable; default: pallas_gpu and xla")
    parser.add_argument("--sweep", action="store_true", help="block sizes of the GPU kernels at the first shape")
    parser.add_argument("--check", action="store_true", help="compare the GPU kernels with XLA at the first shape")
    parser.add_argument("--torch-only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = [tuple(map(int, shape.split(","))) for shape in (args.torch_only or args.shapes).split(";")]
    if args.torch_only:
        print(json.dumps(times_torch(*shapes[0])))
        return
    from pallas_kernels.router.api import IMPLEMENTATIONS

    if args.check:
        check(*shapes[0], args.bins)
    for M, E, k in shapes:
        print(f"M{M} E{E} k{k}", flush=True)
        scores, bias = inputs(M, E)
        for name in args.implementation or ["pallas_gpu", "xla"]:
            for bins in (0, args.bins):
                what = f"{name}, {'histogram' if bins else 'no histogram'}"
                show(what, *milliseconds(step_of(IMPLEMENTATIONS[name], k, bins), scores, bias), M, E)
        if importlib.util.find_spec("torch"):
            command = [sys.executable, "-m", "benchmarks.router", "--torch-only", f"{M},{E},{k}"]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                print("  torch.topk failed:", result.stderr.strip().splitlines()[-1])
            else:
                show("torch.topk(scores + bias)", json.loads(result.stdout.strip().splitlines()[-1]), 0.0, M, E)
    if args.sweep:
        M, E, k = shapes[0]
        sweep(*inputs(M, E), k, args.bins)


if __name__ == "__main__":
    main()

"""KDA forward and backward against the floors and against flash-linear-attention: python -m benchmarks.kda --help

Both sides get the same work: normalised q and k, log decays in float32, beta after its sigmoid, bfloat16 q, k, v, heads
of 128 x 128, no initial state, final state returned. fla (Triton) runs in a process of its own, if torch and fla are
there; its first call tunes itself for minutes. Tensors are far larger than the L2 cache, so it is not flushed.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the rival needs memory too

D, C = 128, 64
FLOPS, BYTES = 790e12, 4.3e12  # what one H200 reached in large bf16 matrix products and copies


def work(B: int, T: int, H: int) -> dict[str, tuple[float, float]]:
    """(multiply-adds x 2, bytes) that the forward pass, and forward and backward, cannot do without.

    Products of lower-triangular matrices are counted in 16-row tiles, the inverse as 2/3 C^2 a row; the backward pass
    recomputes what the forward pass does not have to keep. Bytes: inputs once, outputs once.
    """
    N = B * T * H
    triangle, state = D * (C + 16), 2 * D * D
    forward = 4 * triangle + 2 * C * C / 3 + 3 * state
    recompute = 3 * triangle + 2 * C * C / 3 + 2 * state
    backward = 8 * triangle + 6 * state + recompute
    inputs, o = (3 * 2 + 4) * D + 4, 2 * D
    return {
        "forward": (N * forward, N * (inputs + o)),
        "forward+backward": (N * (forward + backward), N * (2 * (inputs + o) + inputs)),
    }


def times_jax(B: int, T: int, H: int, documents: int, implementation: str | None, repeats: int):
    """Milliseconds of the forward pass and of forward and backward, and seconds of the first call of both."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.kda import kda

    keys = jax.random.split(jax.random.key(0), 6)
    normal = lambda i: jax.random.normal(keys[i], (B, T, H, D))
    unit = lambda x: (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)
    q, k, v, d_o = unit(normal(0)), unit(normal(1)), *(normal(i).astype(jnp.bfloat16) for i in (2, 3))
    g = -5 * jax.nn.sigmoid(2 * normal(4) - 4)
    beta = jax.nn.sigmoid(jax.random.normal(keys[5], (B, T, H)))
    ids = jnp.broadcast_to(jnp.arange(T) * documents // T, (B, T)) if documents > 1 else None
    op = lambda *x: kda(*x, segment_ids=ids, implementation=implementation)

    @jax.jit
    def both(d_o, *x):
        (o, state), vjp = jax.vjp(op, *x)
        return o, vjp((d_o, jnp.zeros_like(state)))

    def median(f, *x):
        start = time.perf_counter()
        jax.block_until_ready(f(*x))
        first = time.perf_counter() - start
        samples = []
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(repeats):
                last = f(*x)
            jax.block_until_ready(last)
            samples.append((time.perf_counter() - start) / repeats * 1e3)
        return statistics.median(samples), first

    (forward, first), (whole, first_whole) = (
        median(jax.jit(op), q, k, v, g, beta),
        median(both, d_o, q, k, v, g, beta),
    )
    memory = both.lower(d_o, q, k, v, g, beta).compile().memory_analysis()
    peak = sum(getattr(memory, f"{x}_size_in_bytes") for x in ("argument", "output", "temp"))
    return {
        "forward": forward,
        "forward+backward": whole,
        "first call": first + first_whole,
        "GiB": peak / 2**30,
    }


def times_fla(B: int, T: int, H: int):
    """The same of fla's `chunk_kda`."""
    os.environ |= {
        "FLA_FLASH_KDA": "0",
        "FLA_DISABLE_BACKEND_DISPATCH": "1",
    }  # its Triton kernels, nothing else
    import torch
    from fla.ops.kda import chunk_kda
    from triton.testing import do_bench

    generator = torch.Generator(device="cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")
    unit = lambda x: (x / x.norm(dim=-1, keepdim=True)).bfloat16()
    q, k = (unit(normal(B, T, H, D)) for _ in range(2))
    v, d_o = (normal(B, T, H, D).bfloat16() for _ in range(2))
    g = -5 * torch.sigmoid(2 * normal(B, T, H, D) - 4)
    beta = torch.sigmoid(normal(B, T, H))
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    op = lambda: chunk_kda(*inputs, output_final_state=True, safe_gate=True)

    def forward():
        with torch.no_grad():
            return op()

    def both():
        return torch.autograd.grad(op()[0], inputs, d_o)

    start = time.perf_counter()
    forward(), both(), torch.cuda.synchronize()
    first = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    both()
    peak = torch.cuda.max_memory_allocated() / 2**30
    times = [do_bench(f, warmup=50, rep=300, return_mode="median") for f in (forward, both)]
    return {"forward": times[0], "forward+backward": times[1], "first call": first, "GiB": peak}


def show(name: str, shape: tuple[int, int, int], times: dict[str, float]) -> None:
    for what, (flops, moved) in work(*shape).items():
        ms = times[what]
        floor = max(flops / FLOPS, moved / BYTES) * 1e3
        print(
            f"  {name:12s} {what:17s} {ms:8.3f} ms  {flops / ms / 1e9:6.1f} TFLOP/s  {moved / ms / 1e6:7.1f} GB/s  "
            f"floor {floor:.3f} ms ({floor / ms:4.0%})",
            flush=True,
        )
    print(f"  {name:12s} first call {times['first call']:.1f} s, memory {times['GiB']:.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="1,8192,96;1,8192,32;4,8192,32;1,65536,32", help="B,T,H;...")
    parser.add_argument("--documents", type=int, default=1, help="pack this many documents into each row")
    parser.add_argument("--implementation", action="append", help="repeatable; default: pallas_gpu")
    parser.add_argument(
        "--rival", default="", help="shapes to run fla on as well; it tunes for minutes per H"
    )
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--fla-only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = lambda text: [tuple(map(int, shape.split(","))) for shape in text.split(";") if shape]
    if args.fla_only:
        print(json.dumps(times_fla(*shapes(args.fla_only)[0])))
        return
    for shape in shapes(args.shapes):
        print("B{} T{} H{}".format(*shape), f"documents {args.documents}", flush=True)
        for name in args.implementation or ["pallas_gpu"]:
            show(name, shape, times_jax(*shape, args.documents, name, args.repeats))
    for shape in shapes(args.rival):
        print("B{} T{} H{}".format(*shape), flush=True)
        if not all(importlib.util.find_spec(name) for name in ("torch", "fla")):
            print("  fla          not run: torch or fla-core cannot be imported")
            continue
        command = [sys.executable, "-m", "benchmarks.kda", "--fla-only", ",".join(map(str, shape))]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            print("  fla          failed:", result.stderr.strip().splitlines()[-1])
        else:
            show("fla", shape, json.loads(result.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    main()

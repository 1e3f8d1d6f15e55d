"""Causal attention with MLA head sizes against cuDNN, through JAX and torch: python -m benchmarks.attention --help

Useful work is counted: T^2 H (K + V) multiply-adds forward (half of the square, 2 FLOP each) and T^2 H (3 K + 2 V) more
backward, whatever a kernel recomputes or pads. cuDNN through JAX refuses values narrower than keys, so they are padded.
torch's SDPA with its cuDNN backend runs in a process of its own, if torch is there.
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

FLOPS = 790e12  # what one H200 reached in large bf16 matrix products


def work(B: int, T: int, H: int, K: int, V: int) -> dict[str, int]:
    """FLOP of the forward pass, and of forward and backward."""
    forward = B * T * T * H * (K + V)
    return {"forward": forward, "forward+backward": forward + B * T * T * H * (3 * K + 2 * V)}


def times_jax(
    B: int, T: int, H: int, K: int, V: int, documents: int, implementation: str, repeats: int, dtype: str
) -> dict[str, float]:
    """Milliseconds of the forward pass and of forward and backward, and seconds of the first calls."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.attention import attention

    keys = jax.random.split(jax.random.key(0), 4)
    normal = lambda i, size: jax.random.normal(keys[i], (B, T, H, size), dtype)
    q, k, v, do = normal(0, K), normal(1, K), normal(2, V), normal(3, V)
    ids = jnp.broadcast_to(jnp.arange(T) * documents // T, (B, T)) if documents > 1 else None

    def op(q, k, v):
        if implementation != "cudnn":
            return attention(q, k, v, scale=K**-0.5, segment_ids=ids, implementation=implementation)[0]
        v = jnp.pad(v, ((0, 0),) * 3 + ((0, K - V),))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")[..., :V]

    def both(do, q, k, v):
        o, vjp = jax.vjp(op, q, k, v)
        return o, vjp(do.astype(o.dtype))

    def median(f, *x):
        f = jax.jit(f)
        start = time.perf_counter()
        jax.block_until_ready(f(*x))
        first = time.perf_counter() - start
        samples = []
        for _ in range(5 if repeats > 1 else 1):
            start = time.perf_counter()
            for _ in range(repeats):
                last = f(*x)
            jax.block_until_ready(last)
            samples.append((time.perf_counter() - start) / repeats * 1e3)
        return statistics.median(samples), first

    (forward, first), (whole, first_whole) = median(op, q, k, v), median(both, do, q, k, v)
    return {"forward": forward, "forward+backward": whole, "first call": first + first_whole}


def times_torch(B: int, T: int, H: int, K: int, V: int) -> dict[str, float]:
    """The same of torch's SDPA with cuDNN, with arrays [B, H, T, .] as it wants them."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from triton.testing import do_bench

    normal = lambda size: torch.randn(B, H, T, size, device="cuda", dtype=torch.bfloat16)
    inputs, do = [normal(x).requires_grad_() for x in (K, K, V)], normal(V)
    op = lambda: torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)

    def forward():
        with torch.no_grad():
            return op()

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        both = lambda: torch.autograd.grad(op(), inputs, do)
        start = time.perf_counter()
        forward(), both(), torch.cuda.synchronize()
        first = time.perf_counter() - start
        times = [do_bench(f, warmup=50, rep=200, return_mode="median") for f in (forward, both)]
    return {"forward": times[0], "forward+backward": times[1], "first call": first}


def show(name: str, shape: tuple[int, ...], times: dict[str, float]) -> None:
    cells = (
        f"{what} {(ms := times[what]):9.3f} ms {flops / ms / 1e9:6.1f} TFLOP/s ({flops / ms / FLOPS * 1e3:4.0%})"
        for what, flops in work(*shape).items()
    )
    print(f"  {name:12s}", *cells, f"first call {times['first call']:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = "1,8192,6,192,128;1,8192,32,192,128;1,8192,96,192,128;1,32768,16,192,128"
    parser.add_argument("--shapes", default=shapes, help="B,T,H,K,V;...")
    parser.add_argument(
        "--documents", type=int, default=1, help="pack this many documents into each row (no rivals)"
    )
    parser.add_argument(
        "--implementation", action="append", help="repeatable; default: pallas_gpu, cudnn, torch"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="calls in a row, of which the mean is taken, five times"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of q, k and v (the rivals need bfloat16)")
    parser.add_argument("--torch-only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    split = lambda text: [tuple(map(int, shape.split(","))) for shape in text.split(";") if shape]
    if args.torch_only:
        print(json.dumps(times_torch(*split(args.torch_only)[0])))
        return
    for shape in split(args.shapes):
        print("B{} T{} H{} K{} V{}".format(*shape), f"documents {args.documents}", flush=True)
        names = args.implementation or ["pallas_gpu"] + (["cudnn", "torch"] if args.documents == 1 else [])
        for name in names:
            if name != "torch":
                show(name, shape, times_jax(*shape, args.documents, name, args.repeats, args.dtype))
            elif importlib.util.find_spec("torch") is None:
                print("  torch        not run: it cannot be imported")
            else:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.attention",
                    "--torch-only",
                    ",".join(map(str, shape)),
                ]
                result = subprocess.run(command, capture_output=True, text=True)
                if result.returncode:
                    print("  torch        failed:", result.stderr.strip().splitlines()[-1])
                else:
                    show("torch cuDNN", shape, json.loads(result.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    main()

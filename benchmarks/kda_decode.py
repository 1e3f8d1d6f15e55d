"""A decoding step of a KDA layer against its byte floor and fla: python -m benchmarks.kda_decode --help

bfloat16 projections, float32 states of 128 x 128. Each figure is the mean step of a loop on the device, as generation
runs it: the states of one step are the arguments of the next. `fused_recurrent_kda` of flash-linear-attention (Triton,
in a process of its own, if torch and fla are there) does less: no convolution, no output norm and gate; it is timed in
a CUDA graph.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the rival needs memory too

D, TAPS = 128, 4
BYTES = 4.3e12  # a second: what one H200 reached in large copies


def moved(B: int, H: int) -> int:
    """Bytes a step cannot do without: states in and out, projections, logits and taps in, taps and outputs out."""
    return B * H * (2 * 4 * D * D + 2 * (3 * D + 2 * D + 1 + 2 * (TAPS - 1) * 3 * D + D))


def times_jax(B: int, H: int, implementation: str, steps: int) -> dict[str, float]:
    """Microseconds of a step, seconds of the first call, and the relative error of a step against the recurrence."""
    import functools

    import jax
    import jax.numpy as jnp

    from pallas_kernels.kda_decode import kda_decode

    keys = iter(jax.random.split(jax.random.key(0), 12))
    normal = lambda *shape, dtype=jnp.float32: jax.random.normal(next(keys), shape, dtype)
    low = functools.partial(normal, dtype=jnp.bfloat16)
    inputs = [low(B, 3, H, D), low(B, H, D) - 3, low(B, H), low(B, H, D)]
    taps, state = low(B, TAPS - 1, 3, H, D), normal(B, H, D, D)
    weights = {"conv": normal(3, H, D, TAPS), "a_log": normal(H), "dt_bias": normal(H, D), "out_norm": normal(D)}
    op = functools.partial(kda_decode, **weights, g_min=-5.0)

    def step(_, carry):
        o, taps, state = carry
        qkv = inputs[0] + 1e-3 * o[:, None]  # a step waits for the one before
        return op(qkv, *inputs[1:], taps, state, implementation=implementation)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def loop(taps, state):
        return jax.lax.fori_loop(0, steps, step, (jnp.zeros((B, H, D), jnp.bfloat16), taps, state))

    one = lambda name: jax.jit(functools.partial(op, implementation=name))(*inputs, taps, state)
    error = lambda x, y: float(jnp.linalg.norm((x - y).astype(jnp.float32)) / jnp.linalg.norm(y.astype(jnp.float32)))
    errors = [error(x, y) for x, y in zip(one(implementation), one("reference"))]
    start = time.perf_counter()
    _, taps, state = jax.block_until_ready(loop(taps, state))
    first, best = time.perf_counter() - start, []
    for _ in range(5):
        start = time.perf_counter()
        _, taps, state = jax.block_until_ready(loop(taps, state))
        best.append((time.perf_counter() - start) / steps)
    return {"us": sorted(best)[2] * 1e6, "first": first, "o": errors[0], "state": errors[2]}


def times_fla(B: int, H: int) -> dict[str, float]:
    import torch
    from fla.ops.kda import fused_recurrent_kda
    from triton.testing import do_bench_cudagraph

    normal = lambda *shape: torch.randn(*shape, device="cuda")
    q, k, v, g = (normal(B, 1, H, D).bfloat16() for _ in range(4))
    beta, state, a_log, dt_bias = normal(B, 1, H).bfloat16(), normal(B, H, D, D), normal(H), normal(H * D)

    def step():
        return fused_recurrent_kda(
            q, k, v, g, beta, A_log=a_log, dt_bias=dt_bias, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
        )  # fmt: skip

    start = time.perf_counter()
    step(), torch.cuda.synchronize()
    return {"first": time.perf_counter() - start, "us": 1e3 * do_bench_cudagraph(step, rep=100, return_mode="median")}


def show(name: str, B: int, H: int, times: dict[str, float]) -> None:
    floor = moved(B, H) / BYTES * 1e6
    errors = f"  errors o {times['o']:.1e}, state {times['state']:.1e}" if "o" in times else ""
    print(
        f"B{B} H{H}  {name:12s} {times['us']:8.1f} us  {moved(B, H) / times['us'] / 1e3:7.1f} GB/s  "
        f"floor {floor:.1f} us ({floor / times['us']:4.0%})  first call {times['first']:.1f} s{errors}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="1,96;8,96;64,96;256,96;64,32", help="B,H;...")
    parser.add_argument("--implementation", action="append", help="repeatable; default: pallas_gpu and xla")
    parser.add_argument("--rival", action="store_true", help="run fla as well")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--fla-only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = lambda text: [tuple(map(int, shape.split(","))) for shape in text.split(";") if shape]
    if args.fla_only:
        print(json.dumps(times_fla(*shapes(args.fla_only)[0])))
        return
    for shape in shapes(args.shapes):
        for name in args.implementation or ["pallas_gpu", "xla"]:
            show(name, *shape, times_jax(*shape, name, args.steps))
        if not args.rival:
            continue
        if not all(importlib.util.find_spec(name) for name in ("torch", "fla")):
            print("fla not run: torch or fla-core cannot be imported")
            continue
        command = [sys.executable, "-m", "benchmarks.kda_decode", "--fla-only", ",".join(map(str, shape))]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            print("fla failed:", (result.stderr.strip().splitlines() or ["without a message"])[-1])
        else:
            show("fla", *shape, json.loads(result.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    main()

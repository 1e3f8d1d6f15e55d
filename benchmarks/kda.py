"""KDA forward and backward against the floors and against flash-linear-attention: python -m benchmarks.kda --help

Both sides get the same work: normalised q and k, log decays in float32, beta after its sigmoid, bfloat16 q, k, v, heads
of 128 x 128, no initial state, final state returned. With --raw ours starts from raw projections and ends at their
gradients, once with norms and gate inside the kernels (`kda_gated`) and once with XLA's around them.
fla (Triton) runs in a process of its own, if torch and fla are there. It tunes itself for minutes: one process per kind
of shape compiles its kernels first, all at once, and what they chose is forgotten, so that it chooses again on an idle
card. Tensors are far larger than the L2 cache, so it is not flushed. --tune times the sizes that the implementations
of this platform can be cut into and prints lines for the tables of pallas_kernels/kda/config.py.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from benchmarks.turns import turn

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.97")  # a million tokens need 99 GiB
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the rival needs memory too

D, C = 128, 64
FLOPS, BYTES = 790e12, 4.3e12  # what one H200 reached in large bf16 matrix products and copies


PACKED = (1300, 547, 2048, 963, 271, 3063)
SHAPES = "1,8192,96;1,8192,32;4,8192,32;1,65536,32;packed,96;1,1048576,32"
RIVAL = "1,8192,96;1,8192,32;4,8192,32;1,65536,32;packed,96"  # it has no room for a million tokens


class Shape(NamedTuple):
    B: int
    T: int
    H: int
    lengths: tuple[int, ...] = ()  # of the documents packed into each row

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """B,T,H or packed,H."""
        *BT, H = text.split(",")
        return cls(1, sum(PACKED), int(H), PACKED) if BT == ["packed"] else cls(*map(int, BT), int(H))

    @property
    def title(self) -> str:
        return f"B{self.B} T{self.T} H{self.H}" + (f" documents {self.lengths}" if self.lengths else "")

    def __str__(self) -> str:
        return f"{'packed,' if self.lengths else f'{self.B},{self.T},'}{self.H}"


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


class Ours:
    """Forward pass, and forward and backward, of one implementation at one shape.

    form: "" from unit vectors and decays; "raw" from projections; "around" from projections, normed and gated by XLA.
    Made from shapes alone, so that it can compile while the rival tunes itself.
    """

    def __init__(self, shape: Shape, implementation: str | None, form: str):
        import jax
        import jax.numpy as jnp

        from pallas_kernels.kda import kda, kda_gated, log_decay, unit

        self.shape, self.form = shape, form
        B, T, H, lengths = shape
        ids = np.broadcast_to(np.repeat(np.arange(len(lengths)), lengths), (B, T)) if lengths else None
        settings = {"segment_ids": ids, "implementation": implementation}
        if form == "raw":
            op = lambda *x: kda_gated(*x, **settings)
        elif form == "around":

            def op(q, k, v, z, beta, *gate):
                ready = log_decay(z, *gate, -5.0), jax.nn.sigmoid(beta.astype(jnp.float32))
                return kda(unit(q), unit(k), v, *ready, **settings)

        else:
            op = lambda *x: kda(*x, **settings)

        def both(d_o, *x):
            (o, state), vjp = jax.vjp(op, *x)
            return o, vjp((d_o, jnp.zeros_like(state)))

        like = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
        tokens, wide = like(jnp.bfloat16, B, T, H, D), like(jnp.float32, B, T, H, D)
        beta = like(jnp.bfloat16 if form else jnp.float32, B, T, H)
        gate = (like(jnp.float32, H), like(jnp.float32, H, D)) if form else ()
        inputs = (tokens, tokens, tokens, wide, beta, *gate)
        self.compiled, self.seconds = [], 0.0
        for f, x in ((op, inputs), (both, (tokens, *inputs))):
            start = time.perf_counter()
            self.compiled.append(jax.jit(f).lower(*x).compile())
            self.seconds += time.perf_counter() - start

    def times(self, repeats: int) -> dict[str, float]:
        """Milliseconds of both, seconds of their compilation and first calls, GiB."""
        import jax
        import jax.numpy as jnp

        from pallas_kernels.kda import log_decay, unit

        B, T, H, _ = self.shape
        keys = jax.random.split(jax.random.key(0), 6)
        drawn = T if T % (1 << 16) else 1 << 16  # tokens; longer rows repeat them

        @jax.jit
        def normal(key):
            return jnp.tile(jax.random.normal(key, (B, drawn, H, D), jnp.bfloat16), (1, T // drawn, 1, 1))

        beta = jax.random.normal(keys[5], (B, T, H), jnp.bfloat16)
        q, k, v, d_o, z = (normal(key) for key in keys[:5])
        # as the layer has them: bfloat16 but for the decay logits
        rest = (z.astype(jnp.float32), beta, jnp.full((H,), 0.7), jnp.full((H, D), -2.0))
        if not self.form:
            q, k, g = jax.jit(lambda q, k, z, _, *gate: (unit(q), unit(k), log_decay(z, *gate, -5.0)))(q, k, *rest)
            rest = (g, jax.nn.sigmoid(beta.astype(jnp.float32)))
        del z, beta
        medians, first = [], self.seconds
        for f, x in zip(self.compiled, ((q, k, v, *rest), (d_o, q, k, v, *rest))):
            start = time.perf_counter()
            jax.block_until_ready(f(*x))
            first += time.perf_counter() - start
            samples = []
            for _ in range(7):
                last, start = None, time.perf_counter()
                for _ in range(repeats):
                    last = None  # the results of two calls need not fit
                    last = f(*x)
                jax.block_until_ready(last)
                samples.append((time.perf_counter() - start) / repeats * 1e3)
            medians.append(statistics.median(samples))
        memory = self.compiled[-1].memory_analysis()
        peak = sum(getattr(memory, f"{x}_size_in_bytes") for x in ("argument", "output", "temp"))
        return {"forward": medians[0], "forward+backward": medians[1], "first call": first, "GiB": peak / 2**30}


def times_fla(shape: Shape) -> dict[str, float]:
    """The same of fla's `chunk_kda`."""
    # its Triton kernels, nothing else
    os.environ |= {"FLA_FLASH_KDA": "0", "FLA_DISABLE_BACKEND_DISPATCH": "1"}
    import torch
    from fla.ops.kda import chunk_kda
    from triton.testing import do_bench

    B, T, H, lengths = shape
    generator = torch.Generator(device="cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")
    unit = lambda x: (x / x.norm(dim=-1, keepdim=True)).bfloat16()
    q, k = (unit(normal(B, T, H, D)) for _ in range(2))
    v, d_o = (normal(B, T, H, D).bfloat16() for _ in range(2))
    g = -5 * torch.sigmoid(2 * normal(B, T, H, D) - 4)
    beta = torch.sigmoid(normal(B, T, H))
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    ends = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], device="cuda") if lengths else None
    op = lambda: chunk_kda(*inputs, output_final_state=True, safe_gate=True, cu_seqlens=ends)

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


class Rival:
    """fla in processes of their own, one for all timings. Compiling starts at once, one process per kind of shape."""

    def __init__(self, shapes: list[Shape], cache: str):
        self.shapes, self.cache, self.begun = shapes, cache, time.perf_counter()
        kinds = {(shape.H, bool(shape.lengths)): shape for shape in reversed(shapes)}
        self.compiling = [self._start([shape]) for shape in kinds.values()]

    def _start(self, shapes: list[Shape]) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kda", "--fla-only", ";".join(map(str, shapes))],
            env={**os.environ, "TRITON_CACHE_DIR": self.cache},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def compiled(self) -> None:
        """Waits until all kernels are there; what was tuned on a busy card is forgotten."""
        for process in self.compiling:
            process.communicate()
        print(f"fla compiled its kernels in {time.perf_counter() - self.begun:.0f} s", flush=True)
        for choice in pathlib.Path(self.cache).glob("**/*.autotune.json"):
            choice.unlink()

    def times(self):
        """Yields (shape, times)."""
        process, shapes = self._start(self.shapes), iter(self.shapes)
        for line in process.stdout:
            if line.startswith("{"):
                yield next(shapes), json.loads(line)
        if process.wait():
            print(f"fla failed: {line.strip()}", flush=True)


def tune(shape: Shape, repeats: int) -> None:
    """Prints the sizes whose forward and backward pass is fastest here, for heads of several widths."""
    import functools

    import jax
    import jax.numpy as jnp

    from pallas_kernels.dispatch import PREFERENCE, target
    from pallas_kernels.kda.config import ChunkConfig, GPUConfig, TPUConfig
    from pallas_kernels.kda.pallas_gpu import kda_pallas_gpu
    from pallas_kernels.kda.pallas_tpu import kda_pallas_tpu
    from pallas_kernels.kda.xla import kda_xla

    candidates = {
        "xla": (kda_xla, "_XLA", [ChunkConfig(chunk, 16) for chunk in (16, 32, 64, 128)]),
        "pallas_gpu": (kda_pallas_gpu, "_GPU", [GPUConfig(1 << n) for n in range(18, 24)]),
        "pallas_tpu": (kda_pallas_tpu, "_TPU", [TPUConfig(heads) for heads in (2, 4, 8, 16)]),
    }
    platform, kind = target()
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16  # a CPU multiplies bfloat16 one by one
    for name in PREFERENCE[platform]:
        op, table, sizes = candidates[name]
        for width in (32, 64, 128):
            keys = jax.random.split(jax.random.key(0), 5)
            draw = lambda key, *more: jax.random.normal(key, (shape.B, shape.T, shape.H, *more))  # noqa: B023
            q, k, v = (draw(key, width).astype(dtype) * width**-0.5 for key in keys[:3])
            g, beta = -5 * jax.nn.sigmoid(2 * draw(keys[3], width) - 4), jax.nn.sigmoid(draw(keys[4]))
            state = jnp.zeros((shape.B, shape.H, width, width))
            times = {}
            for size in sizes:
                call = functools.partial(op, scale=1.0, initial_state=state, segment_ids=None, config=size)

                @jax.jit
                def both(*x, call=call):
                    values, vjp = jax.vjp(call, *x)
                    return vjp(values)

                try:
                    jax.block_until_ready(both(q, k, v, g, beta))
                except NotImplementedError as refusal:
                    print(f"# {name} {width}: {refusal}")
                    break
                except jax.errors.JaxRuntimeError as error:  # out of memory, on the card or in VMEM
                    print(f"# {name} {width} {size}: {str(error).splitlines()[0][:120]}")
                    continue
                samples = []
                for _ in range(repeats):
                    start = time.perf_counter()
                    jax.block_until_ready(both(q, k, v, g, beta))
                    samples.append(time.perf_counter() - start)
                times[size] = statistics.median(samples) * 1e3
            if times:
                print(f"# {', '.join(f'{size} {ms:.2f} ms' for size, ms in times.items())}")
                print(f'{table}: ("{kind}", {width}, {width}): {min(times, key=times.get)},', flush=True)


def show(name: str, shape: Shape, times: dict[str, float]) -> None:
    for what, (flops, moved) in work(*shape[:3]).items():
        ms = times[what]
        floor = max(flops / FLOPS, moved / BYTES) * 1e3
        print(
            f"  {name:17s} {what:17s} {ms:8.3f} ms  {flops / ms / 1e9:6.1f} TFLOP/s  {moved / ms / 1e6:7.1f} GB/s  "
            f"floor {floor:.3f} ms ({floor / ms:4.0%})",
            flush=True,
        )
    print(f"  {name:17s} first call {times['first call']:.1f} s, memory {times['GiB']:.2f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES, help="B,T,H;... where packed,H is six documents in 8192 tokens")
    parser.add_argument("--implementation", action="append", help="repeatable; default: pallas_gpu")
    parser.add_argument("--raw", action="store_true", help="ours from raw projections, in and around the kernels")
    parser.add_argument(
        "--rival", nargs="?", const=RIVAL, default="", help="shapes to run fla on as well; it tunes for minutes"
    )
    parser.add_argument("--rival-cache", default="/tmp/fla-kernels", help="where fla's kernels are compiled to")
    parser.add_argument("--turn", default="", help="file whose lock is held while the card is timed")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tune", metavar="B,T,H", help="print lines for the tables of sizes, tuned at this shape")
    parser.add_argument("--fla-only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = lambda text: [Shape.parse(shape) for shape in text.split(";") if shape]
    if args.fla_only:
        for shape in shapes(args.fla_only):
            print(json.dumps(times_fla(shape)), flush=True)
        return
    if args.tune:
        return tune(Shape.parse(args.tune), args.repeats)
    rival = None
    if args.rival and all(importlib.util.find_spec(name) for name in ("torch", "fla")):
        rival = Rival(shapes(args.rival), args.rival_cache)
    elif args.rival:
        print("fla not run: torch or fla-core cannot be imported")
    forms = ("raw", "around") if args.raw else ("",)
    names = args.implementation or ["pallas_gpu"]
    with ThreadPoolExecutor(1) as pool:  # one after the other: the seconds of a first call are its own
        asked = [(shape, name, form) for shape in shapes(args.shapes) for name in names for form in forms]
        ready = [pool.submit(Ours, *each) for each in asked]
    if rival:
        rival.compiled()
    with turn(args.turn):
        theirs = {}
        for shape, times in rival.times() if rival else ():  # first: a million tokens leave it no room on the card
            theirs[shape] = times
            print(shape.title, flush=True)
            show("fla", shape, times)
        for (shape, name, form), made in zip(asked, ready):
            label = f"{name} {form}".rstrip()
            print(shape.title, flush=True)
            try:
                times = made.result().times(1 if shape.B * shape.T > 1 << 19 else args.repeats)
            except Exception as error:  # out of memory: the other shapes go on
                print(f"  {label} failed: {str(error).splitlines()[0][:200]}", flush=True)
                continue
            show(label, shape, times)
            for what in work(*shape[:3]) if shape in theirs else ():
                print(f"  {what} {theirs[shape][what] / times[what]:.2f}x fla", flush=True)


if __name__ == "__main__":
    main()

"""Grouped matmul and expert FFN against the floors and against torch._grouped_mm: python -m benchmarks.moe --help

Both sides get the same work: bfloat16 normal rows and matrices, rows of each group as many as a random choice of group
per eight rows gives (the same sizes on both sides), bfloat16 results. torch, if it is there, runs in a process of its
own (benchmarks/moe_torch.py), and the two are measured in turn, call by call. Inputs and outputs of every call are
several times the L2 cache, so it is not flushed.
"""

import argparse
import dataclasses
import functools
import os
import statistics
from concurrent.futures import ThreadPoolExecutor

from benchmarks.moe_torch import PRODUCTS, Torch, group_sizes, sample_ms
from benchmarks.turns import turn

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the rival needs memory too

FLOPS, BYTES = 790e12, 4.3e12  # what one H200 reached in large bf16 matrix products and copies


def floor_ms(G: int, M: int, K: int, N: int) -> float:
    """Of one product: all operands and the result moved once, or the multiplications."""
    return 1e3 * max(2 * M * K * N / FLOPS, 2 * (M * K + M * N + G * K * N) / BYTES)


def median_ms(call, wait, repeats: int = 8, samples: int = 7) -> float:
    wait(call())
    return statistics.median(sample_ms(call, wait, repeats) for _ in range(samples))


def compile_all(calls: dict, shapes: dict) -> dict:
    """What `calls`, name -> (function, names of its arguments), compile to: traced in turn, compiled together."""
    import jax

    lowered = {name: jax.jit(f).lower(*(shapes[a] for a in args)) for name, (f, args) in calls.items()}
    with ThreadPoolExecutor() as pool:
        return dict(zip(lowered, pool.map(lambda x: x.compile(), lowered.values())))


def race(calls: dict, shapes: dict, make, lock: str, torch: Torch, *rival) -> tuple[dict, dict | str]:
    """Median milliseconds of each of `calls` and of the rival's, or why it has none: 8 samples each.

    Both sides' samples of the same call are neighbours, and the order changes: at its power limit the card is slower
    after a call that does more work a second.
    """
    import jax

    compiled = compile_all(calls, shapes)
    with turn(lock):
        data = make()
        ours = {name: functools.partial(compiled[name], *(data[a] for a in args)) for name, (_, args) in calls.items()}
        for call in ours.values():
            jax.block_until_ready(call())
        torch.start(*rival)
        sides = {"ours": (ours, lambda name: sample_ms(ours[name], jax.block_until_ready)),
                 "torch": (torch.names, torch.sample)}
        times = {side: {name: [] for name in names} for side, (names, _) in sides.items()}
        for i in range(8):
            for name in dict.fromkeys([*ours, *torch.names]):
                for side, (names, sample) in sorted(sides.items(), reverse=i % 2 == 1):
                    if name in names:
                        times[side][name].append(sample(name))
        torch.stop()
    median = lambda side: {name: statistics.median(ms) for name, ms in times[side].items()}
    return median("ours"), torch.why or median("torch")


def operands(G: int, M: int, *widths: int):
    """Normal rows of each width, and a function that makes normal matrices [G, K, N] of variance 1 / K."""
    import jax
    import jax.numpy as jnp

    normal = jax.jit(lambda i, shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16), static_argnums=1)
    rows = [normal(i, (M, width)) for i, width in enumerate(widths)]
    # one by one: the bits of all at once would not fit beside them
    matrices = lambda i, K, N: jnp.stack([normal(100 + i * G + g, (K, N)) for g in range(G)]) * jnp.bfloat16(K**-0.5)
    return rows, matrices


def race_products(G: int, M: int, K: int, N: int, implementation: str | None, lock: str, torch: Torch):
    import jax
    import jax.numpy as jnp

    from pallas_kernels.grouped_matmul import grouped_matmul

    def make():
        (x, d), matrices = operands(G, M, K, N)
        return {"x": x, "d": d, "w": matrices(0, K, N), "s": jnp.asarray(group_sizes(G, M))}

    op = lambda x, w, s: grouped_matmul(x, w, s, align=8, implementation=implementation)
    d_lhs = lambda x, w, s, d: jax.vjp(lambda x: op(x, w, s), x)[1](d)
    d_rhs = lambda x, w, s, d: jax.vjp(lambda w: op(x, w, s), w)[1](d)
    calls = {"forward": (op, "xws"), "dgrad": (d_lhs, "xwsd"), "wgrad": (d_rhs, "xwsd")}
    return race(calls, abstract(G, x=(M, K), d=(M, N), w=(G, K, N)), make, lock, torch, "product", G, M, K, N)


def abstract(G: int, **shapes: tuple[int, ...]) -> dict:
    import jax
    import jax.numpy as jnp

    of = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    return of | {"s": jax.ShapeDtypeStruct((G,), jnp.int32)}


def race_ffn(G: int, M: int, D: int, F: int, implementation: str | None, lock: str, torch: Torch):
    import jax
    import jax.numpy as jnp

    from pallas_kernels.expert_ffn import expert_ffn

    def make():
        (x, d), matrices = operands(G, M, D, D)
        weights = {"g": matrices(0, D, F), "u": matrices(1, D, F), "o": matrices(2, F, D)}
        p = jax.random.uniform(jax.random.key(1), (M,), jnp.bfloat16)
        return weights | {"x": x, "d": d, "p": p, "s": jnp.asarray(group_sizes(G, M))}

    op = lambda s, x, p, *w: expert_ffn(x, p.astype(jnp.float32), s, *w, align=8, implementation=implementation)
    both = lambda s, d, *inputs: jax.vjp(functools.partial(op, s), *inputs)[1](d)
    calls = {"forward": (op, "sxpguo"), "forward+backward": (both, "sdxpguo")}
    shapes = abstract(G, x=(M, D), d=(M, D), p=(M,), g=(G, D, F), u=(G, D, F), o=(G, F, D))
    return race(calls, shapes, make, lock, torch, "ffn", G, M, D, F)


def show(name: str, times: dict[str, float] | str, flops: dict[str, float], floors: dict[str, float]) -> None:
    if isinstance(times, str):
        print(f"  {name:12s} {times}", flush=True)
        return
    for what, ms in times.items():
        work, floor = flops[what.removesuffix(" eager")], floors[what.removesuffix(" eager")]
        print(
            f"  {name:12s} {what:23s} {ms:8.3f} ms  {work / ms / 1e9:6.1f} TFLOP/s "
            f"({work / ms / 1e-3 / FLOPS:4.0%} of 790)  floor {floor:.3f} ms ({floor / ms:4.0%})",
            flush=True,
        )


def tune(G: int, M: int, K: int, N: int, products: list[str], lock: str) -> None:
    """Prints lines for the table of `pallas_kernels/grouped_matmul/config.py`: per product the best first.

    "gated" is the product with gate and up, each of half the columns.

    All candidates of a product take turns, so that a card that slows down under load slows all of them.
    """
    import jax
    import jax.numpy as jnp

    from pallas_kernels.expert_ffn import Activation
    from pallas_kernels.expert_ffn.pallas_gpu import gated
    from pallas_kernels.grouped_matmul.gpu_kernel import Tiles
    from pallas_kernels.grouped_matmul.gpu_narrow import NarrowTiles
    from pallas_kernels.grouped_matmul.pallas_gpu import groups_product, product_by_rows

    shapes = abstract(G, x=(M, K), d=(M, N), w=(G, K, N), g=(G, K, N // 2), u=(G, K, N // 2))
    kind = jax.devices()[0].device_kind
    gate_up = lambda x, gate, up, s, t: gated(None, Activation(), x, gate, up, jnp.ones(M), s, True, t)
    rows = [Tiles(64, 256, cluster=2, panel=panel) for panel in (1, 2, 4)]
    rows += [Tiles(64, 128, 3), NarrowTiles(64, 192), NarrowTiles(64, 256)]
    rows += [NarrowTiles(128, n, stages=3, step=step) for n, step in ((192, 32), (192, 16), (160, 32))]
    groups = [Tiles(64, 256, cluster=2, panel=panel) for panel in (2, 4, 14)] + [Tiles(64, 256), Tiles(128, 128)]
    groups += [Tiles(128, 192, stages=3), Tiles(128, 192, stages=3, panel=4)]
    pairs = [Tiles(64, 128, cluster=2, panel=panel) for panel in (2, 4)] + [Tiles(64, 128, panel=4)]
    pairs += [Tiles(64, 64, 3), Tiles(64, 128, 3, stages=3)]
    together = lambda candidates: [dataclasses.replace(t, light_last=False) for t in candidates if t.block < 256]
    rows, pairs = rows + together(rows), pairs + together(pairs)
    ways = {
        "rows": (N, rows, "xws", lambda t: lambda x, w, s: product_by_rows([x], [w], s, t)),
        "transposed": (K, rows, "dws", lambda t: lambda d, w, s: product_by_rows([d], [w], s, t, transposed=True)),
        "groups": (N, groups, "xds", lambda t: lambda x, d, s: groups_product(x, d, s, t, jnp.bfloat16)),
        "gated": (N // 2, pairs, "xgus", lambda t: lambda x, gate, up, s: gate_up(x, gate, up, s, t)),
    }
    fits = lambda product, t: ways[product][0] % t.width == 0 and (product != "groups" or K % t.block == 0)
    products = products or list(ways)
    calls = {(p, t): (ways[p][3](t), ways[p][2]) for p in products for t in ways[p][1] if fits(p, t)}
    compiled = compile_all(calls, shapes)
    with turn(lock):
        (x, d), matrices = operands(G, M, K, N)
        data = {"x": x, "d": d, "w": matrices(0, K, N), "s": jnp.asarray(group_sizes(G, M))}
        if "gated" in products:
            data |= {"g": matrices(1, K, N // 2), "u": matrices(2, K, N // 2)}
        for product in products:
            samples = {t: [] for p, t in calls if p == product}
            for _ in range(7):
                for t, times in samples.items():
                    call = functools.partial(compiled[product, t], *(data[a] for a in ways[product][2]))
                    jax.block_until_ready(call())
                    times.append(sample_ms(call, jax.block_until_ready, repeats=4))
            medians = {t: statistics.median(times[1:]) for t, times in samples.items()}
            for t, ms in sorted(medians.items(), key=lambda x: x[1]):
                key = (kind, product, ways[product][0], -(-M // G))
                print(f"    {key}: {t},  # {ms:.3f} ms, {2 * M * K * N / ms / 1e9:.0f} TFLOP/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", default="56,32768;112,65536;112,16384", help="experts,rows;...")
    parser.add_argument("--width", type=int, default=3584, help="of rows")
    parser.add_argument("--hidden", type=int, default=3072, help="of an expert")
    parser.add_argument("--implementation", default="pallas_gpu")
    parser.add_argument("--products", help="K,N;... instead of the two of an expert")
    parser.add_argument(
        "--tune", nargs="*", choices=("rows", "transposed", "groups", "gated"), help="time tile sizes instead"
    )
    parser.add_argument("--turn", default="", help="file whose lock is held while the card is timed")
    args = parser.parse_args()
    D, F = args.width, args.hidden
    torch = None if args.tune is not None else Torch()
    for G, M in (map(int, shape.split(",")) for shape in args.groups.split(";")):
        expert = (D, 2 * F), (F, D)
        products = [tuple(map(int, x.split(","))) for x in args.products.split(";")] if args.products else expert
        if args.tune is not None:
            for K, N in products:
                print(f"{G} groups, {M} rows, {K} -> {N}", flush=True)
                tune(G, M, K, N, args.tune, args.turn)
            continue
        for K, N in products:
            print(f"{G} groups, {M} rows, {K} -> {N}", flush=True)
            flops, floors = (dict.fromkeys(PRODUCTS, x) for x in (2 * M * K * N, floor_ms(G, M, K, N)))
            ours, theirs = race_products(G, M, K, N, args.implementation, args.turn, torch)
            show(args.implementation, ours, flops, floors)
            show("torch", theirs, flops, floors)
        if args.products:
            continue
        print(f"{G} experts, {M} rows, FFN {D} -> 2 x {F} -> {D}", flush=True)
        forward, floor = 6 * M * D * F, sum(floor_ms(G, M, *widths) for widths in expert)
        flops = {"forward": forward, "forward+backward": 3 * forward}
        floors = {"forward": floor, "forward+backward": 3 * floor}
        ours, theirs = race_ffn(G, M, D, F, args.implementation, args.turn, torch)
        show(args.implementation, ours, flops, floors)
        show("torch", theirs, flops, floors)


if __name__ == "__main__":
    main()

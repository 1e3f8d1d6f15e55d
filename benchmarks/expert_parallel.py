"""The exchange of tokens in a mixture layer over several devices: python -m benchmarks.expert_parallel --help

Routed experts alone (no router, latent projections or shared experts), at Kimi K3's expert widths, under a balanced and
a skewed routing (of the skewed one, most rows are for the first device's experts). Three ways to move and place rows:

  padded        blocks for the worst case by one dense all-to-all
  ragged        the rows there are, in pieces; buffers for the worst case
  exact         as many rows on every device, by replicas of busy experts; ragged, or two dense all-to-alls

`exchange` is the same program without the experts' products: plan, dispatch, both transports, combine. `replicas` is
the fetch of the donor's weights and, in the backward, the return of their gradients.
"""

import argparse
import concurrent.futures
import itertools
import os
import statistics
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from trillium_moe.config import ModelConfig, MoEConfig
from trillium_moe.parallel import expert
from trillium_moe.parallel.balance import share_out
from trillium_moe.parallel.manual import layout
from trillium_moe.parallel.replicas import with_replicas
from trillium_moe.parallel.transport import UPDATES

WAYS = {
    "ragged": {"transport": "ragged"},
    "exact, ragged": {"transport": "ragged", "balance": "exact"},
    "padded": {"transport": "padded"},
    "exact, two hops": {"transport": "padded", "balance": "exact"},
}


def routing(E: int, k: int, M: int, skew: float) -> np.ndarray:
    """[M, k] different experts a token; expert e is drawn with weight e^(-skew e / E)."""
    rng = np.random.default_rng(0)
    gumbel = rng.gumbel(size=(M, E)) - skew * np.arange(E) / E
    return np.argpartition(-gumbel, k, axis=1)[:, :k].astype(np.int32)


def milliseconds(f, *args, repeats: int) -> float:
    jax.block_until_ready(f(*args))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples)


def program(config, shape, body):
    """The routed experts as a function of (z, p, weights, experts), with `body` in the place of the products."""

    def layer(z, p, weights, experts):
        products, expert.ffn = expert.ffn, body
        try:
            return expert.mix(layout(*shape), config, z, experts, p, weights)[0]
        finally:
            expert.ffn = products

    return layer


def fetch(weights, donor):
    here = lambda w, donor: tuple(with_replicas(x, donor, UPDATES.get(jax.default_backend(), 1)) for x in w)
    own = jax.P("expert")
    return jax.shard_map(here, in_specs=(own, jax.P()), out_specs=own, check_vma=False)(weights, donor)


def programs(f, n: int, passes: list[str], *args):
    """f, or f with the gradients of its first n arguments, lowered; with arguments to run it on."""
    cut = jax.tree.leaves(args[0])[0].sharding  # results are cut as the first argument is
    ones = lambda x: jax.jit(lambda: jnp.ones(x.shape, x.dtype), out_shardings=cut)()
    d = jax.tree.map(ones, jax.eval_shape(f, *args))
    both = lambda d, *args: jax.vjp(lambda *x: f(*x, *args[n:]), *args[:n])[1](d)
    calls = {"forward": (f, args), "forward+backward": (both, (d, *args))}
    return [(jax.jit(call).lower(*args), args) for call, args in map(calls.get, passes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096, help="per device")
    parser.add_argument("--experts", type=int, default=112)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--width", type=int, default=3584)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--skew", type=float, default=5.0)
    parser.add_argument("--ways", default=",,".join(WAYS))
    parser.add_argument("--forward", action="store_true", help="time the forward pass alone, too")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    R, E, L, F = jax.device_count(), args.experts, args.width, args.hidden
    mesh = jax.make_mesh((R,), ("expert",), axis_types=(AxisType.Auto,))
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    rng, tokens = np.random.default_rng(1), jax.P("expert")
    z = place(jnp.asarray(rng.normal(size=(R, args.tokens, L)), jnp.bfloat16), tokens)
    p = place(jnp.full((R, args.tokens, args.k), 1 / args.k), tokens)

    def matrices(key, *shape):
        make = lambda: jax.random.normal(jax.random.key(key), shape, jnp.bfloat16) / shape[1] ** 0.5
        return jax.jit(make, out_shardings=NamedSharding(mesh, tokens))()

    weights = matrices(0, E, L, F), matrices(1, E, L, F), matrices(2, E, F, L)
    print(f"{R} devices, {args.tokens} tokens each, {E} experts, top {args.k}, {L} -> {F} -> {L}", flush=True)
    routings = {}
    for name, skew in (("balanced", 0.0), ("skewed", args.skew)):
        experts = routing(E, args.k, R * args.tokens, skew).reshape(R, args.tokens, args.k)
        load = np.bincount(experts.reshape(-1), minlength=E)
        by_rank = load.reshape(R, -1).sum(1)
        busiest = by_rank.max() / by_rank.mean()
        print(f"{name}: MaxVio {load.max() / load.mean() - 1:.2f}, busiest device {busiest:.2f} times its share")
        donor = share_out(jnp.asarray(by_rank, jnp.int32), args.tokens * args.k)[1]
        routings[name] = place(jnp.asarray(experts), tokens), place(donor, jax.P())
    identity = lambda config, rows, *others: rows
    ways, passes = args.ways.split(",,"), ["forward+backward"] + ["forward"] * args.forward
    start, lowered = time.perf_counter(), {}
    with jax.set_mesh(mesh):
        for way in ways:
            config = ModelConfig(moe=MoEConfig(n_experts=E, k=args.k, expert_dim=F, latent_dim=L, **WAYS[way]))
            inputs = z, p, weights, routings["balanced"][0]
            lowered[way, "layer"] = programs(program(config, (R, args.tokens), expert.ffn), 3, passes, *inputs)
            # without the gradients of weights, which it does not touch
            lowered[way, "exchange"] = programs(program(config, (R, args.tokens), identity), 2, passes, *inputs)
        lowered["replicas"] = programs(fetch, 1, passes, weights, routings["balanced"][1])
        with concurrent.futures.ThreadPoolExecutor() as pool:
            futures = {key: [pool.submit(x.compile) for x, _ in pair] for key, pair in lowered.items()}
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)

        def spent(key, i: int, last) -> float:
            """Milliseconds of pass i of a program, with `last` as its last argument."""
            return milliseconds(futures[key][i].result(), *lowered[key][i][1][:-1], last, repeats=args.repeats)

        for way, (name, (experts, donor)), (i, what) in itertools.product(ways, routings.items(), enumerate(passes)):
            try:
                total, moved = (spent((way, part), i, experts) for part in ("layer", "exchange"))
                fetched = spent("replicas", i, donor) if way.startswith("exact") else 0.0
            except Exception as error:  # out of memory, or a transport that the platform lacks: the others go on
                print(f"  {way:16s} {name:9s} failed: {str(error).splitlines()[0][:200]}", flush=True)
                continue
            print(f"  {way:16s} {name:9s} {what:17s} layer {total:8.2f} ms  exchange {moved:7.2f}  "
                  f"replicas {fetched:7.2f}  share {(moved + fetched) / total:4.0%}", flush=True)


if __name__ == "__main__":
    main()

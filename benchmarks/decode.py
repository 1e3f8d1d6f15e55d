"""Decoding and prefill of one model against the floors: python -m benchmarks.decode --scale=large

Weights and cache contents are random: nothing is prefilled to reach a long context, the cache is put there. A step is
the whole of `Engine.decode`'s program: the model, the head and greedy sampling. The floor of a step is the bytes that
must be read or written over BANDWIDTH: weights (of experts, those that some token takes, in expectation), latents of
the context, KDA states twice.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.traces import kernel_times
from configs.scales import SCALES
from pallas_kernels import few_rows
from trillium_moe.config import ConfigError, ModelConfig
from trillium_moe.infer import engine, forward
from trillium_moe.infer.sampling import Settings
from trillium_moe.model.cache import Cache, abstract_cache, check_memory, full_head_bytes, nbytes, token_bytes
from trillium_moe.train.state import model_def

BANDWIDTH = 4.3e12  # bytes a second that one H200 reached in large copies


def random_tree(abstract):
    """Random arrays: norms one, decay parameters at their initial values, the rest small. One program per shape."""
    made = {}

    def fill(path, x):
        name = "".join(str(p) for p in path)
        if "norm" in name:
            return jnp.ones(x.shape, x.dtype)
        if "dt_bias" in name or "a_log" in name:
            return jnp.full(x.shape, -4.6 if "dt_bias" in name else 0.0, x.dtype)
        if (x.shape, x.dtype) not in made:
            made[x.shape, x.dtype] = jax.jit(lambda key: (0.02 * jax.random.normal(key, x.shape)).astype(x.dtype))
        return made[x.shape, x.dtype](jax.random.key(len(name) + hash(name) % 1000))

    return jax.tree.map_with_path(fill, abstract)


def random_weights(config: ModelConfig) -> forward.Weights:
    abstract = jax.eval_shape(lambda *v: forward.serving_weights(config, *v), *model_def(config)[1:])
    return random_tree(abstract)


def cache_at(config: ModelConfig, batch: int, context: int, latents: str = "") -> Cache:
    """A cache whose sequences hold `context` tokens and have room for 64 more."""
    abstract = abstract_cache(config, batch, context + 64, latents, mtp=bool(config.n_mtp))
    check_memory(abstract, jax.devices()[0])

    def fill(x):
        # one random block, repeated: random numbers for all of it would need as much memory again
        *lead, n, width = x.shape
        block = math.gcd(n, 1024)
        part = jnp.asarray(np.random.default_rng(0).normal(size=(block, width)), jnp.float32)
        part = (part * (30 if x.dtype == jnp.int8 else 0.5)).astype(x.dtype)
        return jax.jit(lambda p: jnp.broadcast_to(p, (*lead, n // block, block, width)).reshape(x.shape))(part)

    rest = jax.tree.map(fill, abstract._replace(length=()))
    return rest._replace(length=jnp.full(batch, context, jnp.int32))


def step_bytes(config: ModelConfig, weights: forward.Weights, cache: Cache, context: int) -> dict[str, float]:
    """Bytes that one decoding step of all sequences must move."""
    B, c = cache.length.shape[0], config.moe
    moe = [layer for kind, layer in zip(_kinds(config), weights.layers) if kind == "moe"]
    expert = nbytes([(layer["w_gate"], layer["w_up"], layer["w_down"]) for layer in moe])
    taken = 1 - (1 - c.k / c.n_experts) ** B
    rest = nbytes(weights) - expert - nbytes(weights.embed)
    return {
        "experts": expert * taken, "weights": rest, "latents": token_bytes(cache) * B * context,
        "states": 2 * nbytes([x.state for x in cache.kda]),
    }  # fmt: skip


def _kinds(config):
    return [name for pair in zip(config.mixers, config.ffns) for name in pair]


def experts_taken(config: ModelConfig, weights, batch: int, context: int, steps: int, latents: str) -> float:
    """Experts of a layer that some token takes, on average over layers and the steps that are timed, where kernels for
    few rows serve; nan elsewhere. Needs a CPU backend beside the GPU's: JAX_PLATFORMS=cuda,cpu if it is set."""
    counts, experts = [], few_rows.experts

    def counted(z_ML, routes, *args, **kwargs):
        jax.debug.callback(lambda taken: counts.append(int(taken)), (routes.slots_EM >= 0).any(1).sum())
        return experts(z_ML, routes, *args, **kwargs)

    jax.clear_caches()  # of layers that were traced without the count
    with mock.patch.object(few_rows, "experts", counted):
        args = decode_args(config, weights, cache_at(config, batch, context, latents), steps)
        jax.block_until_ready(jax.jit(engine._decode.__wrapped__, static_argnums=(0, 1, 2))(*args))
        jax.effects_barrier()
    jax.clear_caches()
    return float(np.mean(counts)) if counts else float("nan")


def decode_args(config: ModelConfig, weights, cache, steps: int):
    B = cache.length.shape[0]
    greedy = Settings(np.zeros(B, np.uint32), np.zeros(B, np.float32), np.zeros(B, np.int32), np.ones(B, np.float32))
    pending = np.random.default_rng(1).integers(0, config.vocab_size, B).astype(np.int32)
    return (config, steps, True, forward.flat(weights), cache, pending, np.full(B, -1, np.int32),
            np.full(B, 1 << 20, np.int32), np.zeros(B, np.int32), greedy, np.full((B, engine.MOST_STOPS), -1, np.int32))


def compile_decode(config: ModelConfig, weights, batch: int, context: int, steps: int, latents: str):
    """The program and the seconds it took, from shapes alone: several can compile at once. A model with a
    multi-token-prediction layer verifies a proposal in every step."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    cache = abstract_cache(config, batch, context + 64, latents, mtp=bool(config.n_mtp))
    start = time.perf_counter()
    program = engine._speculate if config.n_mtp else engine._decode
    run = program.lower(*decode_args(config, shapes, cache, steps)).compile()
    return run, time.perf_counter() - start


def time_decode(
    config: ModelConfig, weights, compiled, batch: int, context: int, steps: int, latents: str, trace: bool = False
):
    run, compile_s = compiled
    cache = cache_at(config, batch, context, latents)
    floor = step_bytes(config, weights, cache, context)
    args = list(decode_args(config, weights, cache, steps))[3:]

    def once():
        args[1] = args[1]._replace(length=jnp.full(batch, context, jnp.int32))
        jax.block_until_ready(args[1])
        start = time.perf_counter()
        tokens, _, _, args[1] = run(*args)
        np.asarray(tokens)
        return (time.perf_counter() - start) / steps

    cache = None
    once()
    samples = [once() for _ in range(5)]
    if trace:
        kernel_times(once, steps)
    ms = statistics.median(samples) * 1e3
    floor_ms = sum(floor.values()) / BANDWIDTH * 1e3
    return {
        "batch": batch, "context": context, "ms": ms, "floor_ms": floor_ms, "of_floor": floor_ms / ms,
        "tokens_per_s": batch / ms * 1e3, "compile_s": compile_s,
        **{f"{k}_GB": v / 1e9 for k, v in floor.items()},
    }  # fmt: skip


def prefill_args(config: ModelConfig, weights, cache, chunk: int):
    tokens = np.random.default_rng(2).integers(0, config.vocab_size, (1, chunk)).astype(np.int32)
    return config, weights, cache, tokens, np.array([chunk], np.int32), np.array([0], np.int32), tokens


def compile_prefill(config: ModelConfig, weights, longest: int, chunk: int):
    """The program of one chunk of one sequence, from shapes alone."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    cache = abstract_cache(config, 1, longest + 64)
    return engine._prefill.lower(*prefill_args(config, shapes, cache, chunk)).compile()


def time_prefill(config: ModelConfig, weights, run, contexts: list[int], chunk: int, limit_s: float):
    """Tokens per second of prefilling each context in chunks of one sequence.

    Where all chunks would take longer than limit_s, chunks at eight places are timed and the rest interpolated: the
    time of a chunk is linear in the tokens before it.
    """
    cache = cache_at(config, 1, max(contexts))

    def at(position, cache):
        cache = cache._replace(length=jnp.full(1, position, jnp.int32))
        start = time.perf_counter()
        cache = run(*prefill_args(config, weights, cache, chunk)[1:])
        jax.block_until_ready(cache)
        return time.perf_counter() - start, cache

    _, cache = at(0, cache)
    out = []
    for context in sorted(contexts):
        positions = range(0, context, chunk)
        last, cache = at(positions[-1], cache)
        exact = last * len(positions) < limit_s
        some = positions if exact else [positions[i] for i in np.linspace(0, len(positions) - 1, 8).astype(int)]
        times = []
        for position in some:
            t, cache = at(position, cache)
            times.append(t)
        total = sum(times) if exact else float(np.interp(list(positions), list(some), times).sum())
        out.append({"context": context, "tokens_per_s": context / total, "seconds": total, "interpolated": not exact,
                    "first_chunk_ms": times[0] * 1e3, "last_chunk_ms": times[-1] * 1e3})
        print("prefill", json.dumps(out[-1]), flush=True)
    return out


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scale", default="large", choices=list(SCALES))
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--context", type=int, nargs="*", default=[1024, 65536, 1 << 20])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--latents", default="")
    parser.add_argument("--prefill", type=int, nargs="*", default=[8192, 131072, 1 << 20])
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of prefill beyond which chunks are sampled")
    parser.add_argument("--trace", type=int, default=0, help="print kernels by time of this many of the programs")
    parser.add_argument("--count", action="store_true", help="also count the experts that tokens take, batch 32")
    parser.add_argument("--mtp", action="store_true", help="also a step that verifies a proposal, at batch 1")
    parser.add_argument("--kda", action="store_true", help="also the KDA layers alone, by context")
    args = parser.parse_args(argv)
    config = dataclasses.replace(SCALES[args.scale](), scan_layers=False)
    print(jax.devices()[0].device_kind, args.scale, flush=True)
    per_token = token_bytes(abstract_cache(config, 1, 64, args.latents))
    print(f"cache: {per_token:.0f} bytes per token of context; full-head KV in every layer {full_head_bytes(config)}: "
          f"{full_head_bytes(config) / per_token:.1f} times as many", flush=True)
    weights = random_weights(config)
    print(f"weights: {nbytes(weights) / 1e9:.2f} GB", flush=True)
    shapes = [(batch, context) for context in args.context for batch in args.batch]
    settings = (args.steps, args.latents)
    kda_only = dataclasses.replace(config, mla_layers=(-1,))
    with ThreadPoolExecutor(16) as pool:  # all programs compile side by side, then they are timed one after the other
        cells = submit(pool, config, weights, shapes, settings)
        if args.prefill:
            prefill = pool.submit(compile_prefill, config, weights, max(args.prefill), args.chunk)
        if args.kda:
            kda_weights = random_weights(kda_only)
            kda_cells = submit(pool, kda_only, kda_weights, [(32, args.context[0])], settings)
        if args.mtp:
            with_mtp = dataclasses.replace(config, n_mtp=1)
            mtp_weights = random_weights(with_mtp)
            mtp_cells = submit(pool, with_mtp, mtp_weights, [(1, args.context[0])], settings)
    time_cells(config, weights, cells, settings, "decode", args.trace)
    if args.kda:
        program = kda_cells[32, args.context[0]]  # nothing in it depends on the context's length
        cells = {(32, context): program for context in args.context}
        time_cells(kda_only, kda_weights, cells, settings, "kda layers alone", 0)
    if args.mtp:  # of its floor nothing is said: the layer's own experts are not counted
        time_cells(with_mtp, mtp_weights, mtp_cells, settings, "a proposal verified", 0)
    if args.count:
        taken = experts_taken(config, weights, 32, args.context[0], *settings)
        expected = config.moe.n_experts * (1 - (1 - config.moe.k / config.moe.n_experts) ** 32)
        print(f"experts taken by 32 tokens: {taken:.1f} of {config.moe.n_experts}, {expected:.1f} expected", flush=True)
    if args.prefill:
        time_prefill(config, weights, prefill.result(), args.prefill, args.chunk, args.limit)


def submit(pool, config, weights, shapes, settings) -> dict:
    """By cell: its program to come, or why its cache has no room."""
    cells = {}
    for batch, context in shapes:
        try:
            check_memory(abstract_cache(config, batch, context + 64, settings[1]), jax.devices()[0])
            cells[batch, context] = pool.submit(compile_decode, config, weights, batch, context, *settings)
        except ConfigError as error:
            cells[batch, context] = error
    return cells


def time_cells(config, weights, cells, settings, label, traced):
    """Times programs one after the other; the first few with a trace."""
    for i, ((batch, context), program) in enumerate(cells.items()):
        try:
            if isinstance(program, ConfigError):
                raise program
            row = time_decode(config, weights, program.result(), batch, context, *settings, i < traced)
        except (ConfigError, jax.errors.JaxRuntimeError) as error:
            row = {"batch": batch, "context": context, "error": str(error).split("\n")[0][:200]}
        print(label, json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())

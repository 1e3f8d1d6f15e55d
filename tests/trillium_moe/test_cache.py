"""Cached generation against one full forward: any chunking, any company, every leaf."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models import random_variables
from trillium_moe.config import ConfigError, DtypeConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from trillium_moe.infer.forward import extend, logits, serving_weights
from trillium_moe.model import few
from trillium_moe.model.cache import (
    abstract_cache,
    clear_rows,
    copy_rows,
    full_head_bytes,
    make_cache,
    nbytes,
    quantise,
    token_bytes,
)

T, CAPACITY = 37, 64


def config(**kw):
    fields = {
        "vocab_size": 40, "d_model": 16, "n_layers": 3, "kda_per_mla": 1, "ffn_dim": 24, "block_size": 2,
        "scan_layers": False, "remat": "none", "dtypes": DtypeConfig(compute="float32"),
        "kda": KDAConfig(n_heads=2, head_dim=8),
        "mla": MLAConfig(q_lora_rank=8, kv_lora_rank=8, nope_dim=8, rope_dim=4, v_dim=8),
        "moe": MoEConfig(n_experts=6, k=2, expert_dim=8, latent_dim=8),
    }  # fmt: skip
    return ModelConfig(**{**fields, **kw})


CONFIG = config()
TOKENS = np.random.default_rng(0).integers(0, 40, (2, T)).astype(np.int32)


@functools.cache
def variables(c=CONFIG):
    return random_variables(c, std=0.15, noise=0.05)


@functools.cache
def weights(c=CONFIG):
    return serving_weights(c, *variables(c)[1:])


@functools.cache
def full(c=CONFIG):
    """Logits of one forward over all tokens, as training runs it."""
    return np.asarray(jax.jit(lambda *v: nnx.merge(variables(c)[0], *v)(jnp.asarray(TOKENS))[0])(*variables(c)[1:]))


@functools.partial(jax.jit, static_argnums=0)
def run(c, w, cache, tokens, n, rows):
    h, cache = extend(c, w, cache, tokens, n, rows)
    return logits(c, w, h), cache


def feed(c, chunks, rows=None, width=16, cache=None):
    """Logits and cache after the tokens in chunks of the given lengths, padded to `width` or, if single, to one."""
    cache = make_cache(c, 2, CAPACITY) if cache is None else cache
    out, at = [], 0
    for n in chunks:
        size = 1 if n == 1 else width
        tokens = np.full((2, size), 39, np.int32)
        tokens[:, :n] = TOKENS[:, at : at + n]
        y, cache = run(c, weights(c), cache, tokens, jnp.full(2, n, jnp.int32), rows)
        out.append(np.asarray(y)[:, :n])
        at += n
    return np.concatenate(out, 1), cache


def close(a, b, tol=1e-5):
    """Largest error over largest value."""
    np.testing.assert_allclose(a, b, rtol=0, atol=tol * np.abs(np.asarray(b)).max())


def assert_same_state(a, b):
    assert np.array_equal(a.length, b.length)
    jax.tree.map(close, a, b)  # nothing was ever written past the length


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=3, max_size=12))
def test_any_chunking_equals_one_forward(sizes):
    chunks = []
    for n in (*sizes, *[16] * 3):
        n = min(n, T - sum(chunks))
        chunks += [n] if n else []
    out, cache = feed(CONFIG, chunks)
    close(out, full())
    assert_same_state(cache, feed(CONFIG, [16, 16, 5])[1])


SHORT = {"n_heads": 2, "head_dim": 8, "implementation": "reference"}  # compiles faster than the chunked form


@pytest.mark.parametrize("change", [
    pytest.param({"residual": "none"}, id="plain", marks=pytest.mark.slow),
    pytest.param({"residual": "full"}, id="full", marks=pytest.mark.slow),
    pytest.param({
        "residual": "none", "activation": "swiglu",
        "mla": MLAConfig(q_lora_rank=0, kv_lora_rank=24, nope_dim=8, rope_dim=4, v_dim=8, position="rope", gate="none"),
        "kda": KDAConfig(**SHORT, conv_size=0, decay="softplus", gate="low_rank"),
        "moe": MoEConfig(n_experts=6, k=2, expert_dim=8, latent_dim=0, n_shared=0),
    }, id="kimi_linear with rope"),
])  # fmt: skip
def test_other_architectures(change):
    c = config(**{"n_layers": 2, "kda": KDAConfig(**SHORT), **change})
    out, _ = feed(c, [16, 1, 1, 14, 5])
    close(out, full(c))


def test_sequences_of_different_lengths_in_any_rows():
    """Two of a cache's four rows, in unequal steps, each idle at times: the same logits and state as alone."""
    alone, _ = feed(CONFIG, [16, 16, 5])
    cache = make_cache(CONFIG, 4, CAPACITY)
    seen, out = [0, 0], ([], [])
    for step in [(7, 16), (0, 3), (13, 1), (16, 0), (1, 16), (0, 1)]:
        tokens = np.full((2, 16), 7, np.int32)
        for i, k in enumerate(step):
            tokens[i, :k] = TOKENS[i, seen[i] : seen[i] + k]
            seen[i] += k
        y, cache = run(CONFIG, weights(), cache, tokens, jnp.array(step), jnp.array([3, 1]))
        for i, k in enumerate(step):
            out[i].append(np.asarray(y)[i, :k])
    assert seen == [T, T] and np.asarray(cache.length).tolist() == [0, T, 0, T]
    for i in (0, 1):
        close(np.concatenate(out[i]), alone[i])
    untouched = jax.tree.map(lambda x: np.asarray(x)[[0, 2]], cache)
    assert all(not np.any(x) for x in jax.tree.leaves(untouched))


def test_fork_and_extend_equal_prefill():
    _, cache = feed(CONFIG, [16, 16])
    # both prompts swap rows, which one more copy undoes: row content is all there is
    cache = copy_rows(cache, jnp.array([0, 1]), jnp.array([1, 0]))
    cache = copy_rows(cache, jnp.array([0, 1]), jnp.array([1, 0]))
    y, cache = run(CONFIG, weights(), cache, np.pad(TOKENS[:, 32:], ((0, 0), (0, 11))), jnp.full(2, 5), None)
    close(np.asarray(y)[:, :5], full()[:, 32:])
    assert_same_state(cache, feed(CONFIG, [16, 16, 5])[1])


def test_cleared_rows_start_anew():
    cache = clear_rows(feed(CONFIG, [16, 9])[1], jnp.array([0, 1, 9]))
    out, cache = feed(CONFIG, [16, 16, 5], cache=cache)
    close(out, full())


def test_a_full_cache_drops_what_has_no_room():
    """Tokens past the capacity are not written over earlier ones."""
    tokens = np.tile(TOKENS, (1, 2))[:, :70]
    cache = make_cache(CONFIG, 2, CAPACITY)
    for at in range(0, 64, 16):
        _, cache = run(CONFIG, weights(), cache, tokens[:, at : at + 16], jnp.full(2, 16), None)
    _, after = run(CONFIG, weights(), cache, tokens[:, 54:70], jnp.full(2, 6), None)
    assert all(np.array_equal(x.values, y.values) for x, y in zip(cache.mla, after.mla))


@pytest.mark.parametrize("latents, bound", [
    pytest.param("bfloat16", 2e-2, marks=pytest.mark.slow), ("int8", 4e-2),
])  # fmt: skip
def test_narrow_latents(latents, bound):
    """Largest change of a logit over the spread of the logits."""
    cache = make_cache(CONFIG, 2, CAPACITY, latents)
    out, _ = feed(CONFIG, [16, 16, 5], cache=cache)
    error = np.abs(out - full()).max() / full().std()
    assert 1e-5 < error < bound


def test_int8_error_is_half_a_step():
    x = np.random.default_rng(1).normal(size=(50, 12)).astype(np.float32) * 7
    values, scale = quantise(jnp.asarray(x), 8)
    back = np.asarray(values, np.float32) * np.repeat(np.asarray(scale), [8, 4], axis=1)
    assert (np.abs(back - x) <= np.repeat(np.asarray(scale), [8, 4], axis=1) * 0.5001).all()


@pytest.mark.parametrize("how", ["gathered", "dense"])
def test_experts_of_few_tokens(how):
    """Against a loop over tokens and choices."""
    c, rng = CONFIG, np.random.default_rng(2)
    w = [rng.normal(size=s).astype(np.float32) for s in ((6, 8, 8), (6, 8, 8), (6, 8, 8))]
    z, p = rng.normal(size=(3, 8)).astype(np.float32), rng.random((3, 2)).astype(np.float32)
    experts = np.array([[0, 5], [5, 2], [3, 0]])
    out = getattr(few, how)(c, *map(jnp.asarray, (z, p, experts)), tuple(map(jnp.asarray, w)))
    situ = lambda g, u: 4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)
    want = np.zeros((3, 8))
    for m in range(3):
        for j in range(2):
            e = experts[m, j]
            want[m] += p[m, j] * (situ(z[m] @ w[0][e], z[m] @ w[1][e]) @ w[2][e])
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)


def test_which_order_of_experts():
    assert few.variant(1, 8, 128) == "gathered"
    assert few.variant(1, 8, 128, gather=False) == few.variant(32, 8, 128) == "dense"
    assert few.variant(4096, 8, 128) == "grouped"


def test_size_is_known_before_it_is_allocated():
    """K3 (model.md 3.4): 434 MB of KDA state and 27.6 KB per token."""
    from configs.scales import trillium_2t8

    big = trillium_2t8()
    cache = abstract_cache(big, 1, 1 << 20)
    assert token_bytes(cache) == 24 * 576 * 2
    assert nbytes([x.state for x in cache.kda]) == 69 * 96 * 128 * 128 * 4
    assert full_head_bytes(big) / token_bytes(cache) == pytest.approx(93 * 96 * 320 / (24 * 576))
    assert nbytes(make_cache(CONFIG, 2, 60)) == nbytes(abstract_cache(CONFIG, 2, 60))
    assert abstract_cache(CONFIG, 2, 60).capacity == 64


@pytest.mark.parametrize("args, message", [
    ((CONFIG, 0, 5), "infer.slots=0"), ((CONFIG, 1, 0), "infer.capacity=0"), ((CONFIG, 1, 5, "int4"), "infer.latents"),
    ((config(moe=dataclasses.replace(CONFIG.moe, balancing="batch_threshold")), 1, 5), "looks? ?ahead|cannot generate"),
])  # fmt: skip
def test_impossible_caches_are_named(args, message):
    with pytest.raises(ConfigError, match=message):
        abstract_cache(*args)

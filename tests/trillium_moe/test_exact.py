"""Tokens sampled from training's own forward pass: the same probabilities, whatever rounds on the way."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import scales
from tests.models import random_variables
from trillium_moe.config import ConfigError, DtypeConfig, MoEConfig
from trillium_moe.infer.batching import Batcher, Request
from trillium_moe.infer.engine import Engine, EngineConfig
from trillium_moe.infer.exact import BLOCK, ExactEngine, make_engine
from trillium_moe.infer.pictures import Pictures
from trillium_moe.infer.sampling import Sampling

MOE = MoEConfig(n_experts=8, k=2, expert_dim=32, latent_dim=64, n_shared=1, quantise="mxfp4")
CONFIG = dataclasses.replace(
    scales.tiny(), n_layers=4, vocab_size=64, moe=MOE, dtypes=DtypeConfig(compute="bfloat16")
)  # one MLA layer of four, quantised experts: what differs at all differs by much
CAPACITY, STEPS = 3 * BLOCK, 4
TOKENS = np.random.default_rng(0).integers(0, 64, CAPACITY).tolist()


@functools.cache
def variables():
    return random_variables(CONFIG, std=0.2, noise=0.1)


@functools.cache
def engine() -> ExactEngine:
    return make_engine(CONFIG, *variables()[1:], EngineConfig(slots=3, capacity=CAPACITY, steps=STEPS, exact=True))


@functools.cache
def forward():
    graphdef, *rest = variables()
    return jax.jit(lambda t: jax.nn.log_softmax(nnx.merge(graphdef, *rest)(t)[0].astype(jnp.float32)))


def trained(tokens) -> np.ndarray:
    """Log-probability of every token but the first, in a row of a batch of two. (XLA's CPU backend orders the sums of a
    single row otherwise.)"""
    rows = np.zeros((2, CAPACITY), np.int32)
    rows[1, : len(tokens)] = tokens
    return np.asarray(forward()(rows))[1, np.arange(len(tokens) - 1), tokens[1:]]


def same(a, b):
    """To the last bits of a float32 log-softmax; one rounding to bfloat16 elsewhere would make a hundredth of it."""
    np.testing.assert_allclose(a, b, rtol=0, atol=4e-6)


def sampled(prompts, n=12):
    batcher = Batcher(engine())
    requests = [batcher.submit(Request(p, n, Sampling(1.0, seed=i))) for i, p in enumerate(prompts)]
    batcher.run()
    return requests


def test_sampled_is_trained():
    """Within a block, over the end of one, of two, and from a prompt that ends with one."""
    prompts = [TOKENS[:n] for n in (1, BLOCK - 5, BLOCK, 2 * BLOCK - 3, 2 * BLOCK + 1)]
    assert engine().computed == 0
    for prompt, request in zip(prompts, sampled(prompts)):
        want = trained([*prompt, *request.tokens])[len(prompt) - 1 :]
        same(request.logprobs, want)
    blocks, rest = divmod(engine().computed, 3 * BLOCK)  # three sealed blocks, and every step a block of each row
    assert rest == 0 and (blocks - 3) % STEPS == 0 and blocks - 3 >= 2 * 12


@pytest.mark.slow
def test_decoding_token_by_token_is_not():
    batcher = Batcher(make_engine(CONFIG, *variables()[1:], EngineConfig(slots=1, capacity=CAPACITY, steps=STEPS)))
    request = batcher.submit(Request(TOKENS[:50], 12, Sampling(1.0, seed=0)))
    batcher.run()
    assert type(batcher.engine) is Engine
    apart = np.abs(request.logprobs - trained([*TOKENS[:50], *request.tokens])[49:])
    assert apart.mean() > 1e-3


def test_extended_forked_and_restored_is_read_at_once():
    """Piece by piece over the ends of blocks, next to another sequence, in copies and from a snapshot."""
    e, n = engine(), BLOCK + 40
    whole, other = e.open(), e.open()
    e.extend(whole, TOKENS[:n])
    e.extend_all({other: TOKENS[5:20]})
    for at in (0, 3, BLOCK, BLOCK + 1, n):  # the second piece ends a block, the third is one token
        if at == 0:
            pieces = e.open()
        else:
            e.extend_all({pieces: TOKENS[e.length[pieces] + (e.pending[pieces] >= 0) : at], other: [7]})
    e.close(other)
    (copy,) = e.fork(pieces, 1)
    kept = e.snapshot(pieces)
    e.extend(pieces, TOKENS[200:300])
    e.restore(pieces, kept)
    for slot in (whole, pieces, copy):
        e.start(slot, STEPS, Sampling(1.0, seed=3))
    found = e.decode()
    for slot in (pieces, copy):
        assert found.tokens[slot].tolist() == found.tokens[whole].tolist()
        np.testing.assert_array_equal(found.logprobs[slot], found.logprobs[whole])
    same(found.logprobs[whole], trained([*TOKENS[:n], *found.tokens[whole]])[n - 1 :])
    for slot in (whole, pieces, copy):
        e.close(slot)


@pytest.mark.slow
def test_score_is_trained():
    for n in (2, BLOCK, BLOCK + 1, 2 * BLOCK + 9):
        same(engine().score(TOKENS[:n]), trained(TOKENS[:n]))


def test_what_it_refuses():
    with pytest.raises(ConfigError, match="config infer.speculate=True: must be False with infer.exact"):
        EngineConfig(exact=True, speculate=True)
    with pytest.raises(ConfigError, match="config infer.prefix_bytes=1: must be 0 with infer.exact"):
        EngineConfig(exact=True, prefix_bytes=1)
    dropping = dataclasses.replace(CONFIG, moe=dataclasses.replace(MOE, capacity=1.5))
    with pytest.raises(ConfigError, match="config model.moe.capacity=1.5: must be 0 for infer.exact"):
        make_engine(dropping, *variables()[1:], EngineConfig(exact=True))
    with pytest.raises(ConfigError, match="config infer.exact=True: needs the engine that"):
        Engine(CONFIG, *variables()[1:], EngineConfig(exact=True))
    e = engine()
    slot = e.open()
    with pytest.raises(ConfigError, match="config infer.exact=True: takes no pictures"):
        e.extend(slot, [1, 2], Pictures(*[np.zeros((0, 0))] * 2, *[np.zeros(0)] * 2))
    with pytest.raises(ConfigError, match=f"config infer.capacity={CAPACITY}: {CAPACITY + 1} more tokens do not fit"):
        e.extend(slot, [1] * (CAPACITY + 1))
    e.close(slot)

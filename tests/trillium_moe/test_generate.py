import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trillium_moe.config import (
    Config,
    ConfigError,
    DataConfig,
    DtypeConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
)
from trillium_moe.data.tokenizer import ByteTokenizer
from trillium_moe.infer.generate import LoadedModel, Sampling, generate, generate_ids, sample
from trillium_moe.train.state import model_def, new_model

CONFIG = Config(
    data=DataConfig(seq_len=16),
    model=ModelConfig(n_layers=2, d_model=16, ffn_dim=32, init_std=0.3, scan_layers=False, remat="none",
                      dtypes=DtypeConfig(compute="float32"), kda=KDAConfig(n_heads=1, head_dim=8),
                      mla=MLAConfig(n_heads=1, q_lora_rank=8, kv_lora_rank=8, nope_dim=8, rope_dim=4, v_dim=8),
                      moe=MoEConfig(n_experts=4, k=2, expert_dim=8, latent_dim=8, n_shared=1)))


@pytest.fixture(scope="module")
def model():
    quick = {"xla_backend_optimization_level": 0}  # optimising what runs once takes longer than running it
    init = jax.jit(lambda: new_model(CONFIG.model, jax.random.key(0))[1:], compiler_options=quick)
    return LoadedModel(CONFIG, 7, *init(), ByteTokenizer())


def ids(model, prompt, n, **sampling):
    return list(generate_ids(model.config, model.params, model.router_bias, prompt, n, Sampling(**sampling)))


def test_greedy_equals_the_full_forward_and_slides(model):
    """Every token is the argmax of a plain forward over at most the last seq_len tokens."""
    prompt = [10, 20, 30]
    out = ids(model, prompt, 20, temperature=0.0)
    graphdef = model_def(CONFIG.model)[0]
    forward = jax.jit(lambda t: jnp.argmax(nnx.merge(graphdef, model.params, model.router_bias)(t)[0][0], -1))
    text = prompt + out
    best = np.asarray(forward(jnp.array([text[:16]])))  # causal: position t has seen tokens 0 .. t
    assert out[:14] == best[2:].tolist()
    for end in (17, 20, 22):  # the window is full: it has slid
        assert text[end] == int(forward(jnp.array([text[end - 16:end]]))[-1])


def test_seed_decides_and_length_does_not(model):
    a, b = ids(model, [1, 2, 3], 10, seed=3), ids(model, [1, 2, 3], 13, seed=3)
    assert a == b[:10]
    assert a != ids(model, [1, 2, 3], 10, seed=4)


def test_long_prompts_keep_their_end(model):
    long = list(itertools.islice(itertools.cycle(range(50)), 100))
    assert ids(model, long, 3, temperature=0.0) == ids(model, long[-16:], 3, temperature=0.0)


def test_text_ends_where_the_model_ends_the_document(model, monkeypatch):
    eos = model.tokenizer.eos_id
    stream = lambda *_: iter([*b"abc", eos, *b"never shown"])
    monkeypatch.setattr("trillium_moe.infer.generate.generate_ids", stream)
    assert generate(model, "x", 12) == "abc"


@pytest.mark.parametrize("key, value", [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5)])
def test_impossible_sampling_is_named(key, value):
    with pytest.raises(ConfigError, match=f"config {key}={value}"):
        Sampling(**{key: value})


def test_empty_prompt_is_named(model):
    with pytest.raises(ConfigError, match="prompt"):
        generate(model, "", 3)


LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))  # best first: 1, 3, 2, 0


@pytest.mark.parametrize("settings, allowed", [
    ((1.0, 0, 1.0), {0, 1, 2, 3}), ((1.0, 2, 1.0), {1, 3}), ((1.0, 1, 1.0), {1}), ((1.0, 0, 0.5), {1, 3}),
    ((1.0, 0, 0.39), {1}), ((1.0, 3, 0.95), {1, 3, 2}), ((0.0, 0, 1.0), {1}), ((5.0, 9, 1.0), {0, 1, 2, 3})])
def test_cuts_allow_exactly_the_best(settings, allowed):
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = jax.jit(jax.vmap(lambda key: sample(key, LOGITS, *map(jnp.asarray, settings))))(keys)
    assert set(np.asarray(drawn).tolist()) == allowed


def test_frequencies_follow_the_distribution():
    keys = jax.random.split(jax.random.key(1), 20_000)
    drawn = jax.jit(jax.vmap(lambda key: sample(key, LOGITS, 1.0, 0, 1.0)))(keys)
    frequencies = np.bincount(np.asarray(drawn), minlength=4) / len(drawn)
    np.testing.assert_allclose(frequencies, np.exp(LOGITS), atol=0.015)  # 4 sigma

"""Quantisation-aware training: rounding against ml_dtypes, straight-through gradients, one rounding everywhere."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from configs import scales
from tests.models import random_variables
from trillium_moe.config import Config, ConfigError, DtypeConfig, MoEConfig
from trillium_moe.infer.batching import Batcher, Request
from trillium_moe.infer.engine import Engine, EngineConfig
from trillium_moe.infer.sampling import Sampling
from trillium_moe.interop import hf
from trillium_moe.interop.export import export
from trillium_moe.model.quantise import mxfp4_weights, mxfp8
from trillium_moe.train.state import optimizer

MOE = MoEConfig(n_experts=8, k=2, expert_dim=32, latent_dim=64, n_shared=1)


def model(**moe):
    return dataclasses.replace(scales.tiny(), n_layers=2, vocab_size=272, moe=dataclasses.replace(MOE, **moe))


def test_mxfp8_is_e4m3_at_the_groups_scale():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(64, 96)) * 2.0 ** rng.integers(-30, 30, (64, 1))).astype(np.float32)
    x[0, :32], x[1, 0] = 0, 1e-38
    rows = x.reshape(-1, 32).astype(np.float64)
    largest = np.abs(rows).max(1, keepdims=True)
    scale = 2.0 ** (np.floor(np.log2(np.where(largest == 0, 1, largest))) - 8)
    want = np.clip(rows / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale
    np.testing.assert_array_equal(np.asarray(jax.jit(mxfp8)(x)).reshape(-1, 32)[3:], want[3:])
    assert np.isnan(mxfp8(jnp.full((1, 32), jnp.nan))).all() and (mxfp8(jnp.zeros((1, 32))) == 0).all()
    assert (np.abs(mxfp8(jnp.full((1, 32), 511.0))) == 448).all()


def test_mxfp8_rounds_every_tie_as_e4m3_does():
    values = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)  # 0 to 448
    ties = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(448))])
    x = np.pad(np.concatenate([x, -x]), (0, -2 * len(x) % 31)).reshape(-1, 31)
    x = np.pad(x, ((0, 0), (1, 0)), constant_values=448)  # so the scale is 1
    np.testing.assert_array_equal(jax.jit(mxfp8)(x), x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_gradients_pass_straight_through():
    w = jnp.asarray(np.random.default_rng(1).normal(size=(2, 64, 32)), jnp.float32)
    d = jnp.asarray(np.random.default_rng(2).normal(size=w.shape), jnp.float32)
    for f in (mxfp4_weights, mxfp8):
        assert not np.array_equal(f(w), w)
        np.testing.assert_array_equal(jax.vjp(f, w)[1](d)[0], d)
        np.testing.assert_array_equal(f(f(w)), f(w))


def test_quantised_weights_are_the_same_from_bfloat16():
    w = jnp.asarray(np.random.default_rng(3).normal(size=(64, 32)), jnp.float32)
    a, b = mxfp4_weights(w), mxfp4_weights(w.astype(jnp.bfloat16))
    np.testing.assert_array_equal(a, b.astype(jnp.float32))


@pytest.fixture(scope="module")
def variables():
    return random_variables(model(), std=0.3, noise=0.1)


def logprobs(config, params, bias, tokens):
    graphdef = random_variables(config)[0]
    return jax.jit(lambda t: jax.nn.log_softmax(nnx.merge(graphdef, params, bias)(t)[0]))(tokens)


def sampled_gap(config, params, bias, n=24):
    """Largest difference of log-probabilities as sampled from the forward pass of training, over some requests."""
    batcher = Batcher(Engine(config, params, bias, EngineConfig(slots=3, capacity=64, chunks=(8,), steps=4)))
    requests = [batcher.submit(Request([5 + i, 9, 200], n, Sampling(1.0, seed=i))) for i in range(3)]
    batcher.run()
    text = np.array([[*r.prompt, *r.tokens] for r in requests])
    full = np.asarray(logprobs(config, params, bias, jnp.asarray(text)))
    trained = np.take_along_axis(full[:, 2:-1], text[:, 3:, None], axis=-1)[..., 0]
    return np.abs(trained - np.array([r.logprobs for r in requests])).max()


@pytest.mark.slow
def test_sampling_and_training_agree_as_without_quantisation(variables):
    """Gathered experts while decoding, sorted rows in training: the same roundings, so the same log-probabilities."""
    _, params, bias = variables
    assert sampled_gap(model(), params, bias) < 2e-4
    assert sampled_gap(model(quantise="mxfp4"), params, bias) < 2e-4


@pytest.mark.slow
def test_a_quantised_model_is_exported_as_it_was_trained(variables, tmp_path):
    """MXFP4 experts of the file, with MXFP8 inputs, give the training model's logits, packed or not."""
    _, params, bias = variables
    tokens = jnp.asarray(np.random.default_rng(4).integers(0, 272, (2, 24)))
    config = model(quantise="mxfp4")
    want = logprobs(config, params, bias, tokens)
    assert np.abs(want - logprobs(model(), params, bias, tokens)).max() > 1e-2  # it does round
    export(tmp_path / "a", config, params, bias, dtype="float32", experts="mxfp4")
    for fmt in ("dense", "mxfp4"):
        read, loaded = hf.load(tmp_path / "a", DtypeConfig(compute="float32"), experts_format=fmt)
        read = dataclasses.replace(read, moe=dataclasses.replace(read.moe, quantise="mxfp4"))
        graphdef = random_variables(read)[0]
        got = jax.jit(lambda t, g=graphdef, s=nnx.state(loaded): jax.nn.log_softmax(nnx.merge(g, s)(t)[0]))(tokens)
        np.testing.assert_allclose(got, want, atol=2e-4)


def test_what_cannot_be_quantised_or_trained_is_refused():
    with pytest.raises(ConfigError, match="multiple of 32"):
        model(quantise="mxfp4", expert_dim=48)
    with pytest.raises(ConfigError, match="quantise"):
        model(quantise="mxfp")
    with pytest.raises(ConfigError, match="model.moe.experts_format='mxfp4'"):
        optimizer(Config(model=model(experts_format="mxfp4")))

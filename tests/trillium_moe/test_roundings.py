"""Training and generation in bfloat16 round at the same places, and compilers leave the roundings in."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import scales
from pallas_kernels import few_rows
from tests.models import random_variables
from trillium_moe.config import ConfigError, DtypeConfig, KDAConfig, MLAConfig, MoEConfig
from trillium_moe.model.cache import Latents, Recurrent
from trillium_moe.model.context import Context
from trillium_moe.model.kda import KDA
from trillium_moe.model.mla import MLA
from trillium_moe.model.params import layer
from trillium_moe.model.quantise import mxfp4_weights, mxfp8
from trillium_moe.parallel.chips import H200

BF16 = DtypeConfig(compute="bfloat16")
MOE = MoEConfig(n_experts=8, k=2, expert_dim=32, latent_dim=64, n_shared=1, quantise="mxfp4")


def model(**kda):
    return dataclasses.replace(scales.tiny(), n_layers=2, n_dense_layers=0, moe=MOE, dtypes=BF16, kda=KDAConfig(**kda))


@pytest.fixture(scope="module")
def whole():
    return nnx.merge(*random_variables(model(), std=0.1, noise=0.1))


def apart(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def inputs(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.bfloat16)


@pytest.mark.parametrize("tokens", [2, 24])  # gathered, dense
def test_a_mixture_of_few_tokens_is_that_of_training(whole, tokens):
    graphdef, state = nnx.split(whole.moe)
    one, x = layer(state, 0), inputs(1, tokens, 128)
    trained = jax.jit(lambda s, x: nnx.merge(graphdef, s)(x, Context(None))[0])(one, x)

    def each(state, x):
        module = nnx.merge(graphdef, state)
        module.pack()
        return module.each(x)

    np.testing.assert_array_equal(jax.jit(each)(one, x).astype(jnp.float32), trained.astype(jnp.float32))


@pytest.mark.parametrize("packed", [False, True])
def test_kda_in_float32_trains_what_decoding_computes(whole, packed):
    """Chunks of bfloat16 operands are half a percent away from the recurrence, chunks of float32 are not. Nor are step
    sizes, which decoding multiplies from packed matrices."""
    state, x = layer(nnx.split(whole.kda)[1], 0), inputs(1, 48, 128)

    def both(config):
        graphdef = nnx.split(nnx.eval_shape(lambda: KDA(config, rngs=nnx.Rngs(0))))[0]
        module = lambda s: nnx.merge(graphdef, s)

        def steps(s, x):
            c = config.kda
            past = Recurrent(jnp.zeros((1, c.n_heads, c.head_dim, c.head_dim)),
                             jnp.zeros((1, c.conv_size - 1, 3, c.n_heads, c.head_dim), jnp.bfloat16))
            one = module(s)
            if packed:
                one.pack()
            step = lambda past, x_D: one.extend(x_D[None, None], jnp.ones(1, jnp.int32), past)[::-1]
            return jax.lax.scan(step, past, x[0])[1][:, 0, 0]

        trained = jax.jit(lambda s, x: module(s)(x, Context(None))[0])(state, x)[0]
        return [np.asarray(y, np.float32) for y in (trained, jax.jit(steps)(state, x))]

    assert 3e-3 < apart(*both(model())) < 2e-2
    assert apart(*both(model(compute="float32"))) < 5e-4


def test_attention_in_float32_does_not_hang_on_the_order_of_products(whole):
    """Keys and values expanded in training, queries absorbed in decoding."""
    state, x = layer(nnx.split(whole.mla)[1], 0), inputs(1, 48, 128)

    def both(**mla):
        config = dataclasses.replace(model(), mla=MLAConfig(**mla))
        graphdef = nnx.split(nnx.eval_shape(lambda: MLA(config, rngs=nnx.Rngs(0))))[0]
        module = lambda s: nnx.merge(graphdef, s)

        def steps(s, x):
            def step(past, t):
                y, past = module(s).extend(x[:, t][:, None], jnp.ones(1, jnp.int32), past, None, jnp.full(1, t))
                return past, y[0, 0]

            width = config.mla.kv_lora_rank + config.mla.rope_dim
            return jax.lax.scan(step, Latents(jnp.zeros((1, 64, width), jnp.bfloat16)), jnp.arange(48))[1]

        trained = jax.jit(lambda s, x: module(s)(x, Context(None))[0])(state, x)[0]
        return [np.asarray(y, np.float32) for y in (trained, jax.jit(steps)(state, x))]

    assert 1e-3 < apart(*both()) < 1e-2
    assert apart(*both(compute="float32")) < 2e-4


@pytest.mark.parametrize("config, name", [(KDAConfig, "kda"), (MLAConfig, "mla")])
def test_mixers_are_computed_in_float32_or_as_the_rest(config, name):
    with pytest.raises(ConfigError, match=f"model.{name}.compute=.bfloat16."):
        config(compute="bfloat16")


@pytest.mark.aot
def test_an_h200_rounds_what_experts_take():
    """XLA leaves out a cast to fewer bits and back, on GPUs even one to E4M3."""
    topologies = pytest.importorskip("jax.experimental.topologies")
    try:
        devices = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices
    except Exception as error:  # whatever the missing plugin raises
        pytest.skip(f"no CUDA plugin: {error}")
    where = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, "device"), jax.P())
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=where)
    compiled = lambda f: jax.jit(f).lower(x).compile().as_text()
    parts = compiled(lambda w: few_rows.exact(w, jnp.bfloat16))  # of a router: what the first leaves is no zero
    assert not re.search(r"subtract\((%\S+), \1\)", parts) and parts.count("mantissa_bits=7") >= 3
    cast = lambda x: x.astype(jnp.float8_e4m3fn).astype(x.dtype)
    assert "f8e4m3" not in compiled(cast)  # if it is there one day, the cast will do
    assert "exponent_bits=8, mantissa_bits=3" in compiled(mxfp8)
    assert "exponent_bits=8, mantissa_bits=7" in compiled(lambda x: mxfp8(x.astype(jnp.bfloat16)))
    assert "exponent_bits=8, mantissa_bits=7" in compiled(mxfp4_weights)

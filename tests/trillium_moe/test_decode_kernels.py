"""A decoding step by the Hopper kernels, interpreted, against XLA's, and both against float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import dispatch
from pallas_kernels.attention import gpu_decode
from pallas_kernels.depth_read import pallas_gpu as depth_read
from pallas_kernels.few_rows import pallas_gpu as few_rows
from pallas_kernels.kda_decode import pallas_gpu as kda_decode
from tests.models import random_variables
from trillium_moe.config import DtypeConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from trillium_moe.infer.forward import extend, logits, serving_weights, settle
from trillium_moe.model import few
from trillium_moe.model.cache import make_cache

# every mixer, a dense layer and four mixtures, three depth blocks; 12 of 16 experts, so that roundings move few choices
CONFIG = ModelConfig(
    vocab_size=64, d_model=64, n_layers=5, kda_per_mla=1, ffn_dim=128, block_size=2,
    kda=KDAConfig(n_heads=2, head_dim=32), dtypes=DtypeConfig(compute="bfloat16"),
    mla=MLAConfig(n_heads=2, q_lora_rank=64, kv_lora_rank=64, nope_dim=64, rope_dim=16, v_dim=64),
    moe=MoEConfig(n_experts=16, k=12, expert_dim=64, latent_dim=64),
)  # fmt: skip
STEPS = 5


def decode(config):
    """Logits of STEPS tokens of three sequences, the second of which sits one step out, and the last cache."""
    weights = serving_weights(config, *random_variables(CONFIG, std=0.15, noise=0.05)[1:])
    tokens = np.random.default_rng(0).integers(0, 64, (STEPS, 3, 1)).astype(np.int32)

    @jax.jit
    def step(weights, cache, tokens, n):
        h, cache = extend(config, weights, cache, tokens, n)
        return logits(config, weights, h[:, 0]), cache

    cache, out = make_cache(config, 3, 100), []
    for t in range(STEPS):
        y, cache = step(weights, cache, tokens[t], jnp.array([1, t != 2, 1], jnp.int32))
        out.append(np.where([[True], [t != 2], [True]], np.asarray(y, np.float64), 0))
    return np.stack(out), jax.tree.map(lambda x: np.asarray(x, np.float64), cache)


@pytest.fixture
def on_hopper(monkeypatch):
    """Kernels serve the CPU, interpreted. Returns the names of those that ran."""
    ran, call = [], pl.pallas_call

    def interpreted(*args, interpret=False, name="", **kwargs):
        ran.append(name)
        return call(*args, interpret=True, name=name, **kwargs)

    monkeypatch.setattr(pl, "pallas_call", interpreted)
    monkeypatch.setitem(dispatch.PREFERENCE, "cpu", ("pallas_gpu", "xla"))
    for module in (gpu_decode, depth_read, few_rows, kda_decode, few):
        monkeypatch.setattr(module, "is_hopper", lambda: True)
    jax.clear_caches()  # of layers that were traced without kernels
    yield ran
    jax.clear_caches()


@pytest.mark.slow
def test_a_step_by_kernels_is_xlas(on_hopper, monkeypatch):
    """As close to float32 as XLA's bfloat16 is: roundings differ, wiring does not."""
    error = lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b)
    kernels, cache = decode(CONFIG)
    assert set(on_hopper) == {
        "depth_read", "few_rows_linear", "few_rows_heads", "few_rows_route", "few_rows_experts",
        "few_rows_join", "kda_decode", "latent_decode_attend", "latent_decode_merge",
    }  # fmt: skip
    monkeypatch.undo()
    jax.clear_caches()
    xla, wanted = decode(CONFIG)
    exact, _ = decode(dataclasses.replace(CONFIG, dtypes=DtypeConfig(compute="float32")))
    assert error(kernels, xla) < 0.03
    assert error(kernels, exact) < 1.1 * error(xla, exact)
    for got, want in zip(jax.tree.leaves(cache), jax.tree.leaves(wanted)):
        assert got.shape == want.shape and error(got, want) < 0.03


@pytest.mark.slow
def test_a_proposed_token_changes_no_bit(on_hopper):
    """Two tokens in one step, of which a sequence keeps both, one or none, against two steps. Layer by layer: compiled
    as one program, XLA on a CPU keeps more digits between interpreted kernels, and not the same ones in both."""
    weights = serving_weights(CONFIG, *random_variables(CONFIG, std=0.15, noise=0.05)[1:])
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 64, (3, 3)), jnp.int32)
    keep = jnp.array([2, 1, 0])

    def single(weights, cache, tokens, n):
        h, cache = extend(CONFIG, weights, cache, tokens[:, None], n)
        return logits(CONFIG, weights, h[:, 0]), cache

    def double(weights, cache, tokens):
        h, cache = extend(CONFIG, weights, cache, tokens, 2 * jnp.minimum(keep, 1), undecided=True)
        return logits(CONFIG, weights, h), settle(cache, keep)

    start = single(weights, make_cache(CONFIG, 3, 100), tokens[:, 0], jnp.ones(3, jnp.int32))[1]
    got, both = double(weights, start, tokens[:, 1:])
    cache, want = start, []
    for t in range(2):
        y, cache = single(weights, cache, tokens[:, 1 + t], (t < keep).astype(jnp.int32))
        want.append(np.asarray(y, np.float32))
    for b, t in ((0, 0), (0, 1), (1, 0)):
        np.testing.assert_array_equal(np.asarray(got[b, t], np.float32), want[t][b])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(*(np.asarray(z, np.float32) for z in (x, y))),
                 (both.length, both.kda), (cache.length, cache.kda))
    for x, y in zip(both.mla, cache.mla):
        for b, n in enumerate(1 + keep):
            np.testing.assert_array_equal(*(np.asarray(z.values[b, :n], np.float32) for z in (x, y)))

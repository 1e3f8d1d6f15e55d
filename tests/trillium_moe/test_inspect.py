"""Each probe against something independent: the model itself, a closed form, or a case made by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from matplotlib.figure import Figure

from trillium_moe.config import Config, DtypeConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from trillium_moe.data.tokenizer import ByteTokenizer
from trillium_moe.infer.generate import LoadedModel
from trillium_moe.inspect import activations, attention, depth, experts, memory, walk
from trillium_moe.model.context import Context
from trillium_moe.train.report import png

from ..models import random_variables

MODEL = ModelConfig(
    vocab_size=272, d_model=32, n_layers=3, ffn_dim=48, block_size=2, remat="none",
    dtypes=DtypeConfig(compute="float32"), kda=KDAConfig(n_heads=2, head_dim=16),
    mla=MLAConfig(n_heads=2, q_lora_rank=0, kv_lora_rank=16, nope_dim=16, rope_dim=8, v_dim=16),
    moe=MoEConfig(n_experts=8, k=2, expert_dim=16, latent_dim=16, n_shared=1),
)  # fmt: skip
T = 32


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    _, params, bias = random_variables(MODEL, std=0.3, noise=0.1)
    return LoadedModel(Config(model=MODEL), 0, params, bias, ByteTokenizer())


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (2, T)).astype(np.int32)


@pytest.fixture(scope="module")
def whole(model, tokens):
    """(final hidden states, aux) of the model itself."""
    return jax.jit(lambda p, b, t: nnx.merge(walk.model_def(MODEL)[0], p, b).hidden(t, Context()))(
        model.params, model.router_bias, tokens)


@pytest.fixture(scope="module")
def walked(model, tokens):
    return list(walk.sublayers(model, tokens))


def test_walk_is_the_model(model, walked, whole):
    """The statistics of every layer, which depend on all layers below it, and the last output."""
    _, aux = whole
    assert [sub.kind for sub in walked] == ["kda", "dense", "kda", "moe", "mla", "moe"]
    np.testing.assert_allclose([sub.read_N for sub in walked], aux["attn_res"][:-1], rtol=1e-4, atol=1e-6)
    loads = [sub.aux["load"] for sub in walked if sub.kind == "moe"]
    np.testing.assert_array_equal(loads, aux["moe"]["load"])
    logit = next(sub for sub in walked if sub.kind == "mla").aux["max_logit"]
    np.testing.assert_allclose(logit, aux["mla"]["max_logit"][0], rtol=1e-4)


def _output(sub, o):
    return sub.module.output(o, sub.module.gate_logits(sub.x_BTD), sub.x_BTD.dtype)


def test_memory_and_states(model, tokens, walked, whole):
    data = memory.memory(model, tokens)
    np.testing.assert_allclose(data.log_decay_LHK, whole[1]["kda"]["log_decay_mean"], rtol=1e-4)
    assert data.write_LH.shape == (2, 2) and (data.write_LH > 0).all() and (data.write_LH < 1).all()
    np.testing.assert_allclose(np.exp(data.log_decay_LHK * data.half_life_LHK), 0.5, rtol=1e-6)
    sub = walked[2]
    o, states = memory.states(*memory.inputs(sub.module, sub.x_BTD))
    np.testing.assert_allclose(_output(sub, o), sub.y_BTD, rtol=2e-3, atol=2e-4)  # chunked there
    curve = memory.state_curve(model, tokens, every=8)
    np.testing.assert_array_equal(curve.position_N, [8, 16, 24, 32])
    frobenius = np.sqrt(np.square(np.asarray(states)[7]).sum((-1, -2))).mean(0)  # after 8 tokens, of the second layer
    np.testing.assert_allclose(curve.norm_LHN[1, :, 0], frobenius, rtol=1e-4)
    assert (curve.rank_LHN <= 8 + 1e-3).all(axis=1)[:, 0].all()  # 8 writes of rank one
    assert (curve.rank_LHN >= 1).all() and (curve.rank_LHN <= 16).all()


def test_depth_and_gradients(model, tokens, walked):
    data = depth.depth(model, tokens)
    np.testing.assert_allclose(data.read_SN[1:].sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(data.output_S[3], np.sqrt(np.mean(np.square(np.asarray(walked[3].y_BTD)))), rtol=1e-5)


def test_gradient_norms_belong_to_their_layers(model, monkeypatch):
    """Layer i of each kind has gradients of i + 1 everywhere."""
    def fake(config, n_micro):
        value = lambda x: np.ones(x.shape) * (1 + np.arange(len(x))).reshape(-1, *(1,) * (x.ndim - 1))
        return lambda params, bias, batch: (None, jax.tree.map(value, params))

    monkeypatch.setattr(depth, "value_and_grad", fake)
    kinds, norms = depth.gradient_norms(model, {})
    size = lambda kind: sum(v.size / len(v) for v in jax.tree.leaves(model.params[kind]))
    assert kinds == ("kda", "dense", "kda", "moe", "mla", "moe")
    expected = [1 * size("kda"), 1 * size("dense"), 4 * size("kda"), 1 * size("moe"), 1 * size("mla"), 4 * size("moe")]
    np.testing.assert_allclose(norms**2, expected, rtol=1e-6)


def test_expert_choices_are_those_of_the_model(model, tokens, whole):
    chosen = experts.choices(model, tokens)
    assert chosen.shape == (2, 2 * T, 2)
    counts = np.asarray(whole[1]["moe"]["load"])
    np.testing.assert_allclose(experts.load(chosen, 8), counts / counts.mean(1, keepdims=True))
    assert (experts.churn(chosen, chosen[..., ::-1]) == 0).all()
    np.testing.assert_allclose(experts.churn(chosen, (chosen + 4) % 8), [
        1 - np.mean([len(set(a) & set((a + 4) % 8)) / 2 for a in layer]) for layer in chosen])


def test_co_activation_and_mutual_information_by_hand():
    # experts 0 and 1 always together, in half of the tokens; 2 and 3 in the others
    layer = np.array([[0, 1], [2, 3]] * 200)
    lift = experts.co_activation(layer[None], 5)[0]
    assert lift[0, 1] == pytest.approx(2) and lift[0, 2] == 0 and np.isnan(lift[0, 0]) and np.isnan(lift[0, 4])
    domain = np.arange(400) % 2
    bits = experts.mutual_information(layer[None], domain, 5)[0]
    assert bits == pytest.approx(1 - 3 / (2 * 800 * np.log(2)))  # one bit, less the correction
    rng = np.random.default_rng(0)
    draw = lambda: experts.mutual_information(rng.integers(0, 5, (1, 400, 2)), rng.integers(0, 2, 400), 5)[0]
    free = [draw() for _ in range(200)]
    assert abs(np.mean(free)) < 4 * np.std(free) / 200**0.5  # unbiased where there is nothing to know


def test_attention_probabilities_reproduce_the_layer(model, tokens, walked):
    sub = next(sub for sub in walked if sub.kind == "mla")
    p = attention.probabilities(sub.module, sub.x_BTD)
    latent, _ = sub.module.latents(sub.x_BTD, None)
    v = jnp.einsum("bsr,rhv->bshv", latent, sub.module.v_up[...])
    o = jnp.einsum("bhts,bshv->bthv", p, v)
    np.testing.assert_allclose(_output(sub, o), sub.y_BTD, rtol=1e-3, atol=1e-5)
    bits = attention.entropy(model, tokens)
    assert bits.shape == (1, 2, T) and (np.abs(bits[..., 0]) < 1e-6).all()
    assert (bits <= np.log2(np.arange(1, T + 1)) + 1e-4).all()
    share = attribution = attention.attribution(model, tokens, slice(20, 30), slice(4, 9))
    np.testing.assert_allclose(share[0], np.asarray(p)[:, :, 20:30, 4:9].sum(-1).mean((0, 2)), rtol=1e-4)
    everything = attention.attribution(model, tokens, slice(20, 30), slice(0, T))
    np.testing.assert_allclose(everything, 1, rtol=1e-5)
    assert (attribution < 1).all()
    ids = np.repeat([[1, 2]], T // 2, 1).reshape(1, T, order="F").repeat(2, 0)  # two documents
    across = attention.attribution(model, tokens, slice(T // 2, T), slice(0, T // 2), ids)
    assert (across == 0).all()


def test_activation_maxima(model, tokens, walked):
    data = activations.maxima(model, tokens)
    dense = walked[1]
    gate = np.asarray(dense.x_BTD) @ np.asarray(dense.module.gate[...])
    up = np.asarray(dense.x_BTD) @ np.asarray(dense.module.up[...])
    assert data.gate_L[0] == pytest.approx(np.abs(gate).max(), rel=1e-4)
    situ = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
    assert data.after_L[0] == pytest.approx(np.abs(situ).max(), rel=1e-4)
    assert len(data.after_L) == 3 and (data.after_L <= 100).all()
    # the routed experts of one layer, token by token
    sub, c = walked[3], MODEL.moe
    chosen = experts.choices(model, tokens)[0]
    z = np.asarray(sub.x_BTD).reshape(-1, 32) @ np.asarray(sub.module.down[...])
    w = np.asarray(sub.module.w_gate[...])
    largest = max(np.abs(z[m] @ w[e]).max() for m in range(len(z)) for e in chosen[m])
    shared = np.abs(np.asarray(sub.x_BTD) @ np.asarray(sub.module.shared.gate[...])).max()
    assert data.gate_L[1] == pytest.approx(max(largest, shared), rel=1e-4) and c.n_shared == 1


def test_pictures_are_not_empty(model, tokens):
    chosen = experts.choices(model, tokens)
    data = depth.depth(model, tokens)
    pictures = [
        memory.plot_memory(model, memory.memory(model, tokens)),
        memory.plot_states(memory.state_curve(model, tokens)),
        depth.plot_reads(data),
        depth.plot_by_depth(data.kinds, data.output_S, "Outputs"),
        experts.plot_load(model, experts.load(chosen, 8)),
        experts.plot_co_activation(experts.co_activation(chosen, 8), 0),
        experts.plot_by_layer(experts.churn(chosen, chosen[..., ::-1] * 0), "Churn"),
        attention.plot_entropy(attention.entropy(model, tokens)),
        attention.plot_attribution(attention.attribution(model, tokens, slice(8, 9), slice(0, 4))),
        activations.plot_maxima(activations.maxima(model, tokens), bound=100.0),
    ]
    for picture in pictures:
        assert isinstance(picture, Figure) and len(png(picture)) > 8_000


def test_models_without_reads_or_latent_are_walked_too(tokens):
    config = dataclasses.replace(MODEL, residual="none", n_layers=2, mla_layers=(-1,),
                                 moe=dataclasses.replace(MODEL.moe, latent_dim=0, n_shared=0))
    _, params, bias = random_variables(config, std=0.3)
    other = LoadedModel(Config(model=config), 0, params, bias, ByteTokenizer())
    data = depth.depth(other, tokens)
    assert data.kinds == ("kda", "dense", "kda", "moe") and (data.read_SN == 0).all() and (data.output_S > 0).all()
    assert (activations.maxima(other, tokens).after_L > 0).all()

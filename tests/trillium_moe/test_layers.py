"""Layers against golden internals and independent formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.kda import log_decay, unit
from tests import goldens
from trillium_moe.config import DtypeConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from trillium_moe.interop import hf, layout
from trillium_moe.model import experts, moe
from trillium_moe.model.attn_res import read
from trillium_moe.model.context import Context
from trillium_moe.model.conv import short_conv
from trillium_moe.model.ffn import situ_glu, swiglu
from trillium_moe.model.kda import KDA, inverse_softplus_dt
from trillium_moe.model.mla import MLA, positions, rotate
from trillium_moe.model.norms import rms_norm

F64 = DtypeConfig("float64", "float64", "float64")
F32 = DtypeConfig(compute="float32")


def from_golden(module, config, kind, tensors):
    """A module with the weights of a golden layer, by their names below the layer."""
    values = {}
    for stored in layout.tensors(config, layout.K3):
        name = stored.name.partition(f"layers.{config.mixers.index(kind)}.")[2]
        if name in tensors:
            values |= {path: value for (path, _), value in goldens.pieces(stored, tensors[name]).items()}
    graphdef, state = nnx.split(module)
    fill = lambda path, v: v.replace(jnp.asarray(values[kind, *path].astype(np.float64), v.dtype))
    return nnx.merge(graphdef, nnx.map_state(fill, state))


@pytest.mark.parametrize("tag", ["k3", "kimi_linear"])
def test_golden_mla_with_packed_documents(tag):
    meta, data = goldens.meta("attn", "config.json"), goldens.arrays("attn", "reference.safetensors")
    start = f"{tag}.weight."
    weights = {f"self_attn.{k.removeprefix(start)}": v for k, v in data.items() if k.startswith(start)}
    weights = {k if k.endswith(".weight") else f"{k}.weight": v for k, v in weights.items()}
    own = meta[tag]
    with jax.enable_x64(True):
        config = ModelConfig(d_model=meta["hidden_size"], dtypes=F64, mla=MLAConfig(
            n_heads=own["heads"], q_lora_rank=own["q_lora_rank"] or 0, kv_lora_rank=meta["kv_lora_rank"],
            nope_dim=meta["qk_nope_head_dim"], rope_dim=meta["qk_rope_head_dim"], v_dim=meta["v_head_dim"],
            gate="full" if own["output_gate"] else "none"))
        layer = from_golden(MLA(config, rngs=nnx.Rngs(0)), config, "mla", weights)
        x = jnp.asarray(data[f"{tag}.x"], jnp.float64)
        ids = jnp.asarray(np.searchsorted(data["cu_seqlens"], np.arange(x.shape[1]), side="right"))[None]
        graphdef, params = nnx.split(layer)
        run = lambda params, x, ids: nnx.merge(graphdef, params)(x, Context(ids))[0]
        assert goldens.error(run(params, x, ids), data[f"{tag}.out_packed"]) < 5e-7
        assert goldens.error(run(params, x, jnp.ones_like(ids)), data[f"{tag}.out_causal"]) < 5e-7
        dout = jnp.asarray(data[f"{tag}.dout"], jnp.float64)
        d_params, d_x = jax.grad(lambda p, x: (run(p, x, ids) * dout).sum(), (0, 1))(params, x)
        assert goldens.error(d_x, data[f"{tag}.grad_x_packed"]) < 5e-7
        assert goldens.error(d_params["kv_norm"][...], data[f"{tag}.grad.kv_a_layernorm.weight"]) < 5e-7


def test_golden_kda_layer_internals():
    name = "kimi_k3_tiny"
    ref, tensors = goldens.arrays(name, "reference.safetensors"), goldens.arrays(name, "model.safetensors")
    prefix = "language_model.model.layers.4."
    with jax.enable_x64(True):
        config = dataclasses.replace(hf.read_config(goldens.ROOT / name, F64))
        weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        layer = from_golden(KDA(config, rngs=nnx.Rngs(0)), config, "kda", weights)
        x = jnp.asarray(ref["kda.in.4"], jnp.float64)
        y, aux = layer(x, Context())
        assert goldens.error(y, ref["kda.out.4"]) < 1e-6
        g = layer.log_decay(layer.decay_logits(x))
        assert goldens.error(g, ref["kda.g.4"]) < 1e-6
        np.testing.assert_allclose(aux["log_decay_min"], g.min())


def test_situ_glu_by_its_formula():
    g, u = (np.random.default_rng(i).normal(size=(7, 5)) * 30 for i in range(2))
    expected = 4 * np.tanh(g / 4) / (1 + np.exp(-g)) * 25 * np.tanh(u / 25)
    got = situ_glu(jnp.asarray(g, jnp.float32), jnp.asarray(u, jnp.float32))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-5)
    assert float(jnp.abs(situ_glu(jnp.full(3, 1e4), jnp.full(3, -1e4))).max()) <= 100
    plain = lambda g, u: 4 * jnp.tanh(g / 4) * jax.nn.sigmoid(g) * (25 * jnp.tanh(u / 25))
    g32, u32 = jnp.asarray(g, jnp.float32), jnp.asarray(u, jnp.float32)
    for a, b in zip(*(jax.grad(lambda g, u, f=f: jnp.sin(f(g, u)).sum(), (0, 1))(g32, u32) for f in (situ_glu, plain))):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    small = jnp.asarray([1e-3, -2e-3]), jnp.asarray([2e-3, 1e-3])
    np.testing.assert_allclose(situ_glu(*small), swiglu(*small), rtol=1e-4)


def test_bounded_decay_stays_inside_its_bound():
    z = jnp.asarray([-1e4, -3.0, 0.0, 3.0, 1e4]).reshape(1, 5, 1, 1)
    g = log_decay(z, jnp.zeros(1), jnp.zeros((1, 1)), -5.0)
    assert float(g.min()) >= -5 and float(g.max()) <= 0
    np.testing.assert_allclose(g[0, 2, 0, 0], -2.5)


def test_dt_bias_inverts_softplus():
    dt = jax.nn.softplus(inverse_softplus_dt(jax.random.key(0), (4096,), "float32"))
    assert 1e-3 * 0.99 < float(dt.min()) < 1.2e-3 and 0.085 < float(dt.max()) < 0.101
    np.testing.assert_allclose(np.median(np.log10(dt)), -2, atol=0.1)


def test_norms_by_their_formulas():
    x = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    w = np.arange(6, dtype=np.float32)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(w)), expected, rtol=1e-5)
    np.testing.assert_allclose(unit(jnp.asarray(x)), x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6), rtol=1e-5)
    np.testing.assert_array_equal(unit(jnp.zeros((2, 4))), 0)


def test_short_conv_restarts_at_documents():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 11, 2, 3)), rng.normal(size=(2, 3, 4))
    ids = np.array([[1] * 5 + [2] + [3] * 5, [4] * 2 + [5] * 9])
    expected = np.zeros_like(x)
    for b, t, s in np.ndindex(2, 11, 4):
        if t - s >= 0 and ids[b, t - s] == ids[b, t]:
            expected[b, t] += w[..., 3 - s] * x[b, t - s]
    d, d_x, d_w = rng.normal(size=x.shape), np.zeros_like(x), np.zeros_like(w)
    for b, t, s in np.ndindex(2, 11, 4):
        if t - s >= 0 and ids[b, t - s] == ids[b, t]:
            d_x[b, t - s] += w[..., 3 - s] * d[b, t]
            d_w[..., 3 - s] += x[b, t - s] * d[b, t]
    single = lambda x: jnp.asarray(x, jnp.float32)
    got, vjp = jax.vjp(lambda x, w: short_conv(x, w, jnp.asarray(ids)), single(x), single(w))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    for mine, true in zip(vjp(single(d)), (d_x, d_w)):
        np.testing.assert_allclose(mine, true, rtol=1e-5, atol=1e-5)


def test_positions_and_rotation():
    ids = jnp.asarray([[3, 3, 3, 4, 0, 0, 7]])
    np.testing.assert_array_equal(positions(ids), [[0, 1, 2, 0, 0, 1, 0]])
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 7, 1, 8)), jnp.float32) for _ in range(2))
    at = jnp.arange(7)[None]
    logits = lambda shift: jnp.einsum("bqhk,bthk->qt", rotate(q, at + shift, 1e4), rotate(k, at + shift, 1e4))
    np.testing.assert_allclose(logits(0), logits(1000), atol=2e-4)  # only distances matter
    assert float(jnp.abs(logits(0) - jnp.einsum("bqhk,bthk->qt", q, k)).max()) > 0.1


def test_read_by_its_formula():
    rng = np.random.default_rng(0)
    sealed, live, w = rng.normal(size=(3, 1, 2, 4)), rng.normal(size=(1, 2, 4)), rng.normal(size=4)
    for n, has_live in ((1, False), (2, True), (3, True)):
        candidates = [*sealed[:n], *([live] if has_live else [])]
        scores = np.stack([(c / np.sqrt((c**2).mean(-1, keepdims=True) + 1e-5) * w).sum(-1) for c in candidates])
        p = np.exp(scores) / np.exp(scores).sum(0)
        expected = sum(pi[..., None] * c for pi, c in zip(p, candidates))
        w32, sealed32, live32 = (jnp.asarray(a, jnp.float32) for a in (w, sealed, live))
        got, mix = read(w32, sealed32, n, live32, has_live, 1e-5)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mix.sum(), 1, rtol=1e-6)
        np.testing.assert_allclose(mix[:n], p.mean((1, 2))[:n], rtol=1e-5)


@pytest.mark.parametrize("align", [4, 64])
def test_plan_places_every_assignment_once(align):
    rng = np.random.default_rng(0)
    expert = rng.integers(0, 5, 101)
    expert[expert == 3] = 2  # an expert without rows
    slot, source, sizes = map(np.asarray, moe.plan(jnp.asarray(expert), 5, align))
    starts = np.cumsum(sizes) - sizes
    assert (sizes % align == 0).all() and sizes[3] == 0 and len(set(slot)) == 101
    for a, s in enumerate(slot):
        assert starts[expert[a]] <= s < starts[expert[a]] + sizes[expert[a]] and source[s] == a
    assert (source == 101).sum() == len(source) - 101


def small_moe(**kw):
    fields = {"n_experts": 6, "k": 2, "expert_dim": 8, "latent_dim": 8, **kw}
    return ModelConfig(d_model=16, dtypes=F32, init_std=0.3, moe=MoEConfig(**fields))


@pytest.mark.parametrize("latent_dim, n_shared", [(8, 2), (0, 0), (8, 1)])
def test_moe_equals_every_expert_on_every_token(latent_dim, n_shared):
    config = small_moe(latent_dim=latent_dim, n_shared=n_shared)
    layer = moe.MoE(config, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 9, 16)), jnp.float32)

    def dense(state, x):
        m = nnx.merge(graphdef, state)
        s = jax.nn.sigmoid(x @ m.router[...])
        chosen = jax.lax.top_k(s + m.bias[...], 2)[1]
        mask = jax.nn.one_hot(chosen, 6).sum(-2)
        p = mask * s / (mask * s).sum(-1, keepdims=True)
        z = x @ m.down[...] if latent_dim else x
        h = situ_glu(jnp.einsum("btl,elf->btef", z, m.w_gate[...]), jnp.einsum("btl,elf->btef", z, m.w_up[...]))
        u = jnp.einsum("btef,efl,bte->btl", h, m.w_down[...], p)
        u = rms_norm(u, m.norm[...]) @ m.up[...] if latent_dim else u
        if n_shared:
            sh = m.shared
            u = u + situ_glu(x @ sh.gate[...], x @ sh.up[...]) @ sh.down[...]
        return u

    sparse = lambda state, x: nnx.merge(graphdef, state)(x, Context())[0]
    np.testing.assert_allclose(sparse(state, x), dense(state, x), rtol=1e-4, atol=1e-5)
    grads = [jax.grad(lambda s, x, f=f: (jnp.sin(f(s, x)) ** 2).sum(), (0, 1))(state, x) for f in (sparse, dense)]
    for a, b in zip(*map(jax.tree.leaves, grads)):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_batch_threshold_equals_its_mask():
    config = small_moe(balancing="batch_threshold", latent_norm=False, n_shared=0)
    m = moe.MoE(config, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 12, 16)), jnp.float32)
    y, aux = m(x, Context())
    s = np.asarray(jax.nn.sigmoid(x[0] @ m.router[...]))
    taken = s >= np.sort(s, axis=0)[-4]  # q = 12 * 2 / 6
    z = x[0] @ m.down[...]
    h = situ_glu(jnp.einsum("tl,elf->tef", z, m.w_gate[...]), jnp.einsum("tl,elf->tef", z, m.w_up[...]))
    p = taken * s / np.maximum((taken * s).sum(-1, keepdims=True), 1e-20)
    expected = jnp.einsum("tef,efl,te->tl", h, m.w_down[...], p) @ m.up[...]
    np.testing.assert_allclose(y[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(aux["load"], 4)


@pytest.mark.parametrize("shift", [-48.0, -120.0])
def test_batch_threshold_has_a_gradient_where_no_expert_scores(shift):
    """The square of a token's scores, by which the gradient divides, is below float32's range at -48, they at -120."""
    m = moe.MoE(small_moe(balancing="batch_threshold", latent_norm=False, n_shared=0), rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 12, 16)), jnp.float32).at[..., 0].set(1)
    m.router[...] = m.router[...].at[0].add(shift)
    graphdef, state = nnx.split(m)
    grads = jax.grad(lambda state: nnx.merge(graphdef, state)(x, Context())[0].sum())(state)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("gate", ["full", "low_rank", "none"])
@pytest.mark.parametrize("decay, conv_size", [("bounded", 4), ("softplus", 0)])
def test_kda_variants_run_and_differ_only_by_their_parameters(gate, decay, conv_size):
    config = ModelConfig(d_model=16, dtypes=F32, kda=KDAConfig(head_dim=8, gate=gate, decay=decay, conv_size=conv_size))
    layer = KDA(config, rngs=nnx.Rngs(0))
    names = {p[0] for p, _ in nnx.to_flat_state(nnx.state(layer))}
    assert ("gate" in names) == (gate == "full") and ("gate_up" in names) == (gate == "low_rank")
    assert ("q_conv" in names) == (conv_size > 0)
    y, aux = layer(jnp.ones((1, 5, 16)), Context())
    assert y.shape == (1, 5, 16) and bool(jnp.isfinite(y).all())
    assert decay == "softplus" or float(aux["log_decay_min"]) > -5


@pytest.mark.parametrize(
    "where, compute, width, rows",
    [
        (("gpu", "NVIDIA H200"), "bfloat16", 128, 8),
        (("gpu", "NVIDIA H200"), "float32", 128, 64),  # the kernel refuses, and XLA multiplies 64 rows as one block
        (("gpu", "NVIDIA H200"), "bfloat16", 48, 64),
        (("gpu", "NVIDIA A100"), "bfloat16", 128, 64),
        (("tpu", "TPU v5p"), "bfloat16", 128, 16),
        (("cpu", "cpu"), "bfloat16", 128, 64),
    ],
)
def test_experts_rows_are_aligned_to_what_serves_them(where, compute, width, rows, monkeypatch):
    monkeypatch.setattr("pallas_kernels.dispatch.target", lambda: where)
    monkeypatch.setattr(experts, "target", lambda: where)
    moe = MoEConfig(expert_dim=width, latent_dim=128)
    assert experts.alignment(ModelConfig(moe=moe, dtypes=DtypeConfig(compute=compute))) == rows

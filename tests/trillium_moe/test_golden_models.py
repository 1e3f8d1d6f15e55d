"""Released-layout checkpoints against logits, gradients and routing of the code they were released with."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import goldens
from trillium_moe.config import ConfigError, DtypeConfig
from trillium_moe.interop import configs, hf, layout
from trillium_moe.train.loss import cross_entropy

MODELS = ("kimi_k3_tiny", "kimi_linear_tiny", "kimi_k3_tiny_mxfp4")
F32 = DtypeConfig(compute="float32")
F64 = DtypeConfig("float64", "float64", "float64")


QUICK = [name if "mxfp4" not in name else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", QUICK)
def test_float64_logits(name):
    with jax.enable_x64(True):
        _, graphdef, params, rest = goldens.model(name, F64)
        ref = goldens.arrays(name, "reference.safetensors")
        forward = jax.jit(lambda tokens, ids: nnx.merge(graphdef, params, rest)(tokens, ids)[0])
        ids = jnp.asarray(ref["input_ids"])
        assert goldens.error(forward(ids, jnp.ones_like(ids)), ref["logits"]) < 1e-10
        if "packed.cu_seqlens" in ref:
            # documents in one row: the reference ran each document alone
            cu, width = ref["packed.cu_seqlens"], ids.shape[1]
            packed = np.zeros((1, -(-cu[-1] // width) * width), np.int32)
            packed[:, : cu[-1]] = ref["packed.input_ids"]
            segments = np.searchsorted(cu, np.arange(packed.shape[1]), side="right")[None].astype(np.int32)
            logits = jax.jit(lambda t, s: nnx.merge(graphdef, params, rest)(t, s)[0])(packed, segments)
            assert goldens.error(logits[:, : cu[-1]], ref["packed.logits"]) < 5e-7  # stored rounded to float32


@pytest.mark.parametrize("name, tolerance", zip(MODELS, (5e-4, 2e-4, 5e-4)))
def test_float32_logits_loss_routing_and_gradients(name, tolerance):
    config, graphdef, params, rest = goldens.model(name, F32)
    ref = goldens.arrays(name, "reference.safetensors")
    tokens = jnp.asarray(ref["input_ids"])

    @jax.jit
    @jax.value_and_grad
    def value_and_grad(params):
        logits, aux = nnx.merge(graphdef, params, rest)(tokens)
        return cross_entropy(logits[:, :-1], tokens[:, 1:]).mean()

    logits, aux = jax.jit(lambda: nnx.merge(graphdef, params, rest)(tokens))()
    assert goldens.error(logits, ref["logits"]) < 1e-4
    layers = [i for i, kind in enumerate(config.ffns) if kind == "moe" and f"router.topk_idx.{i}" in ref]
    chosen = [ref[f"router.topk_idx.{i}"] for i in layers]
    loads = [np.bincount(c.reshape(-1), minlength=config.moe.n_experts) for c in chosen]
    np.testing.assert_array_equal(aux["moe"]["load"][: len(loads)], loads)

    loss, grads = value_and_grad(params)
    np.testing.assert_allclose(loss, ref["loss"][0], rtol=1e-5)
    check_small_gradients(name, config, grads, tolerance)
    check_gradient_norms(name, config, grads, tolerance)


def by_released_name(config, grads):
    """released name -> (piece of the gradient, the same piece of a stored tensor), for every tensor of the model."""
    flat = {path: np.asarray(v[...], np.float64) for path, v in nnx.to_flat_state(grads)}
    naming = configs.naming_for(config)
    return {stored: {(p.path, p.at): flat[p.path][p.at] for p in stored.parts if p.path in flat}
            for stored in layout.tensors(config, naming)}


def check_small_gradients(name, config, grads, tolerance):
    golden = goldens.arrays(name, "grads_small.safetensors")
    seen = set()
    for stored, mine in by_released_name(config, grads).items():
        if stored.name in golden:
            seen.add(stored.name)
            for key, expected in goldens.pieces(stored, golden[stored.name]).items():
                assert goldens.error(mine[key], expected) < tolerance, stored.name
    assert seen == set(golden) and len(seen) > 20


def check_gradient_norms(name, config, grads, tolerance):
    norms = goldens.meta(name, "grad_norms.json")["grad_norms"]
    mine = {stored.name: np.sqrt(sum((x**2).sum() for x in pieces.values()))
            for stored, pieces in by_released_name(config, grads).items() if pieces}
    expected = {n: v for n, v in norms.items() if not n.endswith("e_score_correction_bias")}
    assert set(mine) == {n.removesuffix("_packed") for n in expected}
    largest = max(v for v in expected.values() if v)
    for tensor, value in expected.items():
        got = mine[tensor.removesuffix("_packed")]
        assert abs(got - (value or 0.0)) < tolerance * max(value or 0.0, 1e-3 * largest), tensor


def test_missing_and_unexpected_tensors_are_all_listed(tmp_path):
    from safetensors.numpy import save_file

    raw = goldens.meta("kimi_linear_tiny", "config.json")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = goldens.arrays("kimi_linear_tiny", "model.safetensors")
    tensors = {k: v.astype(np.float32) for k, v in tensors.items()}
    del tensors["model.norm.weight"], tensors["model.layers.3.self_attn.kv_b_proj.weight"]
    tensors["model.extra"] = np.zeros(3, np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((95, 64), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as raised:
        hf.load(tmp_path, F32)
    absent = ("model.norm.weight", "model.layers.3.self_attn.kv_b_proj.weight")
    shape = "model.layers.0.mlp.up_proj.weight has shape [95, 64], not [96, 64]"
    for part in (*(f"missing {name}" for name in absent), "unexpected model.extra", shape):
        assert part in str(raised.value)


def test_configs_of_the_released_files_equal_the_scales():
    """The goldens' config.json with the released numbers gives the scales of configs/."""
    from configs import scales

    raw = goldens.meta("kimi_k3_tiny", "config.json")
    text = raw["text_config"]
    text.update(hidden_size=7168, num_hidden_layers=93, num_attention_heads=96, num_key_value_heads=96,
                vocab_size=163840, intermediate_size=33792, moe_intermediate_size=3072,
                routed_expert_hidden_size=3584, num_experts=896, num_experts_per_token=16,
                q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
                attn_res_block_size=12)
    text["linear_attn_config"].update(num_heads=96, head_dim=128, full_attn_layers=[*range(4, 93, 4), 93],
                                      kda_layers=[i for i in range(1, 93) if i % 4])
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(raw))
        config = hf.read_config(Path(directory), DtypeConfig())
    scale = scales.trillium_2t8()
    assert config.mixers == scale.mixers
    assert dataclasses.replace(config, mla_layers=(), remat=scale.remat) == scale

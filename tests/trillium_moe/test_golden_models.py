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
from trillium_moe.interop import hf
from trillium_moe.model.stack import Schedule
from trillium_moe.train.loss import cross_entropy

MODELS = ("kimi_k3_tiny", "kimi_linear_tiny", "kimi_k3_tiny_mxfp4")
F32 = DtypeConfig(compute="float32")
F64 = DtypeConfig("float64", "float64", "float64")


def loaded(name, dtypes=F32):
    config, model = hf.load(goldens.ROOT / name, dtypes)
    return (config, *nnx.split(model, nnx.Param, ...))


@pytest.mark.parametrize("name", MODELS)
def test_float64_logits(name):
    with jax.enable_x64(True):
        _, graphdef, params, rest = loaded(name, F64)
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
    config, graphdef, params, rest = loaded(name)
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


class Gradients(hf.Tensors):
    """Golden gradients under their released names, read like a checkpoint."""

    def __init__(self, tensors):
        self.tensors, self.left, self.missing = tensors, set(), []

    def __contains__(self, name):
        return name in self.tensors or name == "language_model.lm_head.weight" and any(
            t.startswith("language_model.") for t in self.tensors
        )

    def take(self, name):
        return self.tensors.get(name)

    weight = take


def check_small_gradients(name, config, grads, tolerance):
    golden = Gradients(goldens.arrays(name, "grads_small.safetensors"))
    seen = 0
    for path, grad in nnx.to_flat_state(grads):
        stacked = path[0] in ("kda", "mla", "dense", "moe")
        if not stacked:
            continue
        top = "language_model." if "language_model.lm_head.weight" in golden else ""
        layers = [s // 2 for s, k in enumerate(_kinds(config)) if k == path[0]]
        for row, i in enumerate(layers):
            prefix = f"{top}model.layers.{i}."
            expected = hf.layer_parameter(golden, prefix, path[0], ".".join(path[1:]), grad.shape[1:])
            if expected is not None:
                seen += 1
                assert goldens.error(grad[row], expected) < tolerance, (prefix, path)
    assert seen > 20


def check_gradient_norms(name, config, grads, tolerance):
    norms = goldens.meta(name, "grad_norms.json")["grad_norms"]
    top = "language_model." if any(n.startswith("language_model.") for n in norms) else ""
    flat = dict(nnx.to_flat_state(grads))
    mine = {}

    def add(tensor, value):
        mine[tensor] = np.hypot(mine.get(tensor, 0.0), np.linalg.norm(np.asarray(value, np.float64)))

    tables = {"kda": hf._KDA, "mla": hf._MLA, "dense": hf._DENSE, "moe": hf._MOE}
    for path, grad in flat.items():
        if path[0] not in tables:
            continue
        layers = [s // 2 for s, k in enumerate(_kinds(config)) if k == path[0]]
        for row, i in enumerate(layers):
            prefix, leaf = f"{top}model.layers.{i}.", ".".join(path[1:])
            if leaf in hf._EXPERT:
                for e in range(config.moe.n_experts):
                    add(f"{prefix}block_sparse_moe.experts.{e}.{hf._EXPERT[leaf]}.weight", grad[row, e])
            elif leaf in ("k_up", "v_up"):
                add(f"{prefix}self_attn.kv_b_proj.weight", grad[row])
            else:
                add(prefix + tables[path[0]][leaf][0], grad[row])
    below = f"{top}model."
    for s in range(2 * config.n_layers):
        norm = ("input_layernorm", "post_attention_layernorm")[s % 2]
        add(f"{below}layers.{s // 2}.{norm}.weight", flat[("sublayer_norm",)][s])
        if config.residual != "none":
            read = ("self_attention_res", "mlp_res")[s % 2]
            add(f"{below}layers.{s // 2}.{read}_norm.weight", flat[("read_norm",)][s])
            add(f"{below}layers.{s // 2}.{read}_proj.weight", flat[("read_query",)][s])
    if config.residual != "none":
        add(f"{below}output_attn_res_norm.weight", flat[("read_norm",)][-1])
        add(f"{below}output_attn_res_proj.weight", flat[("read_query",)][-1])
    add(f"{below}embed_tokens.weight", flat[("embed",)])
    add(f"{top}lm_head.weight", flat[("head",)])
    add(f"{below}norm.weight", flat[("norm",)])

    expected = {n: v for n, v in norms.items() if not n.endswith("e_score_correction_bias")}
    assert set(mine) == {n.removesuffix("_packed") for n in expected}
    largest = max(v for v in expected.values() if v)
    for tensor, value in expected.items():
        got = mine[tensor.removesuffix("_packed")]
        assert abs(got - (value or 0.0)) < tolerance * max(value or 0.0, 1e-3 * largest), tensor


def _kinds(config):
    schedule = Schedule.of(config)
    return [schedule.kinds[k] for k in schedule.kind]


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
    for part in (*(f"missing {name}" for name in absent), "unexpected model.extra", "dense.up"):
        assert part in str(raised.value)


def test_a_log_tail_must_be_zero():
    head = np.array([0.5, -0.25, 1.0, 0, 0], np.float32)
    np.testing.assert_array_equal(hf._a_log(head, (3,)), head[:3])
    with pytest.raises(ConfigError, match="tail is not zero"):
        hf._a_log(np.ones(5, np.float32), (3,))


def test_configs_of_the_released_files_equal_the_scales():
    """The goldens' config.json with the released numbers gives the scales of configs/."""
    from configs import scales

    raw = goldens.meta("kimi_k3_tiny", "config.json")
    text = raw["text_config"]
    text.update(hidden_size=7168, num_hidden_layers=93, num_attention_heads=96, vocab_size=163840,
                intermediate_size=33792, moe_intermediate_size=3072,
                routed_expert_hidden_size=3584, num_experts=896, num_experts_per_token=16,
                q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
                attn_res_block_size=12)
    text["linear_attn_config"].update(num_heads=96, head_dim=128, full_attn_layers=[*range(4, 93, 4), 93])
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(raw))
        config = hf.read_config(Path(directory), DtypeConfig())
    scale = scales.trillium_2t8()
    assert config.mixers == scale.mixers
    assert dataclasses.replace(config, mla_layers=(), remat=scale.remat) == scale

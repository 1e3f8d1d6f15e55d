"""Import, export and planning of released checkpoints, and the traps of their layouts."""

import dataclasses
import json
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import scales, vision
from tests import goldens
from tests.models import random_variables
from trillium_moe.config import ConfigError, DtypeConfig
from trillium_moe.interop import hf, layout
from trillium_moe.interop.export import export
from trillium_moe.interop.safetensors import INDEX, read_directory
from trillium_moe.model.params import RouterBias

F32, BF16 = DtypeConfig(compute="float32"), DtypeConfig(param="bfloat16", compute="float32")
LIBRARY = "kimi_linear_tiny/in_library"
GOLDENS = ("kimi_k3_tiny", "kimi_linear_tiny", LIBRARY, "kimi_k3_tiny_mxfp4")
NAMING = dict(zip(GOLDENS, (layout.K3, layout.LINEAR, layout.LIBRARY, layout.K3)))


def test_the_table_has_as_many_tensors_as_the_releases():
    """497,220 of Kimi-K3, where an MXFP4 matrix is two, 168 for vision; 20,493 of Kimi-Linear (model.md 1.3)."""
    names = [(s.name, 1 + s.routed) for s in layout.tensors(vision.trillium_2t8().model, layout.K3)]
    assert sum(n for _, n in names) == 497_220
    assert sum(n for name, n in names if name.startswith(hf.OTHERS)) == 168
    assert sum(1 for _ in layout.tensors(scales.kimi_linear_48b(), layout.LINEAR)) == 20_493


def test_the_tables_pieces_fill_every_parameter_once():
    for config, naming in ((scales.tiny(), layout.K3), (goldens.model(LIBRARY, F32)[0], layout.LIBRARY)):
        filled = {path: np.zeros(p.shape, int) for path, p in layout.parameters(config).items()}
        for stored in layout.tensors(config, naming):
            for key, piece in goldens.pieces(stored, np.ones(stored.shapes[0], int)).items():
                assert filled[key[0]][key[1]].shape == piece.shape
                filled[key[0]][key[1]] += piece
        assert all((x == 1).all() for x in filled.values())


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("dtypes, experts_format", [
    (F32, "dense"), pytest.param(BF16, "dense", marks=pytest.mark.slow),
    pytest.param(F32, "mxfp4", marks=pytest.mark.slow),
])
def test_import_then_export_is_the_identity(name, dtypes, experts_format, on_device, tmp_path, monkeypatch):
    mxfp4 = name.endswith("mxfp4")
    monkeypatch.setattr(hf, "SMALL", 0 if on_device else hf.SMALL)
    if experts_format == "mxfp4" and not mxfp4:
        with pytest.raises(ConfigError, match="multiple of 32"):
            hf.load(goldens.ROOT / name, dtypes, experts_format=experts_format)
        return
    config, _, params, bias = goldens.model(name, dtypes, experts_format)
    out = tmp_path / "out"
    # a shard holds a tenth: all files but the last are nearly full
    size = sum(e.nbytes for e in read_directory(goldens.ROOT / name).values()) // 10
    files = export(out, config, params, bias, naming=NAMING[name], experts="mxfp4" if mxfp4 else "", shard_bytes=size)
    assert len(files) > 9 and sorted(p.name for p in out.iterdir()) == sorted(
        [*(f.name for f in files), INDEX, "config.json"])
    want, got = read_directory(goldens.ROOT / name), read_directory(out)
    assert set(got) == set(want)
    for tensor, entry in want.items():
        a, b = entry.read(), got[tensor].read()
        assert a.dtype == b.dtype and a.shape == b.shape, tensor
        assert a.tobytes() == b.tobytes(), tensor
    again, model = hf.load(out, dtypes, experts_format=experts_format)
    assert dataclasses.replace(again, mla_layers=()) == dataclasses.replace(config, mla_layers=())
    for a, b in zip(jax.tree.leaves((params, bias)), jax.tree.leaves(nnx.split(model, nnx.Param, RouterBias)[1:])):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_float32_export_keeps_every_bit(tmp_path):
    config = dataclasses.replace(scales.tiny(), n_layers=5)
    _, params, bias = random_variables(config, noise=0.1)
    export(tmp_path / "a", config, params, bias, dtype="float32")
    _, model = hf.load(tmp_path / "a", F32)
    for a, b in zip(jax.tree.leaves((params, bias)), jax.tree.leaves(nnx.split(model, nnx.Param, RouterBias)[1:])):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ConfigError, match="exists and is not empty"):
        export(tmp_path / "a", config, params, bias)


@pytest.mark.parametrize("change, says", [
    ({"residual": "full"}, "model.residual"), ({"kda": {"gate": "none"}}, "model.kda.gate"),
    ({"kda": {"gate": "low_rank", "gate_rank": 7}}, "model.kda.gate_rank"),
    ({"kda": {"decay_rank": 7}}, "model.kda.decay_rank"),
])
def test_what_no_release_can_hold_is_not_exported(change, says, tmp_path):
    config = dataclasses.replace(scales.tiny(), n_layers=1)
    nested = {k: dataclasses.replace(getattr(config, k), **v) if isinstance(v, dict) else v for k, v in change.items()}
    config = dataclasses.replace(config, **nested)
    _, params, bias = random_variables(config)
    with pytest.raises(ConfigError, match=says):
        export(tmp_path / "a", config, params, bias)
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_one_error(tmp_path):
    config, _, params, bias = goldens.model("kimi_linear_tiny", F32)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written .Not a directory"):
        export(tmp_path / "file" / "out", config, params, bias)


def checkpoint(tmp_path, name="kimi_linear_tiny", tensors=None, **fields):
    """A copy of a golden checkpoint with other tensors or config fields."""
    from safetensors.numpy import save_file

    directory = tmp_path / "copy"
    directory.mkdir(parents=True)
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(goldens.ROOT / name / file, directory / file)
    raw = json.loads((directory / "config.json").read_text())
    text = raw.get("text_config", raw)
    for key, value in fields.items():
        if isinstance(value, dict) and isinstance(text.get(key), dict):
            value = text[key] | value
        text[key] = value
    (directory / "config.json").write_text(json.dumps(raw))
    if tensors:
        all_tensors = goldens.arrays(name, "model.safetensors")
        save_file({**all_tensors, **tensors(all_tensors)}, directory / "model.safetensors")
    return directory


def refused(directory, *words, **how):
    with pytest.raises(ConfigError) as raised:
        hf.load(directory, F32, **how)
    for word in words:
        assert word in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("fields, says", [
    ({"model_type": "llama"}, "model_type"),
    ({"moe_router_activation_func": "softmax"}, "only 'sigmoid'"),
    ({"num_expert_group": 8}, "num_expert_group"),
    ({"topk_method": "greedy"}, "only 'noaux_tc'"),
    ({"moe_renormalize": 1}, "only True"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
    ({"hidden_size": "64"}, "must be of type int"),
    ({"hidden_size": -64}, "must be a size"),
    ({"num_hidden_layers": 2**31 - 1}, "at most 10000"),  # a list of them would not fit in memory
    ({"num_experts": 2**31 - 1}, "experts.8.w1.weight"),  # nor would one of what is missing
    ({"vocab_size": None}, "vocab_size is missing"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ({"num_key_value_heads": 2}, "num_key_value_heads"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"linear_attn_config": {"kda_layers": [1, 2, 3]}}, "every layer must be in exactly one"),
    ({"linear_attn_config": {"full_attn_layers": [4, 7]}}, "different layers from 1 to 6"),
    ({"layer_types": ["full_attention"] * 6}, "layer_types"),
    ({"quantization_config": {"format": "float-quantized"}}, "only 'mxfp4-pack-quantized'"),
    ({"quantization_config": {"format": "mxfp4-pack-quantized", "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "group_size": 16}}}}}, "groups of 32"),
    ({"num_experts_per_token": 8}, "model.moe.k"),
])
def test_configs_that_cannot_be(fields, says, tmp_path):
    refused(checkpoint(tmp_path, **fields), says)


@pytest.mark.parametrize("fields, says", [({"model_type": "kimi_k25"}, "model_type='kimi_k25'"),
                                          ({"tie_word_embeddings": True}, "tie_word_embeddings")])
def test_what_surrounds_the_text_tower_is_checked_too(fields, says, tmp_path):
    directory = checkpoint(tmp_path, "kimi_k3_tiny")
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | fields))
    refused(directory, says)


def test_plain_rope_of_transformers_5_is_no_scaling(tmp_path):
    directory = checkpoint(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    assert hf.read_config(directory, F32).mla.position == "none"


def test_dtypes_that_are_not_weights_are_listed(tmp_path):
    change = lambda t: {"model.norm.weight": t["model.norm.weight"].astype(np.float16),
                        "lm_head.weight": t["lm_head.weight"].astype(np.int8)}
    said = "model.norm.weight is F16, not BF16", "lm_head.weight is I8, not BF16"
    refused(checkpoint(tmp_path, tensors=change), *said)


def test_half_an_mxfp4_matrix_is_missing_and_wrong_ones_are_listed(tmp_path):
    base = "language_model.model.layers.1.block_sparse_moe.experts."
    change = lambda t: {
        f"{base}0.w1.weight_scale": t[f"{base}0.w1.weight_scale"].astype(np.float32),
        f"{base}0.w2.weight_packed": t[f"{base}0.w2.weight_packed"][:, :16],
    }
    directory = checkpoint(tmp_path, "kimi_k3_tiny_mxfp4", tensors=change)
    refused(directory, f"{base}0.w1.weight_scale is F32[64, 1], not U8[64, 1]",
            f"{base}0.w2.weight_packed is U8[32, 16], not U8[32, 32]")


def test_a_log_with_a_tail_is_refused_and_all_its_lengths_are_read(tmp_path):
    name = "language_model.model.layers.0.self_attn.A_log"
    tail = lambda t: {name: np.where(np.arange(16) == 9, np.float32(1e-3), t[name])}
    refused(checkpoint(tmp_path / "a", "kimi_k3_tiny", tensors=tail), name, "tail is not zero")
    short = lambda t: {name: t[name][:3]}
    _, model = hf.load(checkpoint(tmp_path / "b", "kimi_k3_tiny", tensors=short), F32)
    np.testing.assert_array_equal(model.kda.a_log[0], goldens.arrays("kimi_k3_tiny", "model.safetensors")[name][:3])


@pytest.mark.slow
def test_only_packed_experts_can_stay_packed(tmp_path):
    config = dataclasses.replace(scales.tiny(), n_layers=2, moe=dataclasses.replace(scales.tiny().moe, expert_dim=64))
    _, params, bias = random_variables(config)
    export(tmp_path / "a", config, params, bias)
    refused(tmp_path / "a", "experts.0.w1.weight is BF16, not MXFP4", experts_format="mxfp4")


def test_vision_tensors_may_lie_beside_the_text_tower(tmp_path):
    extra = lambda t: {"vision_tower.encoder.final_layernorm.weight": t["language_model.model.norm.weight"]}
    config, _ = hf.load(checkpoint(tmp_path, "kimi_k3_tiny", tensors=extra), F32)
    assert config.n_layers == 9


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    directory = checkpoint(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"})
    (directory / "modeling_kimi.py").write_text("raise SystemExit('ran')")
    hf.load(directory, F32)


@pytest.mark.slow
@pytest.mark.parametrize("experts_format", ["dense", "mxfp4"])
def test_the_host_holds_one_tensor(experts_format, tmp_path, monkeypatch):
    """numpy's allocations while a checkpoint is read: the largest tensor, and not one and a half of it."""
    monkeypatch.setattr(hf, "SMALL", 0)
    moe = dataclasses.replace(scales.tiny().moe, n_experts=32, expert_dim=64)
    config = dataclasses.replace(scales.tiny(), n_layers=2, d_model=256, vocab_size=4096, ffn_dim=4096, moe=moe)
    _, params, bias = random_variables(config)
    export(tmp_path / "a", config, params, bias, experts="mxfp4")
    hf.load(tmp_path / "a", F32, experts_format=experts_format)  # compiles, and fills caches
    found = read_directory(tmp_path / "a")
    largest, total = max(e.nbytes for e in found.values()), sum(e.nbytes for e in found.values())
    del found
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        hf.load(tmp_path / "a", F32, experts_format=experts_format)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert largest <= peak < 1.5 * largest < total / 3


@pytest.mark.slow
def test_packed_experts_give_the_logits_of_their_values():
    name = "kimi_k3_tiny_mxfp4"
    ref = goldens.arrays(name, "reference.safetensors")
    _, graphdef, params, rest = goldens.model(name, F32, "mxfp4")
    assert {v[...].dtype.name for p, v in nnx.to_flat_state(params) if "codes" in p[-1]} == {"uint8"}
    logits = jax.jit(lambda t: nnx.merge(graphdef, params, rest)(t)[0])(jnp.asarray(ref["input_ids"]))
    assert goldens.error(logits, ref["logits"]) < 1e-4

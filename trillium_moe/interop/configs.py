"""config.json of released checkpoints, as a model config and back (model.md 1).

Fields that the architecture depends on are read and checked; those of generation defaults and of code to run
(`auto_map`) are not.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

from trillium_moe.config import (
    ConfigError,
    DtypeConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    VisionConfig,
    check,
)
from trillium_moe.interop.layout import K3, LIBRARY, LINEAR
from trillium_moe.interop.safetensors import read_json

# What only one value of is supported; a missing field counts as that value.
_ONLY = {
    "moe_router_activation_func": "sigmoid", "moe_renormalize": True, "num_expert_group": 1, "topk_group": 1,
    "moe_layer_freq": 1, "topk_method": "noaux_tc", "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
    "attention_bias": False, "rope_scaling": None,
}  # fmt: skip
_VISION_ONLY = {
    "pos_emb_type": "divided_fixed", "pos_emb_interpolation_mode": "bilinear", "norm_type": "rmsnorm",
    "mlp_type": "mlp2", "activation_func": "gelu_pytorch_tanh", "attn_bias": False, "linear_bias": False,
    "patch_embed_proj_bias": False, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-5,
}  # fmt: skip
MAX_LAYERS = 10_000  # they are counted one by one
MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
                    "scale_dtype": "torch.uint8", "dynamic": False},
        "input_activations": None,
    }},
    "ignore": [r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
               r"re:.*lm_head.*", r"re:.*vision_tower.*", r"re:.*mm_projector.*"],
}  # fmt: skip


class _Fields:
    """A JSON object whose fields are read with their type."""

    def __init__(self, where: str, values: Any):
        check(isinstance(values, dict), where, values, "must be an object")
        self.where, self.values = where, values

    def get(self, name: str, kind: type, default: Any = ...) -> Any:
        """The field; its default where it is missing or null."""
        value = self.values.get(name)
        if value is None:
            if default is ...:
                raise ConfigError(f"{self.where} {name} is missing; the config.json of the release has it")
            return default
        value = float(value) if kind is float and type(value) is int else value
        ok = type(value) is kind and (kind is not float or math.isfinite(value))
        check(ok, f"{self.where} {name}", value, f"must be of type {kind.__name__}")
        return value

    def size(self, name: str, default: Any = ..., most: int = (1 << 31) - 1) -> int:
        """A whole number of 0 or more, small enough for an array's dimension."""
        value = self.get(name, int, default)
        check(0 <= value <= most, f"{self.where} {name}", value, f"must be a size, at most {most}")
        return value

    def layers(self, name: str, n: int) -> tuple[int, ...] | None:
        """1-based layer numbers as 0-based ones."""
        value = self.get(name, list, None)
        if value is None:
            return None
        ok = all(type(i) is int and 1 <= i <= n for i in value) and len(set(value)) == len(value)
        check(ok, f"{self.where} {name}", value, f"must be different layers from 1 to {n}")
        return tuple(sorted(i - 1 for i in value))


def read_config(directory: Path, dtypes: DtypeConfig) -> ModelConfig:
    """The model config that a checkpoint's config.json describes (Kimi-K3 or Kimi-Linear).

    Raises:
      ConfigError: a field is missing, of a wrong type, or says something that the model cannot be.
    """
    path = Path(directory) / "config.json"
    raw = read_json(path)
    text = raw.get("text_config", raw)
    f = _Fields(str(path), text)
    kinds = (raw.get("model_type"), f.get("model_type", str))
    check(kinds in (("kimi_k3", "kimi_linear"), ("kimi_linear", "kimi_linear")), f"{path} model_type", kinds[0],
          "only Kimi-K3 and Kimi-Linear checkpoints are known")
    for fields, (key, only) in itertools.product((text, raw), _ONLY.items()):
        value = fields.get(key, only)
        # JSON's true is not 1
        check(value == only and type(value) is type(only), f"{path} {key}", value, f"only {only!r} is supported")
    for key in ("rope_scaling", "rope_parameters"):  # transformers 5 writes a dict where there is no scaling
        value = text.get(key)
        plain = value is None or isinstance(value, dict) and value.get("rope_type", "default") == "default"
        check(plain, f"{path} {key}", value, "scaled rotary embeddings are not supported")
    check_quantisation(path, text.get("quantization_config") or raw.get("quantization_config"))
    heads, n_layers = f.size("num_attention_heads"), f.size("num_hidden_layers", most=MAX_LAYERS)
    check(f.size("num_key_value_heads", heads) == heads, f"{path} num_key_value_heads", text.get("num_key_value_heads"),
          f"must equal num_attention_heads={heads}: latent attention has one key per head")
    linear = _Fields(f"{path} linear_attn_config", f.get("linear_attn_config", dict))
    bound, block = linear.get("gate_lower_bound", float, None), f.size("attn_res_block_size", 0)
    act = f.get("hidden_act", str)
    check(act in ("situ", "silu"), f"{path} hidden_act", act, "only situ and silu are supported")
    return ModelConfig(
        vocab_size=f.size("vocab_size"),
        d_model=f.size("hidden_size"),
        n_layers=n_layers,
        mla_layers=mla_layers(path, linear, n_layers, text.get("layer_types")),
        n_dense_layers=f.size("first_k_dense_replace"),
        ffn_dim=f.size("intermediate_size"),
        activation="situ" if act == "situ" else "swiglu",
        situ_beta=f.get("activation_situ_beta", float, 4.0),
        situ_linear_beta=f.get("activation_situ_linear_beta", float, 25.0),
        residual="block" if block else "none",
        block_size=block or 4,
        norm_eps=f.get("rms_norm_eps", float),
        init_std=f.get("initializer_range", float, 0.02),
        kda=KDAConfig(
            n_heads=linear.size("num_heads"),
            head_dim=linear.size("head_dim"),
            conv_size=linear.size("short_conv_kernel_size"),
            decay="softplus" if bound is None else "bounded",
            g_min=-5.0 if bound is None else bound,
            gate="full" if linear.get("use_full_rank_gate", bool, False) else "low_rank",
        ),
        mla=MLAConfig(
            n_heads=heads,
            q_lora_rank=f.size("q_lora_rank", 0),
            kv_lora_rank=f.size("kv_lora_rank"),
            nope_dim=f.size("qk_nope_head_dim"),
            rope_dim=f.size("qk_rope_head_dim"),
            v_dim=f.size("v_head_dim"),
            position="none" if f.get("mla_use_nope", bool) else "rope",
            rope_theta=f.get("rope_theta", float, 10000.0),
            gate="full" if f.get("mla_use_output_gate", bool, False) else "none",
        ),
        moe=MoEConfig(
            n_experts=f.size("num_experts"),
            k=f.size("num_experts_per_token" if "num_experts_per_token" in text else "num_experts_per_tok"),
            expert_dim=f.size("moe_intermediate_size"),
            latent_dim=f.size("routed_expert_hidden_size", 0),
            latent_norm=f.get("latent_moe_use_norm", bool, False),
            n_shared=f.size("num_shared_experts", 0),
            routed_scale=f.get("routed_scaling_factor", float),
        ),
        vision=VisionConfig() if raw.get("vision_config") is None else read_vision(path, raw, f.size("hidden_size")),
        dtypes=dtypes,
    )


def read_vision(path: Path, raw: dict[str, Any], d_model: int) -> VisionConfig:
    """The tower and the projector of Kimi-K3."""
    f = _Fields(f"{path} vision_config", raw["vision_config"])
    for key, only in _VISION_ONLY.items():
        value = f.values.get(key, only)
        check(value == only and type(value) is type(only), f"{f.where} {key}", value, f"only {only!r} is supported")
    heads, width, rows = f.size("vt_num_attention_heads"), f.size("vt_hidden_size"), f.size("init_pos_emb_height")
    inner = f.size("qkv_hidden_size", width)
    check(heads > 0 and inner % heads == 0, f"{f.where} qkv_hidden_size", inner, f"must be a multiple of {heads} heads")
    for key, want in (("init_pos_emb_width", rows), ("mm_hidden_size", width), ("text_hidden_size", d_model)):
        check(f.size(key, want) == want, f"{f.where} {key}", f.values.get(key), f"must be {want}")
    return VisionConfig(
        n_layers=f.size("vt_num_hidden_layers", most=MAX_LAYERS), d_model=width, n_heads=heads, head_dim=inner // heads,
        ffn_dim=f.size("vt_intermediate_size"), patch=f.size("patch_size"), grid=rows,
        frames=f.size("init_pos_emb_time"),
    )  # fmt: skip


def describe_vision(config: ModelConfig) -> dict[str, Any]:
    """vision_config of a model."""
    c = config.vision
    return _VISION_ONLY | {
        "patch_size": c.patch, "vt_hidden_size": c.d_model, "vt_intermediate_size": c.ffn_dim,
        "vt_num_hidden_layers": c.n_layers, "vt_num_attention_heads": c.n_heads,
        "qkv_hidden_size": c.n_heads * c.head_dim, "init_pos_emb_height": c.grid, "init_pos_emb_width": c.grid,
        "init_pos_emb_time": c.frames, "mm_hidden_size": c.d_model, "text_hidden_size": config.d_model,
    }  # fmt: skip


def mla_layers(path: Path, linear: _Fields, n_layers: int, layer_types: Any) -> tuple[int, ...]:
    """0-based MLA layers. All that config.json says about them must agree."""
    full, kda = linear.layers("full_attn_layers", n_layers), linear.layers("kda_layers", n_layers)
    check(full is not None, f"{path} linear_attn_config full_attn_layers", None, "must list the MLA layers")
    if kda is not None:
        both = sorted({*range(n_layers)} ^ {*full, *kda}) or sorted({*full} & {*kda})
        check(not both, f"{path} linear_attn_config kda_layers", [i + 1 for i in both][:8],
              "every layer must be in exactly one of kda_layers and full_attn_layers")
    if layer_types is not None:
        want = ["full_attention" if i in full else "linear_attention" for i in range(n_layers)]
        check(layer_types == want, f"{path} layer_types", layer_types, "does not fit full_attn_layers")
    return full or (-1,)


def check_quantisation(path: Path, found: Any) -> None:
    """Raises ConfigError for any quantisation but MXFP4 in groups of 32, whose tensors `weight_packed` tells."""
    if found is None:
        return
    f = _Fields(f"{path} quantization_config", found)
    check(f.get("format", str, "") == MXFP4["format"], f.where + " format", found.get("format"),
          f"only {MXFP4['format']!r} is supported")
    for name, group in f.get("config_groups", dict, {}).items():
        weights = _Fields(f"{f.where} {name}", group).get("weights", dict)
        size, bits = weights.get("group_size"), weights.get("num_bits")
        check((size, bits) == (32, 4), f"{f.where} {name}", (bits, size), "only 4 bits in groups of 32 are supported")


def naming_for(config: ModelConfig) -> str:
    """The released naming that holds the model: Kimi-Linear's where that architecture suffices."""
    plain = (config.residual == "none" and config.moe.latent_dim == 0 and config.activation == "swiglu"
             and config.mla.gate == "none" and config.kda.gate == "low_rank" and config.kda.decay == "softplus"
             and config.vision.n_layers == 0)
    return LINEAR if plain else K3


def describe(config: ModelConfig, naming: str, mxfp4: bool = False) -> dict[str, Any]:
    """config.json of a model.

    Raises:
      ConfigError: the architecture has no released form; the message names the fields.
    """
    k, m, e = config.kda, config.mla, config.moe
    full = [i + 1 for i, mixer in enumerate(config.mixers) if mixer == "mla"]
    linear: dict[str, Any] = {
        "num_heads": k.n_heads,
        "head_dim": k.head_dim,
        "short_conv_kernel_size": k.conv_size,
        "full_attn_layers": full,
        "kda_layers": [i + 1 for i in range(config.n_layers) if i + 1 not in full],
    }
    if k.decay == "bounded":
        linear["gate_lower_bound"] = k.g_min
    if k.gate == "full":
        linear["use_full_rank_gate"] = True
    text: dict[str, Any] = {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": m.n_heads,
        "num_key_value_heads": m.n_heads,
        "intermediate_size": config.ffn_dim,
        "first_k_dense_replace": config.n_dense_layers,
        "moe_intermediate_size": e.expert_dim,
        "num_experts": e.n_experts,
        "num_experts_per_token": e.k,
        "num_shared_experts": e.n_shared,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": e.routed_scale,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "hidden_act": "situ" if config.activation == "situ" else "silu",
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "q_lora_rank": m.q_lora_rank or None,
        "kv_lora_rank": m.kv_lora_rank,
        "qk_nope_head_dim": m.nope_dim,
        "qk_rope_head_dim": m.rope_dim,
        "v_head_dim": m.v_dim,
        "mla_use_nope": m.position == "none",
        "rope_theta": m.rope_theta,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "use_cache": True,
        # a missing one is a number past the vocabulary in the transformers library
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "dtype": "bfloat16",
        "linear_attn_config": linear,
    }
    if naming == K3:
        text |= {
            "routed_expert_hidden_size": e.latent_dim or None,
            "latent_moe_use_norm": e.latent_norm,
            "activation_situ_beta": config.situ_beta,
            "activation_situ_linear_beta": config.situ_linear_beta,
            "mla_use_output_gate": m.gate == "full",
            "attn_res_block_size": config.block_size if config.residual == "block" else None,
        }
    if naming == LIBRARY:
        text["layer_types"] = [("full" if mixer == "mla" else "linear") + "_attention" for mixer in config.mixers]
        text["mlp_layer_types"] = ["sparse" if ffn == "moe" else "dense" for ffn in config.ffns]
    if mxfp4:
        text["quantization_config"] = MXFP4
    if naming != K3:
        return text
    ids = {name: text.pop(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    whole = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16", **ids,
             "tie_word_embeddings": False, "text_config": text}
    return whole | ({"vision_config": describe_vision(config)} if config.vision.n_layers else {})


def merge(read: ModelConfig, given: ModelConfig) -> ModelConfig:
    """The architecture of `read`; how it is computed, trained and placed from `given`."""
    kept = ("scan_layers", "remat", "dtypes")
    moe = dataclasses.replace(given.moe, **{name: getattr(read.moe, name) for name in _MOE_KEPT})
    how = lambda c: {"implementation": c.implementation, "compute": c.compute}
    nested = {name: dataclasses.replace(getattr(read, name), **how(getattr(given, name))) for name in ("kda", "mla")}
    return dataclasses.replace(read, **nested, moe=moe, **{name: getattr(given, name) for name in kept})


# Fields of the model that say how it is computed, trained or placed, not what it is.
_FREE = {"kda_per_mla", "final_global", "mla_layers", "n_mtp", "mtp_weight", "scan_layers", "remat", "dtypes",
         "kda.compute", "kda.implementation", "mla.compute", "mla.implementation", "vision.pos_std"}
_MOE_KEPT = {"n_experts", "k", "expert_dim", "latent_dim", "latent_norm", "n_shared", "routed_scale"}


def check_expressible(config: ModelConfig, read: ModelConfig) -> None:
    """Raises ConfigError unless `read`, what config.json says of the model, is the architecture of `config`."""
    def fields(value: Any, prefix: str = "") -> dict[str, Any]:
        out = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if dataclasses.is_dataclass(item):
                out |= fields(item, f"{prefix}{field.name}.")
            else:
                out[prefix + field.name] = item
        return out

    mine, theirs = fields(config), fields(read)
    mine |= {f"kda.{n}": getattr(config.kda, n) or config.kda.head_dim for n in ("decay_rank", "gate_rank")}
    theirs |= {f"kda.{n}": config.kda.head_dim for n in ("decay_rank", "gate_rank")}
    unused = set()
    if config.residual == "none":
        unused.add("block_size")
    if config.activation != "situ":
        unused |= {"situ_beta", "situ_linear_beta"}
    if config.kda.decay != "bounded":
        unused.add("kda.g_min")
    if config.kda.gate != "low_rank":
        unused.add("kda.gate_rank")
    if not config.moe.latent_dim:
        unused.add("moe.latent_norm")
    if not config.vision.n_layers:
        unused |= {name for name in mine if name.startswith("vision.")}
    lost = [name for name, value in mine.items() if theirs[name] != value and name not in _FREE | unused
            and not name.startswith("dtypes.") and (not name.startswith("moe.") or name[4:] in _MOE_KEPT)]
    check(not lost, f"model.{lost[0] if lost else ''}", mine[lost[0]] if lost else "",
          f"no released checkpoint layout holds this ({', '.join(lost)})")
    check(config.mixers == read.mixers, "model.mla_layers", config.mla_layers, "config.json lost the order of layers")

"""Released Hugging Face checkpoints of the family, as a config and parameters (model.md 1, 8).

Linear weights are stored [out, in] and become [in, out] with the head axes apart. Every tensor of the checkpoint must
be used and every parameter of the model filled; `load` lists whatever is missing, unexpected or of a wrong shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes  # noqa: F401  teaches numpy bfloat16
import numpy as np
from flax import nnx
from safetensors import safe_open

from trillium_moe.config import ConfigError, DtypeConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, check
from trillium_moe.interop import mxfp4
from trillium_moe.model.trillium import Trillium


def read_config(directory: Path, dtypes: DtypeConfig) -> ModelConfig:
    """The model config a checkpoint's config.json describes (Kimi-K3 text tower or Kimi-Linear)."""
    raw = json.loads((directory / "config.json").read_text())
    text = raw.get("text_config", raw)
    check(text.get("model_type") == "kimi_linear", f"{directory}/config.json model_type", text.get("model_type"),
          "only Kimi-K3 and Kimi-Linear checkpoints are known")
    for key, only in (("moe_router_activation_func", "sigmoid"), ("moe_renormalize", True), ("num_expert_group", 1),
                      ("moe_layer_freq", 1), ("tie_word_embeddings", False)):
        value = text.get(key, only)
        check(value == only, f"{directory}/config.json {key}", value, f"only {only!r} is supported")
    linear = text["linear_attn_config"]
    bound = linear.get("gate_lower_bound")
    block = text.get("attn_res_block_size") or 0
    return ModelConfig(
        vocab_size=text["vocab_size"],
        d_model=text["hidden_size"],
        n_layers=text["num_hidden_layers"],
        mla_layers=tuple(i - 1 for i in linear["full_attn_layers"]),
        n_dense_layers=text["first_k_dense_replace"],
        ffn_dim=text["intermediate_size"],
        activation="situ" if text["hidden_act"] == "situ" else "swiglu",
        situ_beta=float(text.get("activation_situ_beta", 4.0)),
        situ_linear_beta=float(text.get("activation_situ_linear_beta", 25.0)),
        residual="block" if block else "none",
        block_size=block or 4,
        norm_eps=text["rms_norm_eps"],
        init_std=text.get("initializer_range", 0.02),
        kda=KDAConfig(
            n_heads=linear["num_heads"],
            head_dim=linear["head_dim"],
            conv_size=linear["short_conv_kernel_size"],
            decay="softplus" if bound is None else "bounded",
            g_min=-5.0 if bound is None else float(bound),
            gate="full" if linear.get("use_full_rank_gate") else "low_rank",
        ),
        mla=MLAConfig(
            n_heads=text["num_attention_heads"],
            q_lora_rank=text["q_lora_rank"] or 0,
            kv_lora_rank=text["kv_lora_rank"],
            nope_dim=text["qk_nope_head_dim"],
            rope_dim=text["qk_rope_head_dim"],
            v_dim=text["v_head_dim"],
            position="none" if text["mla_use_nope"] else "rope",
            rope_theta=float(text.get("rope_theta") or 10000.0),
            gate="full" if text.get("mla_use_output_gate") else "none",
        ),
        moe=MoEConfig(
            n_experts=text["num_experts"],
            k=text.get("num_experts_per_token") or text["num_experts_per_tok"],
            expert_dim=text["moe_intermediate_size"],
            latent_dim=text.get("routed_expert_hidden_size") or 0,
            latent_norm=bool(text.get("latent_moe_use_norm", False)),
            n_shared=text["num_shared_experts"],
            routed_scale=float(text["routed_scaling_factor"]),
        ),
        dtypes=dtypes,
    )


class Tensors:
    """Lazy reader over the safetensors files of a directory; remembers what was taken."""

    def __init__(self, directory: Path):
        self.where = {}
        for path in self.files(directory):
            file = safe_open(path, framework="np")
            self.where.update(dict.fromkeys(file.keys(), file))
        self.left, self.missing = set(self.where), []

    @staticmethod
    def files(directory: Path) -> list[Path]:
        """The checkpoint's files: those of its index, or model.safetensors. Other files may lie beside them."""
        index = directory / "model.safetensors.index.json"
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = ["model.safetensors"]
        absent = [name for name in names if not (directory / name).exists()]
        if absent:
            raise ConfigError(f"{directory}: {', '.join(absent)} missing; name the directory of a complete checkpoint")
        return [directory / name for name in names]

    def __contains__(self, name: str) -> bool:
        return name in self.where

    def take(self, name: str) -> np.ndarray | None:
        """A tensor, as it is stored; None (and noted) where it is missing."""
        if name not in self.where:
            self.missing.append(name)
            return None
        self.left.discard(name)
        return self.where[name].get_tensor(name)

    def weight(self, name: str) -> np.ndarray | None:
        """A linear weight [out, in]; MXFP4 where the file holds `weight_packed`."""
        if f"{name}_packed" in self.where:
            return mxfp4.unpack(self.take(f"{name}_packed"), self.take(f"{name}_scale"))
        return self.take(name)


# A rule fills one parameter of a layer: (name below the layer, shape of the parameter) -> how to get it from the file.
Rule = tuple[str, Callable[[np.ndarray, tuple[int, ...]], np.ndarray]]


def _as_is(x, shape):
    return x.reshape(shape)


def _linear(x, shape):
    """[out, in] -> [in, out], heads split from out (or from in, for output projections)."""
    return x.T.reshape(shape)


def _a_log(x, shape):
    """One value per head. K3 stores head_dim of them; those past the heads are zeros nobody reads."""
    x = x.reshape(-1)
    if np.any(x[shape[0] :]):
        raise ConfigError(f"A_log: {x.size} values for {shape[0]} heads, and the tail is not zero; not a known layout")
    return x[: shape[0]]


_KDA: dict[str, Rule] = {
    "q": ("self_attn.q_proj.weight", _linear),
    "k": ("self_attn.k_proj.weight", _linear),
    "v": ("self_attn.v_proj.weight", _linear),
    "q_conv": ("self_attn.q_conv1d.weight", _as_is),
    "k_conv": ("self_attn.k_conv1d.weight", _as_is),
    "v_conv": ("self_attn.v_conv1d.weight", _as_is),
    "decay_down": ("self_attn.f_a_proj.weight", _linear),
    "decay_up": ("self_attn.f_b_proj.weight", _linear),
    "a_log": ("self_attn.A_log", _a_log),
    "dt_bias": ("self_attn.dt_bias", _as_is),
    "beta": ("self_attn.b_proj.weight", _linear),
    "gate": ("self_attn.g_proj.weight", _linear),
    "gate_down": ("self_attn.g_a_proj.weight", _linear),
    "gate_up": ("self_attn.g_b_proj.weight", _linear),
    "out_norm": ("self_attn.o_norm.weight", _as_is),
    "out": ("self_attn.o_proj.weight", _linear),
}
_MLA: dict[str, Rule] = {
    "q_down": ("self_attn.q_a_proj.weight", _linear),
    "q_norm": ("self_attn.q_a_layernorm.weight", _as_is),
    "q_up": ("self_attn.q_b_proj.weight", _linear),
    "q": ("self_attn.q_proj.weight", _linear),
    "kv_down": ("self_attn.kv_a_proj_with_mqa.weight", _linear),
    "kv_norm": ("self_attn.kv_a_layernorm.weight", _as_is),
    "gate": ("self_attn.g_proj.weight", _linear),
    "out": ("self_attn.o_proj.weight", _linear),
}
_DENSE: dict[str, Rule] = {name: (f"mlp.{name}_proj.weight", _linear) for name in ("gate", "up", "down")}
_MOE: dict[str, Rule] = {
    "router": ("block_sparse_moe.gate.weight", _linear),
    "bias": ("block_sparse_moe.gate.e_score_correction_bias", _as_is),
    "down": ("block_sparse_moe.routed_expert_down_proj.weight", _linear),
    "norm": ("block_sparse_moe.routed_expert_norm.weight", _as_is),
    "up": ("block_sparse_moe.routed_expert_up_proj.weight", _linear),
    **{f"shared.{n}": (f"block_sparse_moe.shared_experts.{n}_proj.weight", _linear) for n in ("gate", "up", "down")},
}
_EXPERT = {"w_gate": "w1", "w_up": "w3", "w_down": "w2"}


def layer_parameter(tensors: Tensors, prefix: str, kind: str, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
    """One layer's parameter `name` of the given shape, read from below `prefix`; None if a tensor is missing."""
    if name in _EXPERT:
        path = f"{prefix}block_sparse_moe.experts.{{}}.{_EXPERT[name]}.weight"
        parts = [tensors.weight(path.format(e)) for e in range(shape[0])]
        return None if any(p is None for p in parts) else np.stack([p.T for p in parts])
    if name in ("k_up", "v_up"):
        # rows of kv_b are head-major, each head [key | value]; both parameters read the same tensor
        both = tensors.take(f"{prefix}self_attn.kv_b_proj.weight")
        if both is None:
            return None
        both = both.T.reshape(shape[0], shape[1], -1)
        return both[..., : shape[2]] if name == "k_up" else both[..., -shape[2] :]
    tensor, rule = {"kda": _KDA, "mla": _MLA, "dense": _DENSE, "moe": _MOE}[kind][name]
    value = tensors.weight(prefix + tensor) if rule is _linear else tensors.take(prefix + tensor)
    return None if value is None else rule(value, shape)


def _sublayers(config: ModelConfig) -> list[str]:
    """Kind of every sublayer."""
    return [kind for pair in zip(config.mixers, config.ffns) for kind in pair]


def _all(parts: list[np.ndarray | None]) -> np.ndarray | None:
    """Stacked parts; None if one is missing."""
    return None if any(p is None for p in parts) else np.stack(parts)


def parameter(
    tensors: Tensors, config: ModelConfig, path: tuple[str, ...], shape: tuple[int, ...]
) -> np.ndarray | None:
    """The model's variable at `path`, read from the checkpoint; None if a tensor is missing."""
    top = "language_model." if "language_model.lm_head.weight" in tensors else ""
    below = f"{top}model."

    def per_sublayer(mixer, ffn, *last):
        names = [f"layers.{s // 2}.{ffn if s % 2 else mixer}.weight" for s in range(2 * config.n_layers)]
        parts = [tensors.take(below + n) for n in (*names, *last)]
        return _all([p if p is None else p.reshape(-1) for p in parts])

    match path:
        case ("embed",):
            return tensors.take(f"{below}embed_tokens.weight")
        case ("head",):
            return _transposed(tensors.take(f"{top}lm_head.weight"))
        case ("norm",):
            return tensors.take(f"{below}norm.weight")
        case ("sublayer_norm",):
            return per_sublayer("input_layernorm", "post_attention_layernorm")
        case ("read_norm" | "read_query",):
            part = "norm" if path == ("read_norm",) else "proj"
            last = f"output_attn_res_{part}.weight"
            return per_sublayer(f"self_attention_res_{part}", f"mlp_res_{part}", last)
    kind, name = path[0], ".".join(path[1:])
    layers = [s // 2 for s, k in enumerate(_sublayers(config)) if k == kind]
    return _all([layer_parameter(tensors, f"{below}layers.{i}.", kind, name, shape[1:]) for i in layers])


def _transposed(x: np.ndarray | None) -> np.ndarray | None:
    return None if x is None else x.T


def load(directory: str | Path, dtypes: DtypeConfig) -> tuple[ModelConfig, Trillium]:
    """Reads a checkpoint directory into a config and a model.

    Raises:
      ConfigError: unknown architecture, or tensors missing, unexpected or of a wrong shape, all of them listed.
    """
    directory = Path(directory)
    if not (directory / "config.json").exists():
        raise ConfigError(f"{directory}: no config.json; name the directory of a released checkpoint")
    config = read_config(directory, dtypes)
    tensors = Tensors(directory)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Trillium(config, rngs=nnx.Rngs(params=0))))
    problems, filled = [], []
    for path, variable in nnx.to_flat_state(state):
        try:
            value = parameter(tensors, config, path, variable.shape)
            if value is not None and value.shape != variable.shape:
                raise ValueError(f"shape {value.shape} instead of {variable.shape}")
        except ValueError as error:
            problems.append(f"{'.'.join(path)}: {error}")
            continue
        if value is not None:
            filled.append((path, variable.replace(jnp.asarray(value, variable.dtype))))
    unread = {n for n in tensors.left if not n.startswith(("vision_tower.", "mm_projector."))}
    problems += [f"missing {n}" for n in dict.fromkeys(tensors.missing)] + [f"unexpected {n}" for n in sorted(unread)]
    if problems:
        shown = "; ".join(problems[:20]) + (f"; and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise ConfigError(f"{directory}: the tensors do not fit the config: {shown}")
    return config, nnx.merge(graphdef, nnx.from_flat_state(filled))

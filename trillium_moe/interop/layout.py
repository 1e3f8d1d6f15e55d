"""Which tensor of a released checkpoint holds which piece of which parameter (model.md 8). One table, read both ways.

A stored tensor, reshaped and cut, is one layer's (or one expert's) piece of a parameter up to the order of its axes:

    parameter[at] = stored.reshape(view)[take].transpose(perm)

Linear weights are stored [out, in] and kept [in, out] with the head axes apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flax import nnx

from trillium_moe.config import ModelConfig
from trillium_moe.model.params import RouterBias
from trillium_moe.model.stack import Schedule
from trillium_moe.train.state import model_def

K3, LINEAR, LIBRARY = "kimi_k3", "kimi_linear", "transformers"
NAMINGS = {
    K3: "Kimi-K3 as released",
    LINEAR: "Kimi-Linear as released",
    LIBRARY: "Kimi-Linear in the transformers library",
}

Path = tuple[str, ...]


class Part(NamedTuple):
    """A piece of one parameter in a stored tensor; see the module's formula."""

    path: Path
    at: tuple[int, ...]  # layer, expert: index into the parameter's leading axes
    view: tuple[int, ...]
    take: tuple[slice, ...]
    perm: tuple[int, ...]


class Stored(NamedTuple):
    """One tensor of a checkpoint, and where it goes."""

    name: str
    shapes: tuple[tuple[int, ...], ...]  # those that occur; the first is written
    dtype: str  # as released; a BF16 one may be F32 and the other way round
    parts: tuple[Part, ...]
    routed: bool = False  # a routed expert's matrix, which may be MXFP4


@dataclass(frozen=True)
class Parameter:
    """A variable of the model."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    n_in: int
    bias: bool  # a RouterBias


def parameters(config: ModelConfig) -> dict[Path, Parameter]:
    """Every variable of the model by path; nothing is allocated."""
    _, params, bias = model_def(config)
    found = {}
    for state in (params, bias):
        for path, variable in nnx.to_flat_state(state):
            meta = variable.get_metadata()
            found[path] = Parameter(variable.shape, variable.dtype.name, meta["axes"], meta.get("n_in", 1),
                                    isinstance(variable, RouterBias))
    return found


# below a layer: parameter -> (tensor in the released namings, in the library where it differs)
_KDA = {
    "q": "q_proj.weight",
    "k": "k_proj.weight",
    "v": "v_proj.weight",
    "decay_down": ("f_a_proj.weight", "forget_gate.f_a_proj.weight"),
    "decay_up": ("f_b_proj.weight", "forget_gate.f_b_proj.weight"),
    "a_log": ("A_log", "forget_gate.A_log"),
    "dt_bias": ("dt_bias", "forget_gate.dt_bias"),
    "q_conv": "q_conv1d.weight",
    "k_conv": "k_conv1d.weight",
    "v_conv": "v_conv1d.weight",
    "beta": "b_proj.weight",
    "gate": "g_proj.weight",
    "gate_down": "g_a_proj.weight",
    "gate_up": "g_b_proj.weight",
    "out_norm": "o_norm.weight",
    "out": "o_proj.weight",
}
_MLA = {
    "q_down": "q_a_proj.weight",
    "q_norm": "q_a_layernorm.weight",
    "q_up": "q_b_proj.weight",
    "q": "q_proj.weight",
    "kv_down": "kv_a_proj_with_mqa.weight",
    "kv_norm": "kv_a_layernorm.weight",
    "gate": "g_proj.weight",
    "out": "o_proj.weight",
}
_MOE = {
    "router": "gate.weight",
    "bias": "gate.e_score_correction_bias",
    "down": "routed_expert_down_proj.weight",
    "norm": "routed_expert_norm.weight",
    "up": "routed_expert_up_proj.weight",
}
_EXPERT = {"w_gate": "w1", "w_down": "w2", "w_up": "w3"}
_FLOAT32 = {"a_log", "dt_bias", "q_conv", "k_conv", "v_conv", "bias"}  # stored dtype


def tensors(config: ModelConfig, naming: str) -> Iterator[Stored]:
    """Every tensor of the checkpoint of a model, embedding first, then layer by layer.

    Multi-token prediction has no tensors: releases are without it.
    """
    known = parameters(config)
    top = "language_model." if naming == K3 else ""
    below = f"{top}model."
    schedule = Schedule.of(config)
    kinds = [schedule.kinds[k] for k in schedule.kind]
    layer = lambda i: f"{below}layers.{i}."

    def one(name, path, at=(), dtype="BF16", linear=False, shape=None):
        p = known[path]
        part = Part(path, at, *(_linear(p.shape[len(at):], p.n_in) if linear else _as_is(p.shape[len(at):])))
        return Stored(name, (shape or _merged(part.view, p.shape[len(at):], p.n_in if linear else 0),), dtype, (part,))

    yield one(f"{below}embed_tokens.weight", ("embed",))
    for s in range(schedule.n_sublayers):
        i, kind, index = s // 2, kinds[s], schedule.index[s]
        norm = ("input_layernorm", "post_attention_layernorm")[s % 2]
        yield one(f"{layer(i)}{norm}.weight", ("sublayer_norm",), (s,))
        if schedule.reads:
            yield from _read(one, layer(i) + ("self_attention_res", "mlp_res")[s % 2], s, config.d_model)
        yield from {"kda": _kda, "mla": _mla, "dense": _dense, "moe": _moe}[kind](
            known, one, layer(i), index, naming, config)
    if schedule.reads:
        yield from _read(one, f"{below}output_attn_res", schedule.n_sublayers, config.d_model)
    yield one(f"{below}norm.weight", ("norm",))
    yield one(f"{top}lm_head.weight", ("head",), linear=True)
    if config.vision.n_layers:
        yield from _vision(one, config)


def _read(one, name, s, width):
    yield one(f"{name}_norm.weight", ("read_norm",), (s,))
    yield one(f"{name}_proj.weight", ("read_query",), (s,), shape=(1, width))


def _kda(known, one, layer, index, naming, config):
    own = {path[1]: p for path, p in known.items() if path[0] == "kda"}
    heads, K = config.kda.n_heads, config.kda.head_dim
    for name, tensor in _KDA.items():
        if name not in own or (name.endswith("_conv") and naming == LIBRARY):
            continue
        tensor = tensor if isinstance(tensor, str) else tensor[naming == LIBRARY]
        dtype = "F32" if name in _FLOAT32 or (name == "out_norm" and naming == K3) else "BF16"
        stored = one(f"{layer}self_attn.{tensor}", ("kda", name), (index,), dtype, linear=len(own[name].axes) > 2
                     and name not in ("dt_bias", "q_conv", "k_conv", "v_conv"))
        if name == "a_log":
            # K3 keeps head_dim numbers, those past the heads zero (model.md 9.1); Kimi-Linear [1, 1, H, 1]
            shapes = ((max(K, heads),), (heads,), (1, 1, heads, 1))
            part = Part(("kda", name), (index,), (-1,), (slice(0, heads),), (0,))
            stored = stored._replace(shapes=shapes if naming == K3 else shapes[::-1], parts=(part,))
        elif name == "dt_bias":
            stored = stored._replace(shapes=((heads * K,),))
        elif name.endswith("_conv"):
            stored = stored._replace(shapes=((heads * K, 1, config.kda.conv_size),))
        yield stored
    if naming == LIBRARY and "q_conv" in own:  # one depthwise convolution over q, k and v
        taps = config.kda.conv_size
        parts = tuple(Part(("kda", f"{x}_conv"), (index,), (3 * heads, K, taps), (slice(i * heads, (i + 1) * heads),),
                           (0, 1, 2)) for i, x in enumerate("qkv"))
        yield Stored(f"{layer}self_attn.conv1d.weight", ((3 * heads * K, 1, taps),), "F32", parts)


def _mla(known, one, layer, index, naming, config):
    c = config.mla
    for name, tensor in _MLA.items():
        path = ("mla", name)
        if path in known:
            yield one(f"{layer}self_attn.{tensor}", path, (index,), linear=not name.endswith("norm"))
    # rows of kv_b are head-major, each head [key | value]
    view = (c.n_heads, c.nope_dim + c.v_dim, c.kv_lora_rank)
    cuts = {"k_up": slice(0, c.nope_dim), "v_up": slice(c.nope_dim, c.nope_dim + c.v_dim)}
    parts = tuple(Part(("mla", n), (index,), view, (slice(None), cut), (2, 0, 1)) for n, cut in cuts.items())
    yield Stored(f"{layer}self_attn.kv_b_proj.weight", ((view[0] * view[1], view[2]),), "BF16", parts)


def _dense(known, one, layer, index, naming, config):
    for name in ("gate", "up", "down"):
        yield one(f"{layer}mlp.{name}_proj.weight", ("dense", name), (index,), linear=True)


def _moe(known, one, layer, index, naming, config):
    block = f"{layer}{'mlp' if naming == LIBRARY else 'block_sparse_moe'}."
    c, E, width = config.moe, config.moe.n_experts, config.expert_width
    for name, tensor in _MOE.items():
        if ("moe", name) in known:
            yield one(block + tensor, ("moe", name), (index,), "F32" if name == "bias" else "BF16",
                      linear=name not in ("bias", "norm"))
    for name in ("gate", "up", "down"):
        if ("moe", "shared", name) in known:
            yield one(f"{block}shared_experts.{name}_proj.weight", ("moe", "shared", name), (index,), linear=True)
    if naming == LIBRARY:  # all experts in one tensor, gate and up one after the other
        whole = lambda name, view, take: Part(("moe", name), (index,), view, take, (0, len(view) - 1, len(view) - 2))
        both = (E, 2 * c.expert_dim, width)
        cut = lambda i: (slice(None), slice(i * c.expert_dim, (i + 1) * c.expert_dim))
        parts = whole("w_gate", both, cut(0)), whole("w_up", both, cut(1))
        yield Stored(f"{block}experts.gate_up_proj", (both,), "BF16", parts)
        down = (E, width, c.expert_dim)
        yield Stored(f"{block}experts.down_proj", (down,), "BF16", (whole("w_down", down, ()),))
        return
    for e in range(E):
        for name, tensor in _EXPERT.items():
            view = (width, c.expert_dim) if name == "w_down" else (c.expert_dim, width)
            part = Part(("moe", name), (index, e), view, (), (1, 0))
            yield Stored(f"{block}experts.{e}.{tensor}.weight", (view,), "BF16", (part,), routed=True)


def _vision(one, config):
    c = config.vision
    yield one("vision_tower.patch_embed.proj.weight", ("vision", "patch_embed"), linear=True,
              shape=(c.d_model, 3, c.patch, c.patch))
    yield one("vision_tower.patch_embed.pos_emb.weight", ("vision", "pos_emb"))
    for i in range(c.n_layers):
        block = f"vision_tower.encoder.blocks.{i}."
        for name in ("norm0", "norm1"):
            yield one(f"{block}{name}.weight", ("vision", "blocks", name), (i,))
        view, H = (3 * c.n_heads, c.head_dim, c.d_model), c.n_heads
        parts = tuple(Part(("vision", "blocks", name), (i,), view, (slice(n * H, (n + 1) * H),), (2, 0, 1))
                      for n, name in enumerate(("wq", "wk", "wv")))
        yield Stored(f"{block}wqkv.weight", ((view[0] * view[1], view[2]),), "BF16", parts)
        for name, tensor in (("wo", "wo"), ("fc0", "mlp.fc0"), ("fc1", "mlp.fc1")):
            yield one(f"{block}{tensor}.weight", ("vision", "blocks", name), (i,), linear=True)
    yield one("vision_tower.encoder.final_layernorm.weight", ("vision", "final_norm"))
    for name, tensor in (("fc0", "proj.0"), ("fc2", "proj.2")):
        yield one(f"mm_projector.{tensor}.weight", ("vision", "projector", name), linear=True)
    yield one("mm_projector.post_norm.weight", ("vision", "projector", "post_norm"))


def _linear(shape, n_in):
    """view, take, perm of [in.., out..] stored as [out, in]."""
    n, n_out = len(shape), len(shape) - n_in
    return (*shape[n_in:], *shape[:n_in]), (), (*range(n_out, n), *range(n_out))


def _as_is(shape):
    return shape, (), tuple(range(len(shape)))


def _merged(view, shape, n_in):
    """The stored shape of a view: a matrix [out, in] for a linear weight."""
    if not n_in:
        return view
    n_out = len(shape) - n_in
    return math.prod(view[:n_out]), math.prod(view[n_out:])


def naming_of(names: Iterable[str]) -> str:
    """The naming that tensor names follow."""
    names = set(names)
    if any(n.startswith("language_model.") for n in names):
        return K3
    library = (".self_attn.forget_gate.", ".self_attn.conv1d.", ".mlp.experts.", ".mlp.gate.")
    return LIBRARY if any(mark in n for n in names for mark in library) else LINEAR

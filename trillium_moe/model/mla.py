"""Gated multi-head latent attention, without positions by default (model.md 2.4)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trillium_moe.config import ModelConfig
from trillium_moe.model.context import Context
from trillium_moe.model.norms import rms_norm
from trillium_moe.model.params import linear, normal, ones, param, wide
from trillium_moe.parallel.context import latent_attention
from trillium_moe.shapes import Array, Float, Int

LORA_EPS = 1e-6  # the released model builds its two latent norms with this default, not with rms_norm_eps


def positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Index of each token inside its own document."""
    t = jnp.arange(segment_ids.shape[1])
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return t - jax.lax.cummax(jnp.where(starts, t, 0), axis=1)


def rotate(x_BTHK: Float[Array, "B T H K"], position_BT: Int[Array, "B T"], theta: float) -> Float[Array, "B T H K"]:
    """Rotary embedding: channels (i, i + K/2) turn by position * theta^(-2i/K)."""
    half = x_BTHK.shape[-1] // 2
    angle = wide(position_BT.astype(jnp.float32))[..., None, None] * theta ** (-jnp.arange(half) / half)
    a, b = jnp.split(wide(x_BTHK), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHK.dtype)


class MLA(nnx.Module):
    """One MLA mixer. The cached state of a token is kv_lora_rank + rope_dim numbers."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, D, self.config = config.mla, config.d_model, config
        H, R, qk_dim = c.n_heads, c.kv_lora_rank, c.nope_dim + c.rope_dim
        dtype, init = config.dtypes.param, normal(config.init_std)
        weight = lambda shape, axes, **kw: param(rngs, shape, axes, dtype, init, **{"muon": "whole", **kw})
        if c.q_lora_rank:
            self.q_down = weight((D, c.q_lora_rank), ("embed", "rank"))
            self.q_norm = param(rngs, (c.q_lora_rank,), ("rank",), dtype, ones)
            self.q_up = weight((c.q_lora_rank, H, qk_dim), ("rank", "heads", "head_dim"), muon="head")
        else:
            self.q = weight((D, H, qk_dim), ("embed", "heads", "head_dim"), muon="head")
        self.kv_down = weight((D, R + c.rope_dim), ("embed", "rank"))
        self.kv_norm = param(rngs, (R,), ("rank",), dtype, ones)
        self.k_up = weight((R, H, c.nope_dim), ("rank", "heads", "head_dim"), muon="head")
        self.v_up = weight((R, H, c.v_dim), ("rank", "heads", "head_dim"), muon="head")
        if c.gate == "full":
            self.gate = weight((D, H, c.v_dim), ("embed", "heads", "head_dim"))
        self.out = weight((H, c.v_dim, D), ("heads", "head_dim", "embed"), n_in=2)

    def __call__(self, x_BTD: Float[Array, "B T D"], ctx: Context) -> tuple[Float[Array, "B T D"], dict]:
        c, R = self.config.mla, self.config.mla.kv_lora_rank
        heads = lambda x, w: jnp.einsum("btr,rhk->bthk", x, w.astype(x.dtype))
        if c.q_lora_rank:
            q_latent = rms_norm(linear(x_BTD, self.q_down), self.q_norm[...], LORA_EPS)
            q = heads(q_latent, self.q_up)
        else:
            q = heads(x_BTD, self.q)
        latent, k_rope = jnp.split(linear(x_BTD, self.kv_down), [R], axis=-1)
        latent = rms_norm(latent, self.kv_norm[...], LORA_EPS)
        if c.position == "rope":
            ids = jnp.zeros(x_BTD.shape[:2], jnp.int32) if ctx.segment_ids is None else ctx.segment_ids
            at = positions(ids)
            q_nope, q_rope = jnp.split(q, [c.nope_dim], axis=-1)
            q = jnp.concatenate([q_nope, rotate(q_rope, at, c.rope_theta)], axis=-1)
            k_rope = rotate(k_rope[:, :, None], at, c.rope_theta)[:, :, 0]
        # k_rope: one key part, shared by all heads and not normed
        o, max_logit = latent_attention(
            q, latent, k_rope, self.k_up.astype(q.dtype), self.v_up.astype(q.dtype),
            scale=(c.nope_dim + c.rope_dim) ** -0.5, segment_ids=ctx.segment_ids,
            implementation=c.implementation or None,
        )  # fmt: skip
        if c.gate == "full":
            o = o * jax.nn.sigmoid(wide(heads(x_BTD, self.gate)))
        o = o.astype(x_BTD.dtype)
        return jnp.einsum("bthv,hvd->btd", o, self.out.astype(o.dtype)), {"max_logit": max_logit}

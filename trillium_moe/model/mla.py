"""Gated multi-head latent attention, without positions by default (model.md 2.4)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import few_rows
from pallas_kernels.attention.cached import cached_attention
from pallas_kernels.attention.gpu_decode import latent_decode
from pallas_kernels.dispatch import dispatch
from trillium_moe.config import ModelConfig
from trillium_moe.model.cache import Latents
from trillium_moe.model.context import Context
from trillium_moe.model.norms import rms_norm
from trillium_moe.model.params import linear, normal, ones, param, wide
from trillium_moe.parallel.context import latent_attention
from trillium_moe.shapes import Array, Float, Int

FEW_TOKENS = 2  # of a sequence, that are decoded one after the other: a step, and one with a proposed token
LORA_EPS = 1e-6  # the released model builds its two latent norms with this default, not with rms_norm_eps


def positions(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Index of each token inside its own document."""
    t = jnp.arange(segment_ids.shape[1])
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return t - jax.lax.cummax(jnp.where(starts, t, 0), axis=1)


def put_rows(
    past_BCX: Float[Array, "B C X"], new_BTX: Float[Array, "B T X"], start_B: Int[Array, " B"]
) -> Float[Array, "B C X"]:
    """What is kept of sequences with T tokens put in from position `start` on."""
    put = lambda past_CX, new_TX, start: jax.lax.dynamic_update_slice(past_CX, new_TX, (start, 0))
    return jax.vmap(put)(past_BCX, new_BTX, start_B)


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

    def __call__(
        self, x_BTD: Float[Array, "B T D"], ctx: Context, past: Float[Array, "B C X"] | None = None
    ) -> tuple[Float[Array, "B T D"], dict]:
        """The mixer, and the largest logits; of rows that continue a sequence (past: what is kept of its tokens, with
        room for these), what is kept of the new tokens, `past` [B, T, X], instead."""
        c = self.config.mla
        at = None
        if c.position == "rope":
            ids = jnp.zeros(x_BTD.shape[:2], jnp.int32) if ctx.segment_ids is None else ctx.segment_ids
            at = positions(ids) if ctx.start is None else ctx.start[:, None] + jnp.arange(x_BTD.shape[1])
        ups = self.k_up.astype(x_BTD.dtype), self.v_up.astype(x_BTD.dtype)
        kept = self.latents(x_BTD, at)
        if past is not None:
            new = jnp.concatenate(kept, axis=-1)
            kept = jnp.split(put_rows(past, new, ctx.start), [c.kv_lora_rank], axis=-1)
        o, max_logit = latent_attention(
            *map(self._inside, (self.queries(x_BTD, at), *kept, *ups)), scale=self.scale,
            segment_ids=ctx.segment_ids, start=ctx.start, implementation=c.implementation or None,
        )  # fmt: skip
        y = self.output(o, self.gate_logits(x_BTD), x_BTD.dtype)
        return y, {"max_logit": max_logit} if past is None else {"past": new}

    def extend(
        self, x_BTD: Float[Array, "B T D"], n_B: Int[Array, " B"], past: Latents, rows: Array | None, length_B: Array
    ) -> tuple[Float[Array, "B T D"], Latents]:
        """Continues sequences by the first n tokens of each row; see `trillium_moe.infer.forward.extend`."""
        B, T, _ = x_BTD.shape
        R = self.config.mla.kv_lora_rank
        at = length_B[:, None] + jnp.arange(T)
        q, kv, gate = self._projections(x_BTD, at)

        def token_by_token():
            norm, ups = (self.kv_norm[...], LORA_EPS), (self.packed_k_up[...], self.packed_v_up[...])
            out, values = [], past.values
            for t in range(T):
                token = lambda x, t=t: None if x is None else x[:, t]
                here = length_B + t if t else length_B  # adding a zero would be a kernel
                there = (t < n_B).astype(jnp.int32)
                o, values = latent_decode(
                    token(q), token(kv), *norm, values, here, there, *ups, token(gate), self.scale
                )
                out.append(o)
            return self.project(jnp.stack(out, axis=1)), Latents(values)

        def any_tokens():
            new = jnp.concatenate(self._normed(kv), axis=-1)
            # a token that is not there gets a position of its own past the end, where writing does nothing
            place = jnp.where(jnp.arange(T) < n_B[:, None], at, past.values.shape[1] + jnp.arange(T))
            written = past.write(rows, place, new, R)
            o = cached_attention(
                self._inside(q), at, lambda start, size: self._inside(written.read(rows, start, size, q.dtype, R)),
                past.values.shape[1], (length_B + n_B).max(), *(self._inside(w.astype(q.dtype)) for w in self._ups),
                scale=self.scale,
            )  # fmt: skip
            return self.output(o, gate, x_BTD.dtype), written

        ways = {"xla": any_tokens}
        kernel = not self.config.mla.compute and past.scale is None
        if kernel and T <= FEW_TOKENS and rows is None and hasattr(self, "inner"):
            ways["pallas_gpu"] = token_by_token
        return dispatch("attention over latents", ways, None)

    def pack(self) -> None:
        """For generation on one device: one matrix for all that multiplies x (`pallas_kernels.few_rows`)."""
        c, D, dtype = self.config.mla, self.config.d_model, self.config.dtypes.compute
        flat = lambda name: getattr(self, name)[...].reshape(getattr(self, name).shape[0], -1)
        names = ["q_down" if c.q_lora_rank else "q", "kv_down", *(["gate"] if c.gate == "full" else [])]
        self.inner = nnx.Param(few_rows.pack(list(map(flat, names)), dtype))
        self.packed_out = nnx.Param(few_rows.pack([self.out[...].reshape(-1, D)], dtype))
        if c.q_lora_rank:
            self.packed_q_up = nnx.Param(few_rows.pack([flat("q_up")], dtype))
            names.append("q_up")
        for name, order in (("k_up", (1, 0, 2)), ("v_up", (1, 2, 0))):  # [H, R, N] and [H, V, R]
            setattr(self, f"packed_{name}", nnx.Param(getattr(self, name)[...].transpose(order).astype(dtype)))
        for name in (*names, "out", "k_up", "v_up"):
            delattr(self, name)

    @property
    def _ups(self) -> tuple[Float[Array, "R H N"], Float[Array, "R H V"]]:
        """What expands a latent into keys and values."""
        if not hasattr(self, "inner"):
            return self.k_up[...], self.v_up[...]
        return self.packed_k_up[...].transpose(1, 0, 2), self.packed_v_up[...].transpose(2, 0, 1)

    def _projections(self, x_BTD, at_BT) -> tuple[Array, Array, Array | None]:
        """Queries, what is kept of the tokens but for the norm, and the gate's logits."""
        if not hasattr(self, "inner"):
            kv = self._key_placed(linear(x_BTD, self.kv_down), at_BT)
            return self.queries(x_BTD, at_BT), kv, self.gate_logits(x_BTD)
        c, (B, T, D) = self.config.mla, x_BTD.shape
        q_size = c.n_heads * (c.nope_dim + c.rope_dim)
        sizes = [c.q_lora_rank or q_size, c.kv_lora_rank + c.rope_dim]
        sizes += [c.n_heads * c.v_dim] if c.gate == "full" else []
        q, kept, *gate = few_rows.linear(x_BTD.reshape(-1, D), self.inner[...], tuple(sizes))
        if c.q_lora_rank:
            up, norm = self.packed_q_up[...], {"norm_I": self.q_norm[...], "norm_eps": LORA_EPS}
            (q,) = few_rows.linear(q, up, (q_size,), **norm)
        q = self._placed(q.reshape(B, T, c.n_heads, -1), at_BT)
        gate = gate[0].reshape(B, T, c.n_heads, -1) if gate else None
        return q, self._key_placed(kept.reshape(B, T, -1), at_BT), gate

    def _inside(self, x: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """In the dtype that attention is computed in."""
        return wide(x) if self.config.mla.compute else x

    @property
    def scale(self) -> float:
        return (self.config.mla.nope_dim + self.config.mla.rope_dim) ** -0.5

    def queries(self, x_BTD: Float[Array, "B T D"], at_BT: Int[Array, "B T"] | None) -> Float[Array, "B T H K"]:
        """Queries of all heads; at_BT: positions, read with position rope only."""
        c = self.config.mla
        if c.q_lora_rank:
            q = _heads(rms_norm(linear(x_BTD, self.q_down), self.q_norm[...], LORA_EPS), self.q_up)
        else:
            q = _heads(x_BTD, self.q)
        return self._placed(q, at_BT)

    def _placed(self, q: Float[Array, "B T H K"], at_BT: Int[Array, "B T"] | None) -> Float[Array, "B T H K"]:
        """Queries at their positions."""
        c = self.config.mla
        if c.position == "rope":
            q_nope, q_rope = jnp.split(q, [c.nope_dim], axis=-1)
            q = jnp.concatenate([q_nope, rotate(q_rope, at_BT, c.rope_theta)], axis=-1)
        return q

    def latents(
        self, x_BTD: Float[Array, "B T D"], at_BT: Int[Array, "B T"] | None
    ) -> tuple[Float[Array, "B T R"], Float[Array, "B T P"]]:
        """What is kept of a token: its normed latent, and one key part, shared by all heads and not normed."""
        return self._normed(self._key_placed(linear(x_BTD, self.kv_down), at_BT))

    def _key_placed(self, kv_BTX: Float[Array, "B T X"], at_BT: Int[Array, "B T"] | None) -> Float[Array, "B T X"]:
        """Latents and key parts, these at their positions."""
        c = self.config.mla
        if c.position != "rope":
            return kv_BTX
        latent, k_rope = jnp.split(kv_BTX, [c.kv_lora_rank], axis=-1)
        return jnp.concatenate([latent, rotate(k_rope[:, :, None], at_BT, c.rope_theta)[:, :, 0]], axis=-1)

    def _normed(self, kv_BTX: Float[Array, "B T X"]) -> tuple[Float[Array, "B T R"], Float[Array, "B T P"]]:
        latent, k_rope = jnp.split(kv_BTX, [self.config.mla.kv_lora_rank], axis=-1)
        return rms_norm(latent, self.kv_norm[...], LORA_EPS), k_rope

    def gate_logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T H V"] | None:
        """Of the output gate; None: there is none."""
        return _heads(x_BTD, self.gate) if self.config.mla.gate == "full" else None

    def output(
        self, o_BTHV: Float[Array, "B T H V"], gate_BTHV: Float[Array, "B T H V"] | None, dtype: Any
    ) -> Float[Array, "B T D"]:
        """Gate and output projection."""
        if gate_BTHV is not None:
            o_BTHV = o_BTHV * jax.nn.sigmoid(wide(gate_BTHV))
        return self.project(o_BTHV.astype(dtype))

    def project(self, o_BTHV: Float[Array, "B T H V"]) -> Float[Array, "B T D"]:
        if hasattr(self, "packed_out"):
            B, T, D = *o_BTHV.shape[:2], self.config.d_model
            return few_rows.linear(o_BTHV.reshape(B * T, -1), self.packed_out[...], (D,))[0].reshape(B, T, D)
        return jnp.einsum("bthv,hvd->btd", o_BTHV, self.out.astype(o_BTHV.dtype))


def _heads(x_BTR, w_RHK):
    return jnp.einsum("btr,rhk->bthk", x_BTR, w_RHK.astype(x_BTR.dtype))

"""Kimi Delta Attention: gated delta-rule linear attention with a decay per channel (model.md 2.3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trillium_moe.config import ModelConfig
from trillium_moe.model.context import Context
from trillium_moe.model.conv import short_conv
from trillium_moe.model.norms import l2_norm, rms_norm
from trillium_moe.model.params import linear, normal, ones, param, wide, zeros
from trillium_moe.parallel.context import kda
from trillium_moe.shapes import Array, Float

# On a TPU a float32 dot is one bfloat16 pass unless asked otherwise; decay logits are exponentiated and summed.
HIGHEST = jax.lax.Precision.HIGHEST


def bounded_decay(
    z_BTHK: Float[Array, "B T H K"], a_log_H: Float[Array, " H"], g_min: float
) -> Float[Array, "B T H K"]:
    """g = g_min sigmoid(e^A z), in (g_min, 0) nats per token: Kimi K3."""
    return g_min * jax.nn.sigmoid(jnp.exp(a_log_H)[:, None] * z_BTHK)


def softplus_decay(z_BTHK: Float[Array, "B T H K"], a_log_H: Float[Array, " H"]) -> Float[Array, "B T H K"]:
    """g = -e^A softplus(z), unbounded below: Kimi Linear."""
    return -jnp.exp(a_log_H)[:, None] * jax.nn.softplus(z_BTHK)


def inverse_softplus_dt(key, shape, dtype):
    """softplus^-1(dt), dt log-uniform in [1e-3, 1e-1]: half-lives from a few tokens to hundreds at a zero logit."""
    dt = jnp.exp(jax.random.uniform(key, shape, jnp.float32, jnp.log(1e-3), jnp.log(1e-1)))
    return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)


def log_uniform_1_16(key, shape, dtype):
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0)).astype(dtype)


class KDA(nnx.Module):
    """One KDA mixer. Weights are [in, out] with the head axes kept apart."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, D, self.config = config.kda, config.d_model, config
        H, K = c.n_heads, c.head_dim
        dtype, init = config.dtypes.param, normal(config.init_std)
        weight = lambda shape, axes, **kw: param(rngs, shape, axes, dtype, init, **{"muon": "whole", **kw})
        for name in ("q", "k", "v"):
            setattr(self, name, weight((D, H, K), ("embed", "heads", "head_dim"), muon="head"))
            if c.conv_size:
                fan_in = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -1, 1) * shape[-1] ** -0.5
                axes = ("heads", "head_dim", "taps")
                setattr(self, f"{name}_conv", param(rngs, (H, K, c.conv_size), axes, dtype, fan_in))
        rank = c.decay_rank or K
        self.decay_down = weight((D, rank), ("embed", "rank"))
        self.decay_up = weight((rank, H, K), ("rank", "heads", "head_dim"))
        a_init = zeros if c.decay == "bounded" else log_uniform_1_16
        self.a_log = param(rngs, (H,), ("heads",), dtype, a_init)
        self.dt_bias = param(rngs, (H, K), ("heads", "head_dim"), dtype, inverse_softplus_dt)
        self.beta = weight((D, H), ("embed", "heads"))
        if c.gate == "full":
            self.gate = weight((D, H, K), ("embed", "heads", "head_dim"))
        elif c.gate == "low_rank":
            rank = c.gate_rank or K
            self.gate_down = weight((D, rank), ("embed", "rank"))
            self.gate_up = weight((rank, H, K), ("rank", "heads", "head_dim"))
        self.out_norm = param(rngs, (K,), ("head_dim",), dtype, ones)
        self.out = weight((H, K, D), ("heads", "head_dim", "embed"), n_in=2)

    def log_decay(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T H K"]:
        """Natural-log decay per token, head and channel, at least float32."""
        c = self.config.kda
        down = jnp.einsum("btd,dr->btr", x_BTD, self.decay_down.astype(x_BTD.dtype), precision=HIGHEST)
        up = self.decay_up.astype(x_BTD.dtype)
        z = jnp.einsum("btr,rhk->bthk", down, up, precision=HIGHEST, preferred_element_type=wide(down).dtype)
        z, a_log = z + wide(self.dt_bias[...]), wide(self.a_log[...])
        return bounded_decay(z, a_log, c.g_min) if c.decay == "bounded" else softplus_decay(z, a_log)

    def __call__(self, x_BTD: Float[Array, "B T D"], ctx: Context) -> tuple[Float[Array, "B T D"], dict]:
        c, eps = self.config.kda, self.config.norm_eps
        heads = lambda x, w: jnp.einsum("btd,dhk->bthk", x, w.astype(x.dtype))

        def qkv(name):
            y = heads(x_BTD, getattr(self, name))
            if c.conv_size:
                y = short_conv(y, getattr(self, f"{name}_conv")[...], ctx.segment_ids)
            return jax.nn.silu(y)

        q, k, v = l2_norm(qkv("q")), l2_norm(qkv("k")), qkv("v")
        g = self.log_decay(x_BTD)
        beta = jax.nn.sigmoid(wide(linear(x_BTD, self.beta)))
        g_min = c.g_min if c.decay == "bounded" else None
        o, _ = kda(q, k, v, g, beta, segment_ids=ctx.segment_ids, g_min=g_min, implementation=c.implementation or None)
        o = rms_norm(o, self.out_norm[...], eps)
        if c.gate != "none":
            rank = linear(x_BTD, self.gate_down) if c.gate == "low_rank" else x_BTD
            gate = heads(rank, self.gate_up if c.gate == "low_rank" else self.gate)
            o = (wide(o) * jax.nn.sigmoid(wide(gate))).astype(x_BTD.dtype)
        aux = {"log_decay_mean": g.mean((0, 1)), "log_decay_min": g.min()}
        return jnp.einsum("bthk,hkd->btd", o, self.out.astype(o.dtype)), jax.lax.stop_gradient(aux)

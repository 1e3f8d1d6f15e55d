"""Kimi Delta Attention: gated delta-rule linear attention with a decay per channel (model.md 2.3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from trillium_moe.config import ModelConfig
from trillium_moe.model.cache import Recurrent
from trillium_moe.model.context import Context
from trillium_moe.model.conv import short_conv
from trillium_moe.model.norms import l2_norm, rms_norm
from trillium_moe.model.params import linear, normal, ones, param, wide, zeros
from trillium_moe.parallel.context import kda
from trillium_moe.shapes import Array, Float, Int

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
        c = self.config.kda

        def qkv(name):
            y = _heads(x_BTD, getattr(self, name))
            if c.conv_size:
                y = short_conv(y, getattr(self, f"{name}_conv")[...], ctx.segment_ids)
            return jax.nn.silu(y)

        q, k, v = l2_norm(qkv("q")), l2_norm(qkv("k")), qkv("v")
        g = self.log_decay(x_BTD)
        beta = jax.nn.sigmoid(wide(linear(x_BTD, self.beta)))
        o, _ = kda(
            q, k, v, g, beta,
            segment_ids=ctx.segment_ids, g_min=self.g_min, implementation=c.implementation or None,
        )  # fmt: skip
        aux = {"log_decay_mean": g.mean((0, 1)), "log_decay_min": g.min()}
        return self.output(x_BTD, o), jax.lax.stop_gradient(aux)

    def extend(
        self, x_BTD: Float[Array, "B T D"], n_B: Int[Array, " B"], past: Recurrent, undecided: bool = False
    ) -> tuple[Float[Array, "B T D"], Recurrent]:
        """Continues sequences by the first n tokens of each row; see `trillium_moe.infer.forward.extend`.

        undecided: return the state before and after every token, [B, T + 1, H, K, V], and the inputs of all, for
          `settled` to choose from.
        """
        c, T = self.config.kda, x_BTD.shape[1]
        inputs = jnp.stack([_heads(x_BTD, getattr(self, name)) for name in "qkv"], axis=2)
        window = jnp.concatenate([past.taps, inputs], axis=1)
        taps = window if undecided else _last(window, n_B, past.taps.shape[1])
        if c.conv_size:
            weight = jnp.stack([wide(getattr(self, f"{name}_conv")[...]) for name in "qkv"])
            y = sum(wide(window[:, s : s + T]) * weight[..., s] for s in reversed(range(c.conv_size)))
            inputs = y.astype(inputs.dtype)
        q, k, v = (jax.nn.silu(y)[:, :, 0] for y in jnp.split(inputs, 3, axis=2))
        q, k = l2_norm(q), l2_norm(k)
        # beta = 0 and g = 0 change no state: that is all a token needs that is not there
        real = jnp.arange(T) < n_B[:, None]
        g = jnp.where(real[..., None, None], self.log_decay(x_BTD), 0)
        beta = jnp.where(real[..., None], jax.nn.sigmoid(wide(linear(x_BTD, self.beta))), 0)
        if T == 1 or undecided:
            out, states = [], [past.state]
            for t in range(T):
                o, state = one_token(*(x[:, t] for x in (q, k, v, g, beta)), states[-1])
                out, states = [*out, o], [*states, state]
            o = jnp.stack(out, 1)
            state = jnp.stack(states, 1) if undecided else state
        else:
            o, state = kda(q, k, v, g, beta, initial_state=past.state, g_min=self.g_min,
                           implementation=c.implementation or None)
        return self.output(x_BTD, o), Recurrent(state, taps)

    @property
    def g_min(self) -> float | None:
        return self.config.kda.g_min if self.config.kda.decay == "bounded" else None

    def output(self, x_BTD: Float[Array, "B T D"], o_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
        """Norm of every head, gate, output projection."""
        c = self.config.kda
        o = rms_norm(o_BTHK, self.out_norm[...], self.config.norm_eps)
        if c.gate != "none":
            rank = linear(x_BTD, self.gate_down) if c.gate == "low_rank" else x_BTD
            gate = _heads(rank, self.gate_up if c.gate == "low_rank" else self.gate)
            o = (wide(o) * jax.nn.sigmoid(wide(gate))).astype(x_BTD.dtype)
        return jnp.einsum("bthk,hkd->btd", o, self.out.astype(o.dtype))


def _last(window_BT, n_B, size):
    """`size` inputs up to the n-th new one, of `size` old ones followed by new ones."""
    return jax.vmap(lambda w, n: jax.lax.dynamic_slice_in_dim(w, n, size, 0))(window_BT, n_B)


def settled(past: Recurrent, n_B: Int[Array, " B"]) -> Recurrent:
    """The state after the first n tokens of an undecided extension."""
    T = past.state.shape[1] - 1
    state = jnp.take_along_axis(past.state, n_B[:, None, None, None, None], axis=1)[:, 0]
    return Recurrent(state, _last(past.taps, n_B, past.taps.shape[1] - T))


def _heads(x_BTD, w_DHK):
    return jnp.einsum("btd,dhk->bthk", x_BTD, w_DHK.astype(x_BTD.dtype))


def one_token(
    q_BHK: Float[Array, "B H K"],
    k_BHK: Float[Array, "B H K"],
    v_BHV: Float[Array, "B H V"],
    g_BHK: Float[Array, "B H K"],
    beta_BH: Float[Array, "B H"],
    state_BHKV: Float[Array, "B H K V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H K V"]]:
    """One step of the recurrence (`pallas_kernels.kda`) and its output, scaled by K^-0.5, in the state's dtype inside.

    Sums are element-wise: a matrix product with one row would only be a slower one. On a GPU the update is one kernel
    that reads and writes the state once, in place, because nothing reads the old state after it.
    """
    q, k, v = (x.astype(state_BHKV.dtype) for x in (q_BHK, k_BHK, v_BHV))
    decayed = jnp.exp(g_BHK)[..., None] * state_BHKV
    update = beta_BH[..., None] * (v - (decayed * k[..., None]).sum(-2))
    state = decayed + k[..., None] * update[..., None, :]
    o = q.shape[-1] ** -0.5 * (state * q[..., None]).sum(-2)
    return o.astype(v_BHV.dtype), state

"""Kimi Delta Attention: gated delta-rule linear attention with a decay per channel (model.md 2.3)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import few_rows
from pallas_kernels.kda import log_decay
from trillium_moe.config import ModelConfig
from trillium_moe.model.cache import Recurrent
from trillium_moe.model.context import Context
from trillium_moe.model.conv import short_conv
from trillium_moe.model.norms import rms_norm
from trillium_moe.model.params import linear, normal, ones, param, wide, wide_dtype, zeros
from trillium_moe.parallel.context import kda_decode, kda_gated
from trillium_moe.shapes import Array, Float, Int

# On a TPU a float32 dot is one bfloat16 pass unless asked otherwise; decay logits are exponentiated and summed.
HIGHEST = jax.lax.Precision.HIGHEST

NOTHING = -1e30  # as logit of decay and step size: the token changes no state


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
        decays = K if c.decay_per == "channel" else 1
        self.decay_up = weight((rank, H, decays), ("rank", "heads", "head_dim"))
        a_init = log_uniform_1_16 if c.decay == "softplus" else zeros
        self.a_log = param(rngs, (H,), ("heads",), dtype, a_init)
        self.dt_bias = param(rngs, (H, decays), ("heads", "head_dim"), dtype, inverse_softplus_dt)
        self.beta = weight((D, H), ("embed", "heads"))
        if c.gate == "full":
            self.gate = weight((D, H, K), ("embed", "heads", "head_dim"))
        elif c.gate == "low_rank":
            rank = c.gate_rank or K
            self.gate_down = weight((D, rank), ("embed", "rank"))
            self.gate_up = weight((rank, H, K), ("rank", "heads", "head_dim"))
        self.out_norm = param(rngs, (K,), ("head_dim",), dtype, ones)
        self.out = weight((H, K, D), ("heads", "head_dim", "embed"), n_in=2)

    def decay_logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T H K"]:
        """What the decay's gate takes, without dt_bias; at least float32."""
        down = jnp.einsum("btd,dr->btr", x_BTD, self.decay_down.astype(x_BTD.dtype), precision=HIGHEST)
        up = self.decay_up.astype(x_BTD.dtype)
        z = jnp.einsum("btr,rhk->bthk", down, up, precision=HIGHEST, preferred_element_type=wide_dtype(down))
        return self._in_channels(z)

    def beta_logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T H"]:
        """Of the step sizes; at least float32, as in a step of decoding."""
        w, how = self.beta.astype(x_BTD.dtype), {"precision": HIGHEST, "preferred_element_type": wide_dtype(x_BTD)}
        return jnp.einsum("btd,dh->bth", x_BTD, w, **how)

    def log_decay(self, decay_logits_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T H K"]:
        """Natural-log decay per token, head and channel, at least float32."""
        return log_decay(decay_logits_BTHK, *self.gate_of_decay, self.g_min)

    @property
    def gate_of_decay(self) -> tuple[Float[Array, " H"], Float[Array, "H K"]]:
        """a_log and dt_bias, at least float32."""
        return wide(self.a_log[...]), self._in_channels(wide(self.dt_bias[...]))

    def _in_channels(self, x: Float[Array, "*b _"]) -> Float[Array, "*b K"]:
        """One decay per head is the same in all its channels."""
        return jnp.broadcast_to(x, (*x.shape[:-1], self.config.kda.head_dim))

    @property
    def g_min(self) -> float | None:
        return None if self.config.kda.decay == "softplus" else self.config.kda.g_min

    def _inside(self, x: Float[Array, "*s"]) -> Any:
        """The dtype between the projections."""
        return jnp.promote_types(x.dtype, self.config.kda.compute or x.dtype)

    def __call__(
        self, x_BTD: Float[Array, "B T D"], ctx: Context, past: Recurrent | None = None
    ) -> tuple[Float[Array, "B T D"], dict]:
        """The mixer, and statistics of its decays; of rows that continue a sequence, its new `past` instead."""
        c, inside = self.config.kda, self._inside(x_BTD)
        inputs = [_heads(x_BTD, getattr(self, name)) for name in "qkv"]

        before = 0 if past is None else past.taps.shape[1]

        def convolved(i, name):
            y = inputs[i].astype(inside)
            if before:
                y = jnp.concatenate([past.taps[:, :, i].astype(inside), y], axis=1)
            if c.conv_size:
                y = short_conv(y, getattr(self, f"{name}_conv")[...], ctx.segment_ids)
            return jax.nn.silu(y[:, before:])

        z = self.decay_logits(x_BTD)
        o, state = kda_gated(
            *(convolved(i, name) for i, name in enumerate("qkv")), z, self.beta_logits(x_BTD), *self.gate_of_decay,
            initial_state=None if past is None else past.state,
            segment_ids=ctx.segment_ids, g_min=self.g_min, implementation=c.implementation or None,
        )  # fmt: skip
        y = self.output(o, self.gate_logits(x_BTD), x_BTD.dtype)
        if past is not None:
            window = jnp.concatenate([past.taps, jnp.stack(inputs, axis=2)], axis=1)
            return y, {"past": Recurrent(state, window[:, x_BTD.shape[1] :])}
        g = jax.lax.stop_gradient(self.log_decay(z))
        return y, {"log_decay_mean": g.mean((0, 1)), "log_decay_min": g.min()}

    def extend(
        self, x_BTD: Float[Array, "B T D"], n_B: Int[Array, " B"], past: Recurrent, undecided: bool = False
    ) -> tuple[Float[Array, "B T D"], Recurrent]:
        """Continues sequences by the first n tokens of each row; see `trillium_moe.infer.forward.extend`.

        undecided: return the state before and after every token, T + 1 of [B, H, K, V], and the inputs of all, for
          `settled` to choose from.
        """
        if x_BTD.shape[1] == 1 or undecided:
            return self._steps(x_BTD, n_B, past, undecided)
        c, T = self.config.kda, x_BTD.shape[1]
        inputs, z, beta, gate = self._projections(x_BTD)
        window = jnp.concatenate([past.taps, inputs], axis=1)
        if c.conv_size:
            weight = wide(self._conv)
            inputs = sum(wide(window[:, s : s + T]) * weight[..., s] for s in reversed(range(c.conv_size)))
        inputs = inputs.astype(self._inside(x_BTD))
        q, k, v = (jax.nn.silu(y)[:, :, 0] for y in jnp.split(inputs, 3, axis=2))
        real_BT = jnp.arange(T) < n_B[:, None]
        z = jnp.where(real_BT[..., None, None], z, NOTHING)
        beta = jnp.where(real_BT[..., None], beta, NOTHING)
        o, state = kda_gated(
            q, k, v, z, beta, *self.gate_of_decay,
            initial_state=past.state, g_min=self.g_min, implementation=c.implementation or None,
        )  # fmt: skip
        return self.output(o, gate, x_BTD.dtype), Recurrent(state, _last(window, n_B, past.taps.shape[1]))

    def _steps(self, x_BTD, n_B, past: Recurrent, undecided: bool) -> tuple[Array, Recurrent]:
        """`extend`, one token after the other."""
        inputs, *_ = tokens = self._projections(x_BTD, low_rank=self._multiplies_later)
        up = {}
        if self._multiplies_later:
            up = {"decay_up": self.packed_decay_up[...], "beta_in": self.packed_beta[...]}
        a_log, dt_bias = self.gate_of_decay
        out, states, taps = [], [past.state], past.taps
        for t in range(x_BTD.shape[1]):
            o, taps, state = kda_decode(
                *(None if x is None else x[:, t] for x in tokens), taps, states[-1],
                conv=self._conv, a_log=a_log, dt_bias=dt_bias, out_norm=self.out_norm[...], active=t < n_B,
                g_min=self.g_min, norm_eps=self.config.norm_eps, implementation=self.config.kda.implementation or None,
                **up,
            )  # fmt: skip
            out.append(o)
            states.append(state)
        y = self.project(jnp.stack(out, axis=1))
        if not undecided:
            return y, Recurrent(states[-1], taps)
        return y, Recurrent(tuple(states), jnp.concatenate([past.taps, inputs], axis=1))

    def pack(self) -> None:
        """For generation on one device: one matrix for all that multiplies x (`pallas_kernels.few_rows`)."""
        c, D, dtype = self.config.kda, self.config.d_model, self.config.dtypes.compute
        flat = lambda name: getattr(self, name)[...].reshape(getattr(self, name).shape[0], -1)
        gate = {"full": ["gate"], "low_rank": ["gate_down"]}.get(c.gate, [])
        qkv = jnp.concatenate([flat(name) for name in "qkv"], axis=1)
        self.inner = nnx.Param(few_rows.pack([qkv, *map(flat, ("decay_down", *gate))], dtype))
        self.packed_beta = nnx.Param(few_rows.pack([flat("beta")], dtype))
        ups = ["decay_up", *(["gate_up"] if c.gate == "low_rank" else [])]
        for name in ups:
            setattr(self, f"packed_{name}", nnx.Param(few_rows.pack([flat(name)], dtype)))
        self.packed_out = nnx.Param(few_rows.pack([self.out[...].reshape(-1, D)], dtype))
        if c.conv_size:
            self.packed_conv = nnx.Param(jnp.moveaxis(self._conv, -1, 0))
        convs = [f"{name}_conv" for name in "qkv"] if c.conv_size else []
        for name in (*"qkv", "decay_down", "beta", *gate, *ups, "out", *convs):
            delattr(self, name)

    @property
    def _multiplies_later(self) -> bool:
        """Whether decoding leaves the second factor of the decay's projection, and that of the step size, to the op."""
        return hasattr(self, "inner") and self.config.kda.decay_per == "channel"

    def _projections(self, x_BTD, low_rank: bool = False) -> tuple[Array, Array, Array, Array | None]:
        """What the convolutions take [B, T, 3, H, K], and the logits of decay, step size [B, T, H] and output gate.

        low_rank: of decay and step size, what `packed_decay_up` and `packed_beta` multiply.
        """
        if not hasattr(self, "inner"):
            inputs = jnp.stack([_heads(x_BTD, getattr(self, name)) for name in "qkv"], axis=2)
            return inputs, self.decay_logits(x_BTD), self.beta_logits(x_BTD), self.gate_logits(x_BTD)
        c, (B, T, D) = self.config.kda, x_BTD.shape
        H, K = c.n_heads, c.head_dim
        heads = lambda x, *of: x.reshape(B, T, *of, H, x.shape[-1] // H // math.prod(of))
        gate_size = {"full": [H * K], "low_rank": [c.gate_rank or K]}.get(c.gate, [])
        sizes, x = (3 * H * K, self.packed_decay_up.shape[1], *gate_size), x_BTD.reshape(-1, D)
        qkv, down, *gate = few_rows.linear(x, self.inner[...], sizes)
        if low_rank:
            z, beta = down.reshape(B, T, -1), x_BTD
        else:
            (beta,) = few_rows.linear(x, self.packed_beta[...], (H,), (wide_dtype(x),))
            decays = H * (K if c.decay_per == "channel" else 1)
            (z,) = few_rows.linear(down, self.packed_decay_up[...], (decays,), (wide_dtype(down),))
            z = self._in_channels(heads(z))
        if c.gate == "low_rank":
            gate = few_rows.linear(*gate, self.packed_gate_up[...], (H * K,))
        return heads(qkv, 3), z, beta.reshape(B, T, -1), heads(*gate) if gate else None

    @property
    def _conv(self) -> Float[Array, "3 H K C"] | None:
        if not self.config.kda.conv_size:
            return None
        if hasattr(self, "packed_conv"):
            return jnp.moveaxis(self.packed_conv[...], 0, -1)
        return jnp.stack([getattr(self, f"{name}_conv")[...] for name in "qkv"])

    def output(
        self, o_BTHK: Float[Array, "B T H K"], gate_BTHK: Float[Array, "B T H K"] | None, dtype: Any
    ) -> Float[Array, "B T D"]:
        """Norm of every head, gate, output projection."""
        o = rms_norm(wide(o_BTHK), self.out_norm[...], self.config.norm_eps)
        if gate_BTHK is not None:
            o = o * jax.nn.sigmoid(wide(gate_BTHK))
        return self.project(o.astype(dtype))  # rounded once, as in a step of decoding

    def gate_logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T H K"] | None:
        """Of the output gate; None: there is none."""
        c = self.config.kda
        if c.gate == "none":
            return None
        return _heads(linear(x_BTD, self.gate_down), self.gate_up) if c.gate == "low_rank" else _heads(x_BTD, self.gate)

    def project(self, o_BTHK: Float[Array, "B T H K"]) -> Float[Array, "B T D"]:
        if hasattr(self, "packed_out"):
            B, T, D = *o_BTHK.shape[:2], self.config.d_model
            return few_rows.linear(o_BTHK.reshape(B * T, -1), self.packed_out[...], (D,))[0].reshape(B, T, D)
        return jnp.einsum("bthk,hkd->btd", o_BTHK, self.out.astype(o_BTHK.dtype))


def _last(window_BT, n_B, size):
    """`size` inputs up to the n-th new one, of `size` old ones followed by new ones."""
    return jax.vmap(lambda w, n: jax.lax.dynamic_slice_in_dim(w, n, size, 0))(window_BT, n_B)


def settled(past: Recurrent, n_B: Int[Array, " B"]) -> Recurrent:
    """The state after the first n tokens of an undecided extension."""
    state, *later = past.state
    for t, after in enumerate(later):
        state = jnp.where((n_B > t)[:, None, None, None], after, state)
    return Recurrent(state, _last(past.taps, n_B, past.taps.shape[1] - len(later)))


def _heads(x_BTD, w_DHK):
    return jnp.einsum("btd,dhk->bthk", x_BTD, w_DHK.astype(x_BTD.dtype))


"""Gated feed-forward networks and their activations (model.md 2.7)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import few_rows
from pallas_kernels.rounding import rounded
from trillium_moe.config import ModelConfig
from trillium_moe.model.context import Context
from trillium_moe.model.params import linear, normal, param, wide
from trillium_moe.shapes import Array, Float


def situ_glu(
    gate: Float[Array, "*s"], up: Float[Array, "*s"], beta: float = 4.0, linear_beta: float = 25.0
) -> Float[Array, "*s"]:
    """SiTU-GLU: beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta), so |out| <= beta linear_beta.

    Kimi K3, Eq. 12. Equal to SwiGLU to first order at 0. In float32: bfloat16 tanh near its cap has three digits.
    """
    return _situ(beta, linear_beta, gate, up)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _situ(beta, linear_beta, gate, up):
    g, u = wide(gate), wide(up)
    out = beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * (linear_beta * jnp.tanh(u / linear_beta))
    return rounded(out, gate.dtype)


def _situ_bwd(beta, linear_beta, saved, d):
    # from gate and up alone: autodiff would keep both tanh and the sigmoid as well, in float32
    g, u, d = (wide(x) for x in (*saved, d))
    t, s, v = jnp.tanh(g / beta), jax.nn.sigmoid(g), jnp.tanh(u / linear_beta)
    d_gate = d * linear_beta * v * s * ((1 - t * t) + beta * t * (1 - s))
    d_up = d * beta * t * s * (1 - v * v)
    return d_gate.astype(saved[0].dtype), d_up.astype(saved[1].dtype)


_situ.defvjp(lambda beta, linear_beta, gate, up: (_situ(beta, linear_beta, gate, up), (gate, up)), _situ_bwd)


def swiglu(gate: Float[Array, "*s"], up: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """silu(gate) * up, in float32."""
    return rounded(jax.nn.silu(wide(gate)) * wide(up), gate.dtype)


def activate(config: ModelConfig, gate: Float[Array, "*s"], up: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """The activation the config asks for."""
    if config.activation == "swiglu":
        return swiglu(gate, up)
    return situ_glu(gate, up, config.situ_beta, config.situ_linear_beta)


class DenseFFN(nnx.Module):
    """down(act(gate x, up x)), without biases."""

    def __init__(self, config: ModelConfig, width: int, *, rngs: nnx.Rngs):
        D, dtype, init = config.d_model, config.dtypes.param, normal(config.init_std)
        self.config = config
        self.gate = param(rngs, (D, width), ("embed", "mlp"), dtype, init, muon="whole")
        self.up = param(rngs, (D, width), ("embed", "mlp"), dtype, init, muon="whole")
        self.down = param(rngs, (width, D), ("mlp", "embed"), dtype, init, muon="whole")

    def __call__(self, x_BTD: Float[Array, "*b D"], ctx: Context | None = None) -> tuple[Float[Array, "*b D"], dict]:
        if hasattr(self, "inner"):
            return self._packed(x_BTD), {}
        return linear(self.hidden(x_BTD), self.down), {}

    def hidden(self, x_BTD: Float[Array, "*b D"]) -> Float[Array, "*b F"]:
        return activate(self.config, linear(x_BTD, self.gate), linear(x_BTD, self.up))

    def pack(self) -> None:
        """For generation on one device: one matrix for all that multiplies x (`pallas_kernels.few_rows`)."""
        dtype = self.config.dtypes.compute
        self.inner = nnx.Param(few_rows.pack([self.gate[...], self.up[...]], dtype))
        self.packed_down = nnx.Param(few_rows.pack([self.down[...]], dtype))
        for name in ("gate", "up", "down"):
            delattr(self, name)

    def _packed(self, x):
        D, width = x.shape[-1], self.packed_down.shape[1]
        down = self.packed_down[...]
        gate, up = few_rows.linear(x.reshape(-1, D), self.inner[...], (width, width))
        return few_rows.linear(activate(self.config, gate, up), down, (D,))[0].reshape(x.shape)

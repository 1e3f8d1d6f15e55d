"""The gated activations of expert FFNs, with gradients from gate and up alone, so that nothing else is kept."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Activation:
    """situ: beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta) (Kimi K3, Eq. 12).
    swiglu: gate sigmoid(gate) * up."""

    name: str = "situ"
    beta: float = 4.0
    linear_beta: float = 25.0

    def __post_init__(self):
        if self.name not in ("situ", "swiglu"):
            raise ValueError(f"Activation.name={self.name!r}: use situ or swiglu")

    def parts(self, gate, up, tanh=jnp.tanh, sigmoid=jax.nn.sigmoid):
        """(a, da, b, db): the activation is a(gate) b(up); da and db are thunks for the derivatives."""
        s = sigmoid(gate)
        if self.name == "swiglu":
            return gate * s, lambda: s * (1 + gate * (1 - s)), up, lambda: jnp.ones_like(up)
        t, v = tanh(gate / self.beta), tanh(up / self.linear_beta)
        da = lambda: s * ((1 - t * t) + self.beta * t * (1 - s))
        return self.beta * t * s, da, self.linear_beta * v, lambda: 1 - v * v

    def __call__(self, gate, up, **functions):
        a, _, b, _ = self.parts(gate, up, **functions)
        return a * b

    def with_gradients(self, gate, up, **functions):
        """(activation, its derivative by gate, by up)."""
        a, da, b, db = self.parts(gate, up, **functions)
        return a * b, da() * b, a * db()

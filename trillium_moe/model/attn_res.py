"""Attention residuals: depth is attended, not summed (model.md 2.5, arXiv 2603.15031).

A sublayer reads h = sum_i p_i c_i over candidates c: the sealed sums of finished blocks and the live sum of its own.
p is a softmax of <w, c_i / rms(c_i)>; keys are normalised, values are raw. Zero w (the initialisation) averages.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from trillium_moe.model.params import wide
from trillium_moe.shapes import Array, Bool, Float, Int


def read(
    w_D: Float[Array, " D"],
    sealed_NBTD: Float[Array, "N B T D"],
    n_sealed: int | Int[Array, ""],
    live_BTD: Float[Array, "B T D"],
    has_live: bool | Bool[Array, ""],
    eps: float,
) -> tuple[Float[Array, "B T D"], Float[Array, " N+1"]]:
    """Depth attention over sealed[:n_sealed] and, where `has_live`, the live sum.

    Args:
      w_D: pseudo-query, the product of the key norm's weight and the projection.

    Returns:
      The mix in the candidates' dtype, and the mean weight of every candidate over batch and time (the live one last).
    """
    # float32: scores are sums over D, and the mix is the layer's whole input
    w = wide(w_D)

    def score(c):  # <w, c> / rms(c), so that one pass over c gives both sums and no normalised copy is kept
        c = wide(c)
        return (c * w).sum(-1) * lax.rsqrt((c * c).mean(-1) + eps)

    N = sealed_NBTD.shape[0]
    s_NBT = jnp.where((jnp.arange(N) < n_sealed)[:, None, None], score(sealed_NBTD), -jnp.inf)
    s_BT = jnp.where(has_live, score(live_BTD), -jnp.inf)
    top_BT = jnp.maximum(s_NBT.max(0), s_BT)
    e_NBT, e_BT = jnp.exp(s_NBT - top_BT), jnp.exp(s_BT - top_BT)
    total_BT = e_NBT.sum(0) + e_BT
    p_NBT, p_BT = e_NBT / total_BT, e_BT / total_BT
    mix = jnp.einsum("nbt,nbtd->btd", p_NBT, wide(sealed_NBTD)) + p_BT[..., None] * wide(live_BTD)
    return mix.astype(live_BTD.dtype), jnp.append(p_NBT.mean((1, 2)), p_BT.mean())

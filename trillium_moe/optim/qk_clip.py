"""QK-Clip: shrinks the query and key weights of attention heads whose logits grew past a bound.

Source: Kimi K2 (arXiv 2507.20534), algorithm 1 (MuonClip), in its form for multi-head latent attention.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from trillium_moe.model.params import wide
from trillium_moe.shapes import Array, Float


def qk_clip(mla: nnx.State, max_logit_LH: Float[Array, "L H"], tau: float, nope_dim: int) -> nnx.State:
    """The stacked MLA parameters with every head's logits scaled by gamma = min(1, tau / max logit).

    logit = q_nope . k_nope + q_rope . k_rope, and k_rope is shared by all heads: sqrt(gamma) goes to the nope
    columns of query and key each, gamma to the rope columns of the query alone. Apply after the optimizer
    step, with the largest scaled pre-softmax logit that each head saw in the step's forward pass; heads at or
    below tau keep their bits.

    Args:
      mla: holds `q_up` [L, R, H, nope + rope] or `q` [L, D, H, nope + rope], and `k_up` [L, R, H, nope];
        anything else is returned as it is.
      tau: bound on the logits, greater than 0.
      nope_dim: query columns that meet the head's own key.
    """
    gamma_LH = jnp.where(max_logit_LH > tau, tau / max_logit_LH, 1)

    def clip(path, variable):
        if path not in (("q_up",), ("q",), ("k_up",)):
            return variable
        column = jnp.arange(variable.shape[-1])
        gamma = gamma_LH[:, None, :, None]  # over the axes [L, R, H, columns]
        factor = jnp.where(column < nope_dim, jnp.sqrt(gamma), gamma)
        return jax.tree.map(lambda x: (wide(x) * factor).astype(x.dtype), variable)

    return nnx.map_state(clip, mla)

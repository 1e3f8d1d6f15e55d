"""The balancing of experts: the rules that give the next bias, or do without one.

Selection, weights and the histogram rule are the op `pallas_kernels.router`; its `bias.py` derives quantile balancing
(model.md 2.8). Scores s are unbiased; alpha_i is the (k+1)-th largest of s_i + b, so the old bias enters through alpha
alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.router import quantile_bias
from pallas_kernels.router.bias import centred, target_load
from trillium_moe.config import MoEConfig
from trillium_moe.shapes import Array, Bool, Float, Int


def exact_bhat(
    scores_ME: Float[Array, "M E"], alpha_M: Float[Array, " M"], k: int, real_M: Bool[Array, " M"] | None = None
) -> Float[Array, " E"]:
    """The (floor(q) + 1)-th smallest required bias alpha_i - s_ij of every expert, over the real tokens."""
    M, E = scores_ME.shape
    real = jnp.ones(M, bool) if real_M is None else real_M
    required = jnp.sort(jnp.where(real[:, None], alpha_M[:, None] - scores_ME, jnp.inf), axis=0)
    return jax.lax.dynamic_index_in_dim(required, target_load(real.sum(), k, E)[0], 0, keepdims=False)


def batch_threshold(scores_ME: Float[Array, "M E"], k: int) -> tuple[Int[Array, "E q"], Bool[Array, "M E"]]:
    """Expert choice: the q = floor(m k / n) tokens of the highest score for every expert, as indices and as a mask.

    Not causal: whether a token is taken depends on tokens after it.
    """
    M, E = scores_ME.shape
    tokens_EQ = jax.lax.top_k(scores_ME.T, max(1, M * k // E))[1]
    taken = jnp.zeros((E, M), bool).at[jnp.arange(E)[:, None], tokens_EQ].set(True)
    return tokens_EQ, taken.T


@jax.custom_vjp
def add_loss(x: Float[Array, "*s"], loss: Float[Array, ""]) -> Float[Array, "*s"]:
    """x, with the gradient of `loss` added to the objective's where x is used (the objective's own scale is 1)."""
    return x


add_loss.defvjp(lambda x, loss: (x, loss), lambda loss, d: (d, jnp.ones_like(loss)))


def aux_loss(
    scores_ME: Float[Array, "M E"], load_E: Int[Array, " E"], real_M: Bool[Array, " M"]
) -> Float[Array, ""]:
    """n sum_e f_e P_e: f the share of assignments, P the mean normalised score (Switch Transformer, Eq. 4)."""
    E = scores_ME.shape[1]
    share = load_E / jnp.maximum(load_E.sum(), 1)
    probs = scores_ME / (scores_ME.sum(-1, keepdims=True) + 1e-20)
    mean = jnp.where(real_M[:, None], probs, 0).sum(0) / jnp.maximum(real_M.sum(), 1)
    return E * jnp.sum(share * mean)


def next_bias(config: MoEConfig, bias_LE: Float[Array, "L E"], stats: dict[str, Array]) -> Float[Array, "L E"]:
    """Bias of the next step for every MoE layer.

    Args:
      stats: the `moe` part of the forward's aux, summed over micro-batches: `load` [L,E], and by rule `histogram`
        [L,E,bins] (quantile) or `bhat` [L,E] with `batches` [L] (quantile_exact).
    """
    load = stats["load"].astype(bias_LE.dtype)
    load = load / jnp.maximum(load.mean(-1, keepdims=True), 1e-9)
    match config.balancing:
        case "quantile":
            return quantile_bias(stats["histogram"], bias_LE, config.k)
        case "quantile_exact":
            return centred((stats["bhat"] / stats["batches"][:, None]).astype(bias_LE.dtype))
        case "load_quantile":
            return bias_LE + config.load_eta * (jnp.quantile(load, config.load_p, axis=-1, keepdims=True) - load)
        case "sign":
            return bias_LE + config.sign_eta * jnp.sign(1 - load)
    return bias_LE  # batch_threshold, aux_loss, none

"""Routing and its balancing: which experts a token takes, and the bias that keeps their loads equal.

Quantile balancing (model.md 2.8, Kimi K3 sec. 2.3.3, App. C and D). Routing solves max sum x s with k experts per token
and q = m k / n tokens per expert. In the dual, alpha_i is the cutoff of token i and b_j the bias of expert j; with the
alphas fixed, the exact minimiser over b_j is a quantile of the required bias r_ij = alpha_i - s_ij. So the bias of the
next step is read off this step's scores: no step size, no auxiliary loss, no gradient.

Scores s are unbiased; alpha_i is the (k+1)-th largest of s_i + b, so the old bias enters through alpha alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trillium_moe.config import MoEConfig
from trillium_moe.shapes import Array, Bool, Float, Int


def select(
    scores_ME: Float[Array, "M E"], bias_E: Float[Array, " E"], k: int
) -> tuple[Int[Array, "M k"], Float[Array, " M"]]:
    """The k experts of every token by biased score, and the token's cutoff: the (k+1)-th biased score.

    Ties go to the lower expert index.
    """
    values, experts = jax.lax.top_k(scores_ME + bias_E, k + 1)
    return experts[:, :k], values[:, k]


def weights_of(scores_ME: Float[Array, "M E"], experts_MK: Int[Array, "M k"], scale: float) -> Float[Array, "M k"]:
    """Unbiased scores of the selected experts, normalised to sum to `scale`."""
    s = jnp.take_along_axis(scores_ME, experts_MK, axis=-1)
    return scale * s / (s.sum(-1, keepdims=True) + 1e-20)


def loads(experts_MK: Int[Array, "M k"], n_experts: int, real_M: Bool[Array, " M"]) -> Int[Array, " E"]:
    """Real tokens per expert."""
    ones = jnp.broadcast_to(real_M[:, None], experts_MK.shape).astype(jnp.int32)
    return jnp.zeros(n_experts, jnp.int32).at[experts_MK].add(ones)


def centred(bias_E: Float[Array, "*L E"]) -> Float[Array, "*L E"]:
    """Bias with zero mean: a common shift of all experts changes no selection."""
    return bias_E - bias_E.mean(-1, keepdims=True)


def target_load(m: Int[Array, "*s"], k: int, n: int) -> tuple[Int[Array, "*s"], Int[Array, "*s"]]:
    """q = m k / n as (floor, remainder over n), without forming m k, which passes 2^31 for large batches."""
    rest = (m % n) * k
    return (m // n) * k + rest // n, rest % n


# --- the exact rule


def exact_bhat(
    scores_ME: Float[Array, "M E"], alpha_M: Float[Array, " M"], k: int, real_M: Bool[Array, " M"] | None = None
) -> Float[Array, " E"]:
    """The (floor(q) + 1)-th smallest required bias alpha_i - s_ij of every expert, over the real tokens."""
    M, E = scores_ME.shape
    real = jnp.ones(M, bool) if real_M is None else real_M
    required = jnp.sort(jnp.where(real[:, None], alpha_M[:, None] - scores_ME, jnp.inf), axis=0)
    return jax.lax.dynamic_index_in_dim(required, target_load(real.sum(), k, E)[0], 0, keepdims=False)


def quantile_bias(scores: Float[Array, "M E"], bias: Float[Array, " E"], k: int) -> Float[Array, " E"]:
    """Next bias by the exact quantile rule, mean-centred.

    Args:
      scores: unbiased router scores of all tokens of the step.
      bias: the bias they were routed with.
      k: experts per token.
    """
    return centred(exact_bhat(scores, select(scores, bias, k)[1], k))


# --- the histogram rule: one integer all-reduce per step


def bin_range(bias_E: Float[Array, "*L E"], bins: int) -> tuple[Float[Array, "*L 1"], Float[Array, "*L 1"]]:
    """Lower edge and width of the bins over [min b - 1, max b + 1], which hold every required bias (0 < score < 1)."""
    low = bias_E.min(-1, keepdims=True) - 1
    return low, (bias_E.max(-1, keepdims=True) - low + 1) / bins


def margin_histogram(
    scores_ME: Float[Array, "M E"],
    alpha_M: Float[Array, " M"],
    bias_E: Float[Array, " E"],
    bins: int,
    real_M: Bool[Array, " M"] | None = None,
) -> Int[Array, "E bins"]:
    """Counts of the required bias alpha_i - s_ij per expert. Sums over micro-batches and devices."""
    M, E = scores_ME.shape
    low, width = bin_range(bias_E, bins)
    index = jnp.floor((alpha_M[:, None] - scores_ME - low) / width).astype(jnp.int32)
    index = jnp.clip(index, 0, bins - 1) + bins * jnp.arange(E)
    real = jnp.ones(M, bool) if real_M is None else real_M
    ones = jnp.broadcast_to(real[:, None], (M, E)).astype(jnp.int32)
    return jnp.zeros(E * bins, jnp.int32).at[index].add(ones).reshape(E, bins)


def histogram_bhat(
    histogram: Int[Array, "*L E bins"], bias_E: Float[Array, "*L E"], k: int
) -> Float[Array, "*L E"]:
    """The k/n quantile of the required bias, interpolated inside its bin."""
    *_, E, bins = histogram.shape
    low, width = bin_range(bias_E, bins)
    whole, rest = target_load(histogram.sum(-1), k, E)  # every expert's histogram counts every real token once
    cumulative = jnp.cumsum(histogram, axis=-1)
    index = jnp.argmax(cumulative >= (whole + (rest > 0))[..., None], axis=-1)
    at = lambda x: jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]
    count = at(histogram)
    fraction = ((whole - (at(cumulative) - count)) + rest / E) / jnp.maximum(count, 1)
    return low + (index + jnp.clip(fraction, 0, 1)) * width


def histogram_bias(
    scores: Float[Array, "M E"], bias: Float[Array, " E"], k: int, bins: int = 1000
) -> Float[Array, " E"]:
    """Next bias by the histogram rule, mean-centred; within a bin of the quantile. Arguments as `quantile_bias`."""
    histogram = margin_histogram(scores, select(scores, bias, k)[1], bias, bins)
    return centred(histogram_bhat(histogram, bias, k))


# --- the control arms


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
            return centred(histogram_bhat(stats["histogram"], bias_LE, config.k).astype(bias_LE.dtype))
        case "quantile_exact":
            return centred((stats["bhat"] / stats["batches"][:, None]).astype(bias_LE.dtype))
        case "load_quantile":
            return bias_LE + config.load_eta * (jnp.quantile(load, config.load_p, axis=-1, keepdims=True) - load)
        case "sign":
            return bias_LE + config.sign_eta * jnp.sign(1 - load)
    return bias_LE  # batch_threshold, aux_loss, none

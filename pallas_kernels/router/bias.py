"""Quantile balancing (Kimi K3, sec. 2.3.3, App. C and D): the next bias of every expert from the histogram of its
required bias.

Routing solves max sum x s with k experts per token and q = m k / n tokens per expert. In the dual, alpha_i is the
cutoff of token i and b_j the bias of expert j; with the alphas fixed, the exact minimiser over b_j is the k/n quantile
of the required bias alpha_i - s_ij. Histograms add up over micro-batches and devices: one integer all-reduce a step.

An expert at bias -inf takes no part: it is in no range, has no share of the load and keeps its bias.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def bin_range(bias_E: Float[Array, "*L E"], bins: int) -> tuple[Float[Array, "*L 1"], Float[Array, "*L 1"]]:
    """Lower edge and width of the bins over [min b - 1, max b + 1], which hold every required bias (0 < score < 1)."""
    live = jnp.isfinite(bias_E)
    low = jnp.where(live, bias_E, jnp.inf).min(-1, keepdims=True) - 1
    high = jnp.where(live, bias_E, -jnp.inf).max(-1, keepdims=True) + 1
    return low, (high - low) / bins


def target_load(m: Int[Array, "*s"], k: int, n: int | Int[Array, "*s"]) -> tuple[Int[Array, "*s"], Int[Array, "*s"]]:
    """q = m k / n as (floor, remainder over n), without forming m k, which passes 2^31 for large batches."""
    rest = (m % n) * k
    return (m // n) * k + rest // n, rest % n


def centred(bias_E: Float[Array, "*L E"]) -> Float[Array, "*L E"]:
    """Bias whose live experts have zero mean: a common shift of all experts changes no selection."""
    live = jnp.isfinite(bias_E)
    mean = jnp.where(live, bias_E, 0).sum(-1, keepdims=True) / jnp.maximum(live.sum(-1, keepdims=True), 1)
    return bias_E - mean


def histogram_quantile(
    histogram: Int[Array, "*L E bins"], bias_E: Float[Array, "*L E"], k: int
) -> Float[Array, "*L E"]:
    """The k/n quantile of the required bias, interpolated inside its bin; n counts the live experts."""
    bins = histogram.shape[-1]
    low, width = bin_range(bias_E, bins)
    live = jnp.isfinite(bias_E)
    n = jnp.broadcast_to(live.sum(-1, keepdims=True, dtype=jnp.int32), bias_E.shape)
    # every expert's histogram counts every real token once
    whole, rest = target_load(histogram.sum(-1), k, jnp.maximum(n, k))
    cumulative = jnp.cumsum(histogram, axis=-1)
    index = jnp.argmax(cumulative >= (whole + (rest > 0))[..., None], axis=-1)
    at = lambda x: jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]
    count = at(histogram)
    fraction = ((whole - (at(cumulative) - count)) + rest / jnp.maximum(n, k)) / jnp.maximum(count, 1)
    return jnp.where(live, low + (index + jnp.clip(fraction, 0, 1)) * width, -jnp.inf)


def quantile_bias(
    histogram: Int[Array, "*L E bins"], bias_E: Float[Array, "*L E"], k: int
) -> Float[Array, "*L E"]:
    """The bias of the next step, mean-centred; within one bin of the exact quantile.

    Args:
      histogram: counts of the required bias over the tokens of the step, as `router` returns them, summed over
        micro-batches and devices. The layers of a model may be leading axes.
      bias_E: the bias those tokens were routed with, which sets the range of the bins.
      k: experts per token.
    """
    return centred(histogram_quantile(histogram, bias_E, k).astype(bias_E.dtype))

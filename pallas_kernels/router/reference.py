"""Routing by its definitions: a stable sort of every token's biased scores, and one count at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.router.bias import bin_range


class Selection(NamedTuple):
    """What an implementation finds. With bins=0 there is no histogram."""

    experts_MK: Int[Array, "M k"]  # by falling biased score, ties to the lower index
    chosen_MK: Float[Array, "M k"]  # their unbiased scores
    cutoff_M: Float[Array, " M"]  # the (k+1)-th biased score; -inf if k = E
    load_E: Int[Array, " E"]
    histogram: Int[Array, "E bins"] | None


def bin_of(required: Float[Array, "*s"], low: Float[Array, "*t"], width: Float[Array, "*t"], bins: int):
    """Bin of a required bias; those past an end (a cutoff of -inf, a rounded edge) belong to the last bin there."""
    return jnp.clip(jnp.floor((required - low) * (1 / width)), 0, bins - 1).astype(jnp.int32)


def select(
    scores_ME: Float[Array, "M E"], bias_E: Float[Array, " E"], real_M: Bool[Array, " M"], *, k: int, bins: int,
    sigmoid: bool,
) -> Selection:  # fmt: skip
    scores = jax.nn.sigmoid(scores_ME) if sigmoid else scores_ME
    M, E = scores.shape
    biased = scores + bias_E
    order = jnp.argsort(biased, axis=1, descending=True, stable=True)
    experts = order[:, :k].astype(jnp.int32)
    ranked = jnp.take_along_axis(biased, order, axis=1)
    cutoff = ranked[:, k] if k < E else jnp.full(M, -jnp.inf, biased.dtype)
    chosen = jnp.take_along_axis(scores, experts, axis=1)
    load = (jax.nn.one_hot(experts, E, dtype=jnp.int32) * real_M[:, None, None]).sum((0, 1))
    if not bins:
        return Selection(experts, chosen, cutoff, load, None)
    low, width = bin_range(bias_E, bins)
    index = bin_of(cutoff[:, None] - scores, low, width, bins)
    histogram = jnp.stack([((index == b) & real_M[:, None]).sum(0) for b in range(bins)], axis=1)
    return Selection(experts, chosen, cutoff, load, histogram.astype(jnp.int32))

"""Routing by XLA's top-k and scatters: right on any backend, slow on accelerators."""

import jax
import jax.numpy as jnp

from pallas_kernels.router.bias import bin_range
from pallas_kernels.router.reference import Selection, bin_of


def select(scores_ME, bias_E, real_M, *, k, bins, sigmoid):
    scores = jax.nn.sigmoid(scores_ME) if sigmoid else scores_ME
    M, E = scores.shape
    values, experts = jax.lax.top_k(scores + bias_E, min(k + 1, E))
    experts = experts[:, :k]
    cutoff = values[:, k] if k < E else jnp.full(M, -jnp.inf, values.dtype)
    chosen = jnp.take_along_axis(scores, experts, axis=1)
    count = lambda n, index: (
        jnp.zeros(n, jnp.int32).at[index].add(jnp.broadcast_to(real_M[:, None], index.shape).astype(jnp.int32))
    )
    load = count(E, experts)
    if not bins:
        return Selection(experts, chosen, cutoff, load, None)
    low, width = bin_range(bias_E, bins)
    index = bin_of(cutoff[:, None] - scores, low, width, bins)
    return Selection(experts, chosen, cutoff, load, count(E * bins, index + bins * jnp.arange(E)).reshape(E, bins))

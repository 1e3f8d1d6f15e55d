"""Causal depthwise convolution over time, restarted at every document (model.md 2.3)."""

import jax.numpy as jnp

from trillium_moe.model.params import wide
from trillium_moe.parallel.context import with_halo
from trillium_moe.shapes import Array, Float, Int


def short_conv(
    x_BTHK: Float[Array, "B T H K"], weight_HKC: Float[Array, "H K C"], segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T H K"]:
    """y_t = sum_s weight[C-1-s] x_{t-s} over the tokens of t's own document; the last tap meets the current token."""
    return with_halo(_short_conv, x_BTHK, weight_HKC, segment_ids)


def _short_conv(x_BTHK, weight_HKC, segment_ids):
    taps = weight_HKC.shape[-1]
    x, w = wide(x_BTHK), wide(weight_HKC)
    y = x * w[..., -1]
    for s in range(1, taps):
        past = jnp.pad(x, ((0, 0), (s, 0), (0, 0), (0, 0)))[:, : x.shape[1]]
        if segment_ids is not None:
            # id -1 before the row: no document reaches there
            past_ids = jnp.pad(segment_ids, ((0, 0), (s, 0)), constant_values=-1)[:, : x.shape[1]]
            past = jnp.where((past_ids == segment_ids)[..., None, None], past, 0)
        y = y + past * w[..., taps - 1 - s]
    return y.astype(x_BTHK.dtype)

"""Causal depthwise convolution over time, restarted at every document (model.md 2.3)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trillium_moe.model.params import wide
from trillium_moe.parallel.context import with_halo
from trillium_moe.shapes import Array, Float, Int


def short_conv(
    x_BTHK: Float[Array, "B T H K"], weight_HKC: Float[Array, "H K C"], segment_ids: Int[Array, "B T"] | None = None
) -> Float[Array, "B T H K"]:
    """y_t = sum_s weight[C-1-s] x_{t-s} over the tokens of t's own document; the last tap meets the current token."""
    return with_halo(_short_conv, x_BTHK, weight_HKC, segment_ids)


@jax.custom_vjp
def _short_conv(x_BTHK, weight_HKC, segment_ids):
    past, w = _neighbours(x_BTHK, segment_ids, weight_HKC.shape[-1], -1), wide(weight_HKC)
    return sum(x * w[..., -1 - s] for s, x in enumerate(past)).astype(x_BTHK.dtype)


def _forward(x_BTHK, weight_HKC, segment_ids):
    return _short_conv(x_BTHK, weight_HKC, segment_ids), (x_BTHK, weight_HKC, segment_ids)


def _backward(saved, d_BTHK):
    x_BTHK, weight_HKC, segment_ids = saved
    taps, w = weight_HKC.shape[-1], wide(weight_HKC)
    future = _neighbours(d_BTHK, segment_ids, taps, 1)
    d_x = sum(d * w[..., -1 - s] for s, d in enumerate(future))
    past = _neighbours(x_BTHK, segment_ids, taps, -1)
    d_w = jnp.stack([(wide(d_BTHK) * x).sum((0, 1)) for x in past[::-1]], axis=-1)
    return d_x.astype(x_BTHK.dtype), d_w.astype(weight_HKC.dtype), None


_short_conv.defvjp(_forward, _backward)


def _neighbours(x_BTHK: Array, ids_BT: Array | None, taps: int, direction: int) -> list[Array]:
    """x at t, t + direction, .. for `taps` tokens, at least float32; zero outside the row and in other documents."""
    T, reach = x_BTHK.shape[1], taps - 1
    pad = lambda x: jnp.pad(x, ((0, 0), (reach, reach)) + ((0, 0),) * (x.ndim - 2))
    starts = [reach + direction * s for s in range(taps)]
    # The padded array exists: fused into its readers, every tap of q, k and v and of their gradients tests for the
    # row's ends by itself, and XLA's GPU compiler takes minutes over the kernel that results.
    padded = jax.lax.optimization_barrier(pad(x_BTHK))
    out = [wide(padded[:, start : start + T]) for start in starts]
    if ids_BT is None:
        return out
    ids = pad(ids_BT)  # what lies outside the row is zero already
    same = [(ids[:, start : start + T] == ids_BT)[..., None, None] for start in starts]
    return [jnp.where(own, x, 0) for own, x in zip(same, out)]

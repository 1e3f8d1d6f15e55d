"""The expert feed-forward op and its gradient, from the products of an implementation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.products import gradient_of


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def ffn(products, gated, activation, x_MD, weight_M, group_sizes_G, w_gate_GDF, w_up_GDF, w_down_GFD):
    """`api.expert_ffn`.

    Args:
      products: see `grouped_matmul.products`.
      gated: (products, activation, x, w_gate, w_up, weight, group sizes, keep) -> (hidden,), weight times the
        activation; to keep, also the two products before it.
    """
    weights = w_gate_GDF, w_up_GDF, w_down_GFD
    return _forward(products, gated, activation, x_MD, weight_M, group_sizes_G, *weights, keep=False)[0]


def _forward(products, gated, activation, x_MD, weight_M, group_sizes_G, *weights, keep=True):
    w_gate, w_up, w_down = (w.astype(x_MD.dtype) for w in weights)
    hidden_MF, *kept = gated(products, activation, x_MD, w_gate, w_up, weight_M, group_sizes_G, keep)
    y_MD = products.rows([hidden_MF], [w_down], group_sizes_G)
    return y_MD, (x_MD, weight_M, group_sizes_G, weights, kept)


def _backward(products, gated, activation, saved, d_y_MD):
    x_MD, weight_M, group_sizes_G, weights, (gate_MF, up_MF) = saved
    w_gate, w_up, w_down = (w.astype(x_MD.dtype) for w in weights)
    d_y_MD = d_y_MD.astype(x_MD.dtype)
    d_hidden_MF = products.rows([d_y_MD], [w_down], group_sizes_G, transposed=True)
    hidden_MF, d_gate_MF, d_up_MF, d_weight_M = _adjoint(activation, d_hidden_MF, gate_MF, up_MF, weight_M)
    d_w_down = gradient_of(products, weights[2], hidden_MF, d_y_MD, group_sizes_G)
    d_x_MD = products.rows([d_gate_MF, d_up_MF], [w_gate, w_up], group_sizes_G, transposed=True)
    d_w_gate, d_w_up = (
        gradient_of(products, w, x_MD, d, group_sizes_G) for d, w in zip((d_gate_MF, d_up_MF), weights)
    )
    return d_x_MD, d_weight_M, None, d_w_gate, d_w_up, d_w_down


def _adjoint(activation, d_hidden_MF, gate_MF, up_MF, weight_M):
    """From the gradient of weight activation(gate, up), over weight: that product, and the gradients of all three."""
    dtype, wide = gate_MF.dtype, jnp.promote_types(gate_MF.dtype, jnp.float32)
    weight_M1 = weight_M.astype(wide)[:, None]
    d_MF, gate_MF, up_MF = (x.astype(wide) for x in (d_hidden_MF, gate_MF, up_MF))
    act_MF, by_gate_MF, by_up_MF = activation.with_gradients(gate_MF, up_MF)
    narrow = lambda x: (weight_M1 * x).astype(dtype)
    d_weight_M = (d_MF * act_MF).sum(1).astype(weight_M.dtype)
    return narrow(act_MF), narrow(d_MF * by_gate_MF), narrow(d_MF * by_up_MF), d_weight_M


def two_products(products, activation, x_MD, w_gate_GDF, w_up_GDF, weight_M, group_sizes_G, keep):
    """`gated` of an implementation that has no better one."""
    gate_MF, up_MF = (products.rows([x_MD], [w], group_sizes_G) for w in (w_gate_GDF, w_up_GDF))
    wide = jnp.promote_types(x_MD.dtype, jnp.float32)
    hidden_MF = weight_M.astype(wide)[:, None] * activation(gate_MF.astype(wide), up_MF.astype(wide))
    hidden_MF = hidden_MF.astype(x_MD.dtype)
    return (hidden_MF, gate_MF, up_MF) if keep else (hidden_MF,)


ffn.defvjp(_forward, _backward)

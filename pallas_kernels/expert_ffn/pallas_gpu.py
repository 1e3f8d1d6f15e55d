"""The expert feed-forward op on Hopper GPUs: gate and up in one pass over the rows, the activation on the way out."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.expert_ffn.fused import ffn, two_products
from pallas_kernels.grouped_matmul.config import gpu_tiles
from pallas_kernels.grouped_matmul.gpu_kernel import f32
from pallas_kernels.grouped_matmul.pallas_gpu import products, rows_product
from pallas_kernels.mxfp4 import Packed


def expert_ffn(x_MD, weight_M, group_sizes_G, w_gate_GDF, w_up_GDF, w_down_GFD, *, align, activation):
    """`api.expert_ffn`; `grouped_matmul.pallas_gpu` says what it refuses."""
    chosen = products(x_MD, w_gate_GDF.shape[1:], align)
    first = two_products if isinstance(w_gate_GDF, Packed) else gated
    return ffn(chosen, first, activation, x_MD, weight_M, group_sizes_G, w_gate_GDF, w_up_GDF, w_down_GFD)


def _sigmoid(x):
    return 0.5 + 0.5 * jnp.tanh(0.5 * x)  # one instruction, to 2^-11; a bfloat16 result has 2^-9


def gated(products, activation, x_MD, w_gate_GDF, w_up_GDF, weight_M, group_sizes_G, keep, tiles=None):
    """weight activation(x w_gate, x w_up) [M, F] by groups of rows; to keep, also both products."""
    (M, D), (G, _, F) = x_MD.shape, w_gate_GDF.shape

    def epilogue(values, vectors):
        gate, up = values
        hidden = activation(gate, up, sigmoid=_sigmoid) * vectors[0]
        return [hidden, gate, up] if keep else [hidden]

    return rows_product(
        [x_MD],
        [(w_gate_GDF, w_up_GDF)],
        group_sizes_G,
        tiles or gpu_tiles(products.kind, "gated", M, G, D, F),
        vectors=[weight_M.astype(f32)],
        outs=3 if keep else 1,
        epilogue=epilogue,
    )

"""The expert feed-forward op on TPUs: the products of the grouped matmul, the activation between them by XLA."""

from pallas_kernels.expert_ffn.fused import ffn, two_products
from pallas_kernels.grouped_matmul.pallas_tpu import products
from pallas_kernels.grouped_matmul.products import refuse_packed


def expert_ffn(x_MD, weight_M, group_sizes_G, w_gate_GDF, w_up_GDF, w_down_GFD, *, align, activation):
    """`api.expert_ffn`; `grouped_matmul.pallas_tpu` says what it refuses."""
    refuse_packed(w_gate_GDF, w_up_GDF, w_down_GFD)
    chosen = products(x_MD, w_gate_GDF.shape[1:])
    return ffn(chosen, two_products, activation, x_MD, weight_M, group_sizes_G, w_gate_GDF, w_up_GDF, w_down_GFD)

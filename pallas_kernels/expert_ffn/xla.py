"""The expert feed-forward op on the XLA grouped matmul; any backend."""

from pallas_kernels.expert_ffn.fused import ffn, two_products
from pallas_kernels.grouped_matmul.xla import XlaProducts


def expert_ffn(*args, align, activation):
    return ffn(XlaProducts(align), two_products, activation, *args)

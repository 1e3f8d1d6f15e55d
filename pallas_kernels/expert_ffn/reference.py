"""The expert feed-forward op by its definition, differentiated by JAX."""

import jax.numpy as jnp

from pallas_kernels.grouped_matmul.reference import grouped_matmul


def expert_ffn(x_MD, weight_M, group_sizes_G, w_gate_GDF, w_up_GDF, w_down_GFD, *, align, activation):
    wide = jnp.promote_types(x_MD.dtype, jnp.float32)
    product = lambda x, w: grouped_matmul(x.astype(wide), w.astype(wide), group_sizes_G, align=align)
    hidden = activation(product(x_MD, w_gate_GDF), product(x_MD, w_up_GDF))
    return (weight_M[:, None] * product(hidden, w_down_GFD)).astype(x_MD.dtype)

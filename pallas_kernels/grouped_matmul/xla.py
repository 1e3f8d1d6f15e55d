"""Grouped matmul as a batched matmul over blocks of rows that belong to one group each.

The cost does not grow with the number of groups: a block looks its matrix up. `jax.lax.ragged_dot` on CPU and (by
default) on GPU multiplies every row by every group's matrix. The backward is written out so that the gradient of rhs
is a sum over blocks, never a dense one-hot product.
"""

import functools

import jax
import jax.numpy as jnp

_dot = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


def grouped_matmul(lhs_MK, rhs_GKN, group_sizes_G, *, align):
    starts = jnp.arange(lhs_MK.shape[0] // align) * align
    # past the last group: the number of groups, an index that gathers zeros and scatters nothing
    group_N = jnp.searchsorted(jnp.cumsum(group_sizes_G), starts, side="right")
    return _blocks(lhs_MK, rhs_GKN.astype(lhs_MK.dtype), group_N, align)


def _split(x_MK, align):
    return x_MK.reshape(-1, align, x_MK.shape[-1])


def _take(rhs_GKN, group_N):
    return jnp.take(rhs_GKN, group_N, axis=0, mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocks(lhs_MK, rhs_GKN, group_N, align):
    wide = jnp.promote_types(lhs_MK.dtype, jnp.float32)
    out = _dot("nck,nkf->ncf", _split(lhs_MK, align), _take(rhs_GKN, group_N), preferred_element_type=wide)
    return out.reshape(lhs_MK.shape[0], -1).astype(lhs_MK.dtype)


def _forward(lhs_MK, rhs_GKN, group_N, align):
    return _blocks(lhs_MK, rhs_GKN, group_N, align), (lhs_MK, rhs_GKN, group_N)


def _backward(align, saved, d_out_MN):
    lhs_MK, rhs_GKN, group_N = saved
    wide = jnp.promote_types(lhs_MK.dtype, jnp.float32)
    d_out = _split(d_out_MN, align)
    d_lhs = _dot("ncf,nkf->nck", d_out, _take(rhs_GKN, group_N), preferred_element_type=wide)
    per_block = _dot("nck,ncf->nkf", _split(lhs_MK, align), d_out, preferred_element_type=wide)
    d_rhs = jnp.zeros(rhs_GKN.shape, wide).at[group_N].add(per_block, mode="drop", indices_are_sorted=True)
    return d_lhs.reshape(lhs_MK.shape).astype(lhs_MK.dtype), d_rhs.astype(rhs_GKN.dtype), None


_blocks.defvjp(_forward, _backward)

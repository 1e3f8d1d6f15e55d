"""Attention in blocks of queries: [B, H, 512, T] scores at a time, recomputed in the backward."""

import jax
import jax.numpy as jnp

from pallas_kernels.attention import reference

QUERIES = 512  # rows of scores alive at once


def attention(q_BTHK, k_BTHK, v_BTHV, scale, segment_ids):
    T = q_BTHK.shape[1]
    if T <= QUERIES:
        return reference.attention(q_BTHK, k_BTHK, v_BTHV, scale, segment_ids)
    t = jnp.arange(T)
    n_blocks = -(-T // QUERIES)

    @jax.checkpoint
    def block(start):
        # the last block is moved back so that it ends at T; the rows it shares with the one before are dropped below
        q = jax.lax.dynamic_slice_in_dim(q_BTHK, start, QUERIES, 1)
        visible = ((start + jnp.arange(QUERIES))[:, None] >= t[None, :])[None]
        if segment_ids is not None:
            rows = jax.lax.dynamic_slice_in_dim(segment_ids, start, QUERIES, 1)
            visible = visible & (rows[:, :, None] == segment_ids[:, None, :])
        return reference.masked_attention(q, k_BTHK, v_BTHV, scale, visible)

    starts = jnp.minimum(jnp.arange(n_blocks) * QUERIES, T - QUERIES)
    out_NBQHV, max_NH = jax.lax.map(block, starts)
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
    head, tail = join(out_NBQHV[:-1]), out_NBQHV[-1]
    return jnp.concatenate([head, tail[:, head.shape[1] - T :]], axis=1), max_NH.max(0)

"""The depth read as XLA operations."""

import jax
import jax.numpy as jnp


def depth_read(query_D, sealed, live_MD, new_MD, norm_D, eps):
    """`api.depth_read`."""
    dtype, wide = live_MD.dtype, jnp.promote_types(live_MD.dtype, jnp.float32)
    normed = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    live_MD = live_MD if new_MD is None else live_MD + new_MD
    h = live_MD
    if query_D is not None:
        candidates = [x.astype(wide) for x in (*sealed, live_MD)]
        scores = [(normed(c) * query_D.astype(wide)).sum(-1) for c in candidates]
        p = jax.nn.softmax(jnp.stack(scores), axis=0)
        h = sum(p_M[..., None] * c for p_M, c in zip(p, candidates)).astype(dtype)
    return normed(h.astype(wide)).astype(dtype) * norm_D.astype(dtype), live_MD

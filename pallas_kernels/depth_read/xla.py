"""The depth read as XLA operations."""

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import rounded, scaled, widened


def depth_read(query_D, sealed, live_MD, new_MD, norm_D, eps):
    """`api.depth_read`."""
    dtype = live_MD.dtype
    normed = lambda x: x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    live_MD = live_MD if new_MD is None else live_MD + new_MD
    h = live_MD
    if query_D is not None:
        candidates = [widened(x) for x in (*sealed, live_MD)]
        scores = [(normed(c) * query_D.astype(c.dtype)).sum(-1) for c in candidates]
        p = jax.nn.softmax(jnp.stack(scores), axis=0)
        h = rounded(sum(p_M[..., None] * c for p_M, c in zip(p, candidates)), dtype)
    return h if norm_D is None else scaled(normed(widened(h)), norm_D, dtype), live_MD

"""Causal attention in square tiles of scores, visited only where a query can see a key.

A tile of queries starts at its diagonal and walks back over the tiles of keys to the first one that holds a token of
its documents: half of the scores of one long document, and little more than the documents' own in a packed row. The
softmax is accumulated on the way (running maximum, sum and output); the backward recomputes the scores from the saved
log-sum-exp (Dao et al. 2022), so that nothing of size T x T is ever kept.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

HIGHEST = jax.lax.Precision.HIGHEST


def attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    scale: float,
    segment_ids: Int[Array, "B T"] | None,
    *,
    size: int,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """`api.attention` in tiles of size x size scores; any T, which is padded to a multiple of it."""
    B, T, H, _ = q_BTHK.shape
    split = functools.partial(_split, size=size)
    parts = [split(jnp.swapaxes(x, 1, 2), axis=2) for x in (q_BTHK, k_BTHK, v_BTHV)]
    # a padding token sees itself, at least, and no token sees it
    ids = None if segment_ids is None else split(segment_ids, axis=1, mode="edge")
    o_NBHQV, top_NBHQ = _attend(scale, *parts, ids)
    join = lambda x: jnp.moveaxis(x, 0, 2).reshape(B, H, -1, *x.shape[4:])[:, :, :T]
    return jnp.swapaxes(join(o_NBHQV), 1, 2), jax.lax.stop_gradient(join(top_NBHQ).max((0, 2)))


def _split(x, size, axis, mode="constant"):
    """[.., T, ..] -> [N, .., size, ..], the last tile padded."""
    pad = [(0, -x.shape[axis] % size if i == axis else 0) for i in range(x.ndim)]
    x = jnp.pad(x, pad, mode=mode)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _dot(spec, a, b):
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(spec, a, b, preferred_element_type=wide, precision=HIGHEST)


def _logits(scale, q_BHQK, k_BHCK, n, m, ids_NBQ):
    """Scores of the queries of tile n with the keys of tile m; -inf where one does not see the other."""
    t = jnp.arange(q_BHQK.shape[2])
    visible = ((n - m) * len(t) + t[:, None] >= t)[None]
    if ids_NBQ is not None:
        visible = visible & (ids_NBQ[n][:, :, None] == ids_NBQ[m][:, None, :])
    return jnp.where(visible[:, None], _dot("bhqk,bhck->bhqc", q_BHQK, k_BHCK) * scale, -jnp.inf)


def _first(N, ids_NBQ):
    """[N]: the first tile of keys that each tile of queries meets, by the ranges of their ids: right for ids in any
    order, and tight for documents in a row."""
    if ids_NBQ is None:
        return jnp.zeros(N, jnp.int32)
    low, high = ids_NBQ.min(-1), ids_NBQ.max(-1)
    meets = ((low[None] <= high[:, None]) & (low[:, None] <= high[None])).any(-1)
    return jnp.argmax(meets, axis=1).astype(jnp.int32)  # a tile meets itself, so none beyond the diagonal comes first


def _walk(n, first, visit, carry):
    """visit(m, carry) for the tiles of keys m = n, n - 1, .., first."""
    return jax.lax.fori_loop(0, n - first + 1, lambda i, carry: visit(n - i, carry), carry)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scale, q, k, v, ids):
    return _forward(scale, q, k, v, ids)[0]


def _forward(scale, q_NBHQK, k_NBHQK, v_NBHQV, ids_NBQ):
    N, B, H, Q, V = v_NBHQV.shape

    def row(inputs):
        n, first, q = inputs

        def visit(m, carry):
            top, total, out = carry
            logits = _logits(scale, q, k_NBHQK[m], n, m, ids_NBQ)
            new = jnp.maximum(top, logits.max(-1))  # finite: the first tile of the walk holds the query's own key
            probs, keep = jnp.exp(logits - new[..., None]), jnp.exp(top - new)
            out = out * keep[..., None] + _dot("bhqc,bhcv->bhqv", probs.astype(v_NBHQV.dtype), v_NBHQV[m])
            return new, total * keep + probs.sum(-1), out

        wide = jnp.promote_types(q.dtype, jnp.float32)
        start = jnp.full((B, H, Q), -jnp.inf, wide), jnp.zeros((B, H, Q), wide), jnp.zeros((B, H, Q, V), wide)
        top, total, out = _walk(n, first, visit, start)
        return out / total[..., None], top, top + jnp.log(total)

    o, top, lse = jax.lax.map(row, (jnp.arange(N), _first(N, ids_NBQ), q_NBHQK))
    return (o, top), (q_NBHQK, k_NBHQK, v_NBHQV, ids_NBQ, o, lse)


def _backward(scale, saved, cotangents):
    q_NBHQK, k_NBHQK, v_NBHQV, ids_NBQ, o_NBHQV, lse_NBHQ = saved
    d_o, _ = cotangents
    N, wide, narrow = len(q_NBHQK), o_NBHQV.dtype, k_NBHQK.dtype
    own = (d_o * o_NBHQV).sum(-1)  # what normalisation takes from every score's gradient

    def row(carry, inputs):
        n, first, q, d_o, lse, own = inputs

        def visit(m, carry):
            d_q, d_k, d_v = carry
            k, v = k_NBHQK[m], v_NBHQV[m]
            probs = jnp.exp(_logits(scale, q, k, n, m, ids_NBQ) - lse[..., None])
            d_logits = probs * (_dot("bhqv,bhcv->bhqc", d_o, v) - own[..., None]) * scale
            d_logits = d_logits.astype(narrow)
            d_k = d_k.at[m].add(_dot("bhqc,bhqk->bhck", d_logits, q))
            d_v = d_v.at[m].add(_dot("bhqc,bhqv->bhcv", probs.astype(narrow), d_o))
            return d_q + _dot("bhqc,bhck->bhqk", d_logits, k), d_k, d_v

        d_q, *carry = _walk(n, first, visit, (jnp.zeros(q.shape, wide), *carry))
        return tuple(carry), d_q

    zeros = jnp.zeros(k_NBHQK.shape, wide), jnp.zeros(v_NBHQV.shape, wide)
    rows = jnp.arange(N), _first(N, ids_NBQ), q_NBHQK, d_o.astype(narrow), lse_NBHQ, own
    (d_k, d_v), d_q = jax.lax.scan(row, zeros, rows)
    return d_q.astype(q_NBHQK.dtype), d_k.astype(narrow), d_v.astype(v_NBHQV.dtype), None


_attend.defvjp(_forward, _backward)

"""Causal attention of some queries of a sequence over all of its keys, which are made block by block when needed.

For context parallelism: a device holds some of the queries, and the latents of the whole sequence, from which it
expands one block of full-width keys and values at a time. Softmax is accumulated over the blocks (running maximum, sum
and output); the backward recomputes the scores from the saved log-sum-exp: nothing of size queries x keys is kept.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

HIGHEST = jax.lax.Precision.HIGHEST


def attend(
    expand: Callable[[PyTree, PyTree], tuple[Array, Array]],
    q_GBTHK: Float[Array, "G B t H K"],
    start_G: Int[Array, " G"],
    ids_GBT: Int[Array, "G B t"],
    weights: PyTree,
    source: PyTree,
    ids_BT: Int[Array, "B T"],
    *,
    scale: float,
    block: int,
) -> tuple[Float[Array, "G B t H V"], Float[Array, " H"]]:
    """Attention of G runs of t neighbouring queries each; a query sees its own document's keys up to itself.

    Args:
      expand: (weights, part of source) -> (k [B, c, H, K], v [B, c, H, V]) of c neighbouring tokens.
      q_GBTHK: queries; run g starts at position start_G[g] of the sequence.
      ids_GBT, ids_BT: document of every query and of every key.
      weights: differentiable arguments of `expand` that are the same for all tokens.
      source: leaves [B, T, ..], what keys and values are made from.
      scale: factor on the dot products.
      block: keys at a time; divides T.

    Returns:
      The outputs, at least float32, and the largest scaled logit of each head, through which no gradient flows.
    """
    split = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)
    parts = jax.tree.map(split, source)
    return _attend(expand, scale, q_GBTHK, weights, parts, start_G, ids_GBT, split(ids_BT))


def _dot(spec, a, b):
    return jnp.einsum(spec, a, b, preferred_element_type=_wide(a), precision=HIGHEST)


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _logits(q_BTHK, k_BCHK, scale, start, ids_BT, first, ids_BC):
    t, c = ids_BT.shape[1], ids_BC.shape[1]
    visible = (start + jnp.arange(t))[:, None] >= (first + jnp.arange(c))[None, :]
    visible = visible & (ids_BT[:, :, None] == ids_BC[:, None, :])
    return jnp.where(visible[:, None], _dot("bthk,bchk->bhtc", q_BTHK, k_BCHK) * scale, -jnp.inf)


def _per_token(x_BHT):
    return jnp.swapaxes(x_BHT, 1, 2)[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(expand, scale, q, weights, parts, start_G, ids_GBT, ids_NBC):
    return _forward(expand, scale, q, weights, parts, start_G, ids_GBT, ids_NBC)[0]


def _forward(expand, scale, q, weights, parts, start_G, ids_GBT, ids_NBC):
    G, B, t, H, _ = q.shape
    N, c, wide = ids_NBC.shape[0], ids_NBC.shape[2], _wide(q)
    V = jax.eval_shape(expand, weights, jax.tree.map(lambda x: x[0], parts))[1].shape[-1]

    def read(g, carry, k, v, first, ids_BC):
        top, total, out = carry
        logits = _logits(q[g], k, scale, start_G[g], ids_GBT[g], first, ids_BC)
        new = jnp.maximum(top, logits.max(-1))
        safe = jnp.where(jnp.isfinite(new), new, 0)  # a query may see no key of its first blocks
        probs, keep = jnp.exp(logits - safe[..., None]), jnp.exp(top - safe)
        out = out * _per_token(keep) + _dot("bhtc,bchv->bthv", probs.astype(v.dtype), v)
        return new, total * keep + probs.sum(-1), out

    def step(carry, xs):
        n, part, ids_BC = xs

        def seen(carry):
            k, v = expand(weights, part)
            return tuple(
                jax.lax.cond(n * c < start_G[g] + t, lambda x, g=g: read(g, x, k, v, n * c, ids_BC), lambda x: x, old)
                for g, old in enumerate(carry)
            )

        return jax.lax.cond(n * c < start_G.max() + t, seen, lambda x: x, carry), None

    one = (jnp.full((B, H, t), -jnp.inf, wide), jnp.zeros((B, H, t), wide), jnp.zeros((B, t, H, V), wide))
    runs, _ = jax.lax.scan(step, (one,) * G, (jnp.arange(N), parts, ids_NBC))
    o = jnp.stack([out / _per_token(total) for _, total, out in runs])
    lse = jnp.stack([top + jnp.log(total) for top, total, _ in runs])
    highest = jnp.stack([top for top, _, _ in runs]).max((0, 1, 3))
    return (o, highest), (q, weights, parts, start_G, ids_GBT, ids_NBC, o, lse)


def _backward(expand, scale, saved, cotangents):
    q, weights, parts, start_G, ids_GBT, ids_NBC, o, lse = saved
    d_o, _ = cotangents
    G, _, t = ids_GBT.shape
    N, c, wide = ids_NBC.shape[0], ids_NBC.shape[2], _wide(q)
    own = jnp.swapaxes((d_o * o).sum(-1), 2, 3)  # [G, B, H, t]: what normalisation takes from every score's gradient

    def read(g, carry, k, v, first, ids_BC):
        d_q, d_k, d_v = carry
        probs = jnp.exp(_logits(q[g], k, scale, start_G[g], ids_GBT[g], first, ids_BC) - lse[g][..., None])
        d_out = d_o[g].astype(v.dtype)
        d_v = d_v + _dot("bhtc,bthv->bchv", probs.astype(v.dtype), d_out)
        d_logits = probs * (_dot("bthv,bchv->bhtc", d_out, v) - own[g][..., None]) * scale
        d_logits = d_logits.astype(k.dtype)
        d_q = d_q.at[g].add(_dot("bhtc,bchk->bthk", d_logits, k))
        return d_q, d_k + _dot("bhtc,bthk->bchk", d_logits, q[g]), d_v

    def step(carry, xs):
        n, part, ids_BC = xs

        def seen(carry):
            d_q, d_weights = carry
            (k, v), vjp = jax.vjp(expand, weights, part)
            inner = (d_q, jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide))
            for g in range(G):
                run = functools.partial(read, g, k=k, v=v, first=n * c, ids_BC=ids_BC)
                inner = jax.lax.cond(n * c < start_G[g] + t, run, lambda x: x, inner)
            d_q, d_k, d_v = inner
            d_w, d_part = vjp((d_k.astype(k.dtype), d_v.astype(v.dtype)))
            return (d_q, jax.tree.map(jnp.add, d_weights, d_w)), d_part

        skip = lambda carry: (carry, jax.tree.map(jnp.zeros_like, part))
        return jax.lax.cond(n * c < start_G.max() + t, seen, skip, carry)

    d_weights = jax.tree.map(lambda w: jnp.zeros(w.shape, _wide(w)), weights)
    carry = (jnp.zeros(q.shape, wide), d_weights)
    (d_q, d_weights), d_parts = jax.lax.scan(step, carry, (jnp.arange(N), parts, ids_NBC))
    d_weights = jax.tree.map(lambda d, w: d.astype(w.dtype), d_weights, weights)
    return d_q.astype(q.dtype), d_weights, d_parts, None, None, None


_attend.defvjp(_forward, _backward)


def runs(expand, q_GBTHK, start_G, ids_GBT, weights, source, ids_BT, scale):
    """`api.attention_runs`, in blocks of keys."""
    (G, B, t, H, _), T = q_GBTHK.shape, jax.tree.leaves(source)[0].shape[1]
    if ids_BT is None:
        ids_GBT, ids_BT = jnp.zeros((G, B, t), jnp.int32), jnp.zeros((B, T), jnp.int32)
    block = block_size(T, keys_at_once(B, t, H))
    return attend(expand, q_GBTHK, start_G, ids_GBT, weights, source, ids_BT, scale=scale, block=block)


def block_size(T: int, limit: int) -> int:
    """The largest divisor of T up to `limit`."""
    return max(d for d in range(1, min(T, max(limit, 1)) + 1) if T % d == 0)


def keys_at_once(B: int, T: int, H: int, scores: int = 1 << 28) -> int:
    """Keys per block that keep T queries' scores within `scores` elements, at most 512."""
    return max(16, min(512, scores // math.prod((B, T, H))))

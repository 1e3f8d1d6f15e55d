"""Attention of new tokens over cached latents, by one of two orders of the same products.

With keys [c k_up, r] and values c v_up of a latent c and a shared key part r, per query, key and head:

    expanded   make keys and values of a block of latents, then attend:          N + P + V, and R (N + V) per key
    absorbed   take the query into the latent space once (q k_up^T), attend over the latents as they lie, and leave it
               at the end (v_up): nothing is ever expanded                                          2 R + P

so few queries (decoding) absorb and a chunk of many expands. Softmax is accumulated over blocks of keys; blocks past
the last key are not visited. float32 throughout, products in the dtype of q.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import pallas_gpu
from pallas_kernels.attention.blocks import block_size, keys_at_once
from pallas_kernels.dispatch import is_hopper, target

HIGHEST = jax.lax.Precision.HIGHEST
RUN = 128  # queries of one sequence from which on expanding all its keys for the Hopper kernel is the smaller part


def absorbs(T: int, R: int, N: int, V: int) -> bool:
    """Whether T queries cost less in the latent space than their share of expanding keys and values."""
    return T * (2 * R - N - V) <= R * (N + V)


def cached_attention(
    q_BTHK: Float[Array, "B T H K"],
    position_BT: Int[Array, "B T"],
    read: Callable[[Array | int, int], Array],
    capacity: int,
    n_keys: Int[Array, ""],
    k_up_RHN: Float[Array, "R H N"],
    v_up_RHV: Float[Array, "R H V"],
    *,
    scale: float,
) -> Float[Array, "B T H V"]:
    """Softmax attention of queries over the keys at positions 0 .. their own.

    Args:
      q_BTHK: queries, K = N + P.
      position_BT: position of every query in its sequence; its own key is in the cache already.
      read: (start, size) -> latents of the keys [start, start + size) of every row, [B, size, R + P], in q's dtype.
      capacity: keys there is room for.
      n_keys: no query's position reaches it; keys from there on are not visited.
      k_up_RHN, v_up_RHV: what expands a latent into keys and values.
      scale: factor on the dot products.

    Returns:
      Outputs, at least float32.
    """
    B, T, H, _ = q_BTHK.shape
    R, _, N = k_up_RHN.shape
    wide = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    # XLA:CPU has no bfloat16 product of some of these forms with a float32 result; widened operands give the same sums
    operand = (lambda x: x.astype(wide)) if target()[0] == "cpu" else lambda x: x
    dot = lambda spec, a, b: jnp.einsum(spec, operand(a), operand(b), preferred_element_type=wide, precision=HIGHEST)
    absorbed = absorbs(T, R, N, v_up_RHV.shape[-1])
    if B == 1 and T >= RUN and is_hopper():
        try:
            return _run(q_BTHK, position_BT[:, 0], read(0, capacity), k_up_RHN, v_up_RHV, scale)
        except NotImplementedError:
            pass
    if absorbed:
        q_nope, q_rope = jnp.split(q_BTHK, [N], axis=-1)
        q_latent = dot("bthn,rhn->bthr", q_nope, k_up_RHN).astype(q_BTHK.dtype)
        q_BTHX = jnp.concatenate([q_latent, q_rope], axis=-1)

    def scores_and_values(start, size):
        latent_BCX = read(start, size)
        if absorbed:
            # values keep the key part's columns, which are cut off at the end: cutting them here would copy the cache
            return dot("bthx,bcx->bhtc", q_BTHX, latent_BCX), latent_BCX
        latent, rope = jnp.split(latent_BCX, [R], axis=-1)
        keys = dot("bcr,rhn->bchn", latent, k_up_RHN).astype(q_BTHK.dtype)
        values = dot("bcr,rhv->bchv", latent, v_up_RHV).astype(q_BTHK.dtype)
        rope = jnp.broadcast_to(rope[:, :, None], (*keys.shape[:3], rope.shape[-1]))
        return dot("bthk,bchk->bhtc", q_BTHK, jnp.concatenate([keys, rope], axis=-1)), values

    mix = lambda probs, values: dot("bhtc,bcx->bthx" if absorbed else "bhtc,bchx->bthx", probs, values)

    def visit(start, size, carry):
        top, total, out = carry
        logits, values = scores_and_values(start, size)
        visible = position_BT[:, None, :, None] >= start + jnp.arange(size)
        logits = jnp.where(visible, logits * scale, -jnp.inf)
        new = jnp.maximum(top, logits.max(-1))
        # the first block holds key 0, which every query sees: `new` is finite
        probs, keep = jnp.exp(logits - new[..., None]), jnp.exp(top - new)
        out = out * jnp.swapaxes(keep, 1, 2)[..., None] + mix(probs.astype(values.dtype), values)
        return new, total * keep + probs.sum(-1), out

    width = R + q_BTHK.shape[-1] - N if absorbed else v_up_RHV.shape[-1]
    empty = jnp.full((B, H, T), -jnp.inf, wide), jnp.zeros((B, H, T), wide), jnp.zeros((B, T, H, width), wide)
    # one query a row reads all its keys at once if the scores are small enough to keep
    size = block_size(capacity, max(1, (1 << 28) // (B * H)) if T == 1 else keys_at_once(B, T, H))
    if size == capacity:
        _, total, out = visit(0, size, empty)
    else:
        body = lambda n, carry: visit(n * size, size, carry)
        _, total, out = jax.lax.fori_loop(0, -(-n_keys // size), body, empty)
    out = out / jnp.swapaxes(total, 1, 2)[..., None]
    return dot("bthr,rhv->bthv", out[..., :R].astype(q_BTHK.dtype), v_up_RHV) if absorbed else out


def _run(q_1THK, start_1, latent_1CX, k_up_RHN, v_up_RHV, scale):
    """The chunk of one sequence as a run of queries for the Hopper kernel: all keys are expanded, later ones not read.

    Raises NotImplementedError for what `pallas_gpu.runs` refuses.
    """
    R = k_up_RHN.shape[0]

    def expand(weights, latent):
        (k_up, v_up), (c, rope) = weights, jnp.split(latent, [R], axis=-1)
        keys, values = (jnp.einsum("bcr,rhn->bchn", c, w) for w in (k_up, v_up))
        rope = jnp.broadcast_to(rope[:, :, None], (*keys.shape[:3], rope.shape[-1]))
        return jnp.concatenate([keys, rope], axis=-1), values

    weights = k_up_RHN, v_up_RHV
    return pallas_gpu.runs(expand, q_1THK[None], start_1, None, weights, latent_1CX, None, scale)[0][0]

"""Attention by its definition, with the whole score matrix."""

import jax
import jax.numpy as jnp


def attention(q_BTHK, k_BTHK, v_BTHV, scale, segment_ids):
    t = jnp.arange(q_BTHK.shape[1])
    visible = (t[:, None] >= t[None, :])[None]
    if segment_ids is not None:
        visible = visible & (segment_ids[:, :, None] == segment_ids[:, None, :])
    return masked_attention(q_BTHK, k_BTHK, v_BTHV, scale, visible)


def attention_from(q_BtHK, k_BTHK, v_BTHV, start_B, scale):
    at_Bt = start_B[:, None] + jnp.arange(q_BtHK.shape[1])
    visible = at_Bt[:, :, None] >= jnp.arange(k_BTHK.shape[1])
    return masked_attention(q_BtHK, k_BTHK, v_BTHV, scale, visible)


def masked_attention(q_BQHK, k_BTHK, v_BTHV, scale, visible_BQT):
    """Softmax attention of some queries over all keys; every query must see at least one key."""
    wide = jnp.promote_types(q_BQHK.dtype, jnp.float32)
    dot = lambda spec, a, b: jnp.einsum(spec, a, b, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST)
    logits = dot("bqhk,bthk->bhqt", q_BQHK, k_BTHK) * scale
    logits = jnp.where(visible_BQT[:, None], logits, -jnp.inf)
    probs = jax.nn.softmax(logits, axis=-1)
    out = dot("bhqt,bthv->bqhv", probs.astype(v_BTHV.dtype), v_BTHV)
    return out, jax.lax.stop_gradient(logits.max((0, 2, 3)))

"""The element-wise parts of a decoding step, for arrays of any leading axes. Kernels and the XLA form share them."""

import jax
import jax.numpy as jnp

from pallas_kernels.kda.reference import L2_EPS


def decay_logits(decay, decay_up, H, K):
    """[B, H, K], of `api.kda_decode`'s arguments."""
    if decay_up is None:
        return decay
    wide = jnp.promote_types(decay.dtype, jnp.float32)
    z = jnp.einsum(
        "br,xr->bx", decay, decay_up[: H * K], precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide
    )
    return z.reshape(-1, H, K)


def beta_logits(beta, beta_in, H):
    """[B, H], of `api.kda_decode`'s arguments."""
    if beta_in is None:
        return beta
    wide = jnp.promote_types(beta.dtype, jnp.float32)
    return jnp.einsum("bd,hd->bh", beta, beta_in[:H], precision=jax.lax.Precision.HIGHEST, preferred_element_type=wide)


def prepare(window, conv, z, a_log, g_min):
    """q times K^-0.5, k, v and the decay factor e^g.

    Args:
      window: inputs of the convolution, oldest first, each a triple (q, k, v) of [.., H, K].
      conv: [C, 3, H, K], or None: the last input as it is.
      z: [.., H, K], decay logits with their bias.
      a_log: [.., H, 1].
    """
    q, k, v = window[-1]
    if conv is not None:
        q, k, v = (sum(x[i] * conv[c, i] for c, x in enumerate(window)) for i in range(3))
    q, k, v = (x * jax.nn.sigmoid(x) for x in (q, k, v))
    q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS) for x in (q, k))
    rate = jnp.exp(a_log)
    if g_min is None:
        g = -rate * (jnp.maximum(z, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(z))))
    else:
        g = g_min * jax.nn.sigmoid(rate * z)
    return q * q.shape[-1] ** -0.5, k, v, jnp.exp(g)


def advance(state, q, k, v, decay, beta):
    """One step of the recurrence [.., H, K, V] and its output [.., H, V], in one pass over the state.

    The output is read from the decayed state and from the update apart, S^T q + (k . q) u, so that both sums over keys
    are taken before the update is known. beta is [.., H, 1].
    """
    decayed = decay[..., None] * state
    known, seen = (jnp.sum(decayed * x[..., None], axis=-2) for x in (k, q))
    update = beta * (v - known)
    o = seen + jnp.sum(k * q, axis=-1, keepdims=True) * update
    return o, decayed + k[..., None] * update[..., None, :]


def finish(o, gate, out_norm, norm_eps):
    """RMS norm of every head, times the sigmoid of the gate logits (None: no gate)."""
    o = o * jax.lax.rsqrt(jnp.mean(o * o, axis=-1, keepdims=True) + norm_eps) * out_norm
    return o if gate is None else o * jax.nn.sigmoid(gate)

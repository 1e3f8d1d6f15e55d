"""The decoding step as a KDA layer spells it out: convolution, norms, gates, one token of the recurrence, norm."""

import jax
import jax.numpy as jnp

from pallas_kernels.kda.reference import L2_EPS, kda_reference
from pallas_kernels.kda_decode.step import beta_logits, decay_logits


def kda_decode_reference(
    qkv, decay, beta, gate, taps, state,
    *, conv, a_log, dt_bias, out_norm, g_min, norm_eps, active=None, decay_up=None, beta_in=None,
):  # fmt: skip
    """`api.kda_decode`, everything between rounding of inputs and outputs in the dtype of the state."""
    wide = lambda x: x.astype(state.dtype)
    window_BC3HK = jnp.concatenate([taps, qkv[:, None]], axis=1)
    y_B3HK = wide(qkv)
    if conv is not None:
        y_B3HK = jnp.einsum("bcnhk,nhkc->bnhk", wide(window_BC3HK), wide(conv), precision="highest")
    q, k, v = jnp.moveaxis(jax.nn.silu(y_B3HK), 1, 0)
    q, k = (x / jnp.sqrt((x * x).sum(-1, keepdims=True) + L2_EPS) for x in (q, k))

    z, rate = wide(decay_logits(decay, decay_up, *qkv.shape[2:])) + wide(dt_bias), jnp.exp(wide(a_log))[:, None]
    g = -rate * jax.nn.softplus(z) if g_min is None else g_min * jax.nn.sigmoid(rate * z)
    one_token = [x[:, None] for x in (q, k, v, g, jax.nn.sigmoid(wide(beta_logits(beta, beta_in, qkv.shape[2]))))]
    o, new_state = kda_reference(*one_token, scale=q.shape[-1] ** -0.5, initial_state=state, segment_ids=None)

    o = o[:, 0] / jnp.sqrt((o[:, 0] ** 2).mean(-1, keepdims=True) + norm_eps) * wide(out_norm)
    o = o if gate is None else o * jax.nn.sigmoid(wide(gate))
    new_taps = window_BC3HK[:, 1:]
    if active is not None:
        new_taps, new_state = (
            jnp.where(active.reshape(-1, *[1] * (new.ndim - 1)), new, old)
            for new, old in ((new_taps, taps), (new_state, state))
        )
    return o.astype(qkv.dtype), new_taps, new_state

"""The decoding step as element-wise operations and sums that XLA fuses. No product of one row goes to a matrix unit."""

import jax
import jax.numpy as jnp

from pallas_kernels.kda_decode.step import advance, beta_logits, decay_logits, finish, prepare
from pallas_kernels.rounding import widened


def kda_decode_xla(
    qkv, decay, beta, gate, taps, state,
    *, conv, a_log, dt_bias, out_norm, g_min, norm_eps, active=None, decay_up=None, beta_in=None,
):  # fmt: skip
    """`api.kda_decode`."""
    wide = lambda x: widened(x).astype(state.dtype)
    window_BC3HK = jnp.concatenate([taps, qkv[:, None]], axis=1)
    window = [jnp.moveaxis(wide(x), 1, 0) for x in jnp.moveaxis(window_BC3HK, 1, 0)]
    conv_C3HK = None if conv is None else jnp.moveaxis(wide(conv), -1, 0)
    z = wide(decay_logits(decay, decay_up, *qkv.shape[2:])) + wide(dt_bias)
    q, k, v, factor = prepare(window, conv_C3HK, z, wide(a_log)[:, None], g_min)
    beta, new_taps = jax.nn.sigmoid(wide(beta_logits(beta, beta_in, qkv.shape[2])))[..., None], window_BC3HK[:, 1:]
    if active is not None:
        on = active[:, None, None]
        factor, beta = jnp.where(on, factor, 1), jnp.where(on, beta, 0)
        new_taps = jnp.where(on[..., None, None], new_taps, taps)
    o, state = advance(state, q, k, v, factor, beta)
    o = finish(o, None if gate is None else wide(gate), wide(out_norm), norm_eps)
    return o.astype(qkv.dtype), new_taps, state

"""KDA from a layer's raw projections: normalisation, bounded gate and step size in the same call."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.kda.api import IMPLEMENTATIONS, check
from pallas_kernels.kda.config import ChunkConfig
from pallas_kernels.kda.numerics import lowest_kernel_gate
from pallas_kernels.kda.pallas_gpu import kda_gated_pallas_gpu
from pallas_kernels.kda.pallas_tpu import kda_gated_pallas_tpu
from pallas_kernels.kda.reference import L2_EPS, State


def kda_gated(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    decay_logits: Float[Array, "B T H K"],
    beta_logits: Float[Array, "B T H"],
    a_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    *,
    g_min: float | None = -5.0,
    scale: float | None = None,
    initial_state: State | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], State]:
    """`kda` of what a layer projects (Kimi K3):

        q / |q|,   k / |k|,   v,   g = g_min sigmoid(e^a_log (decay_logits + dt_bias)),   beta = sigmoid(beta_logits).

    Differentiable in all seven arrays and initial_state. The gate is computed in float32 (float64 for float64 inputs)
    from logits of any float dtype. The kernels normalise and compute decays where they read q, k and the logits, and
    give the gradients of these: no unit vector, no decay and no gradient of one is ever in memory.

    A token with logits of -1e30 changes no state.

    Args:
      q, k, v: projections, normalised here; as in `kda` otherwise.
      decay_logits: before bias and slope; any float dtype. In bfloat16 a logit of -8 is a hundredth off, and so is
        the decay.
      beta_logits: before the sigmoid.
      a_log, dt_bias: log slope of each head's gate, and bias of each key channel's logit.
      g_min: lower bound of the gate in nats per token, negative; below what tiles can hold (`numerics`), the work is
        done as for an unbounded gate. None: g = -e^a_log softplus(decay_logits + dt_bias),
        which has none (Kimi Linear); as `g_min=None` of `kda`.
      scale, initial_state, segment_ids, implementation: see `kda`.

    Returns:
      o and final_state, as `kda`.

    Raises:
      ValueError: shapes, dtypes or arguments that do not fit together; the message says how to mend them.
      NotImplementedError: a named implementation cannot serve the call.
    """
    B, T, H, K = q.shape
    accumulate = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    if g_min is not None and not g_min < 0:
        raise ValueError(f"kda_gated: g_min={g_min} bounds nothing; pass a negative lower bound, e.g. -5.0, or None")
    for name, array, shape in (
        ("decay_logits", decay_logits, (B, T, H, K)),
        ("beta_logits", beta_logits, (B, T, H)),
        ("a_log", a_log, (H,)),
        ("dt_bias", dt_bias, (H, K)),
    ):
        if array.shape != shape:
            raise ValueError(f"kda_gated: {name} has shape {array.shape}; q of shape {q.shape} needs {shape}")
    beta = jax.nn.sigmoid(beta_logits.astype(accumulate))
    check(q, k, v, jax.ShapeDtypeStruct(q.shape, accumulate), beta, initial_state, segment_ids, g_min)
    if initial_state is None:
        initial_state = jnp.zeros((B, H, K, v.shape[-1]), accumulate)
    if T == 0:
        return jnp.zeros_like(v), initial_state.astype(accumulate)
    return dispatch(
        "kda_gated",
        _IMPLEMENTATIONS,
        implementation,
        q,
        k,
        v,
        decay_logits,
        beta,
        a_log.astype(accumulate),
        dt_bias.astype(accumulate),
        g_min=g_min,
        scale=K**-0.5 if scale is None else scale,
        initial_state=initial_state.astype(accumulate),
        segment_ids=segment_ids,
    )


def log_decay(
    decay_logits: Float[Array, "*lead H K"],
    a_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    g_min: float | None,
) -> Float[Array, "*lead H K"]:
    """The log decays of `kda_gated`, in the dtype of a_log."""
    z, rate = decay_logits.astype(a_log.dtype) + dt_bias, jnp.exp(a_log)[:, None]
    return -rate * jax.nn.softplus(z) if g_min is None else g_min * jax.nn.sigmoid(rate * z)


def unit(x: Float[Array, "*lead K"]) -> Float[Array, "*lead K"]:
    """x / |x|, at least float32 inside, in the dtype of x."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + L2_EPS)).astype(x.dtype)


def _composed(op, q, k, v, decay_logits, beta, a_log, dt_bias, *, g_min, **rest):
    g = log_decay(decay_logits, a_log, dt_bias, g_min)
    held = g_min is not None and g_min >= lowest_kernel_gate(ChunkConfig().tile)
    return op(unit(q), unit(k), v, g, beta, g_min=g_min if held else None, **rest)


_IMPLEMENTATIONS = {name: functools.partial(_composed, op) for name, op in IMPLEMENTATIONS.items()}
_IMPLEMENTATIONS |= {"pallas_gpu": kda_gated_pallas_gpu, "pallas_tpu": kda_gated_pallas_tpu}

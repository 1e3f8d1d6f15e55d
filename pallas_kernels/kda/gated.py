"""KDA from a layer's raw projections: normalisation, bounded gate and step size in the same call."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.kda.api import IMPLEMENTATIONS, check
from pallas_kernels.kda.pallas_gpu import kda_gated_pallas_gpu
from pallas_kernels.kda.reference import State

_EPS = 1e-6  # added to the sum of squares, as fla does


def kda_gated(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    decay_logits: Float[Array, "B T H K"],
    beta_logits: Float[Array, "B T H"],
    a_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    *,
    g_min: float = -5.0,
    scale: float | None = None,
    initial_state: State | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], State]:
    """`kda` of what a layer projects (Kimi K3):

        q / |q|,   k / |k|,   v,   g = g_min sigmoid(e^a_log (decay_logits + dt_bias)),   beta = sigmoid(beta_logits).

    Differentiable in all seven arrays and initial_state. The gate is computed in float32 (float64 for float64 inputs)
    from logits of any float dtype; on Hopper, bfloat16 logits become decays inside the kernels, and float32 decays are
    neither written nor read.

    Args:
      q, k, v: projections, normalised here; as in `kda` otherwise.
      decay_logits: before bias and slope.
      beta_logits: before the sigmoid.
      a_log, dt_bias: log slope of each head's gate, and bias of each key channel's logit.
      g_min: lower bound of the gate in nats per token, negative.
      scale, initial_state, segment_ids, implementation: see `kda`.

    Returns:
      o and final_state, as `kda`.

    Raises:
      ValueError: shapes, dtypes or arguments that do not fit together; the message says how to mend them.
      NotImplementedError: a named implementation cannot serve the call.
    """
    B, T, H, K = q.shape
    accumulate = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    if g_min is None or not g_min < 0:
        raise ValueError(f"kda_gated: g_min={g_min} bounds nothing; pass a negative lower bound, e.g. -5.0")
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
        _normalised(q),
        _normalised(k),
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


def bounded_gate(
    decay_logits: Float[Array, "B T H K"], a_log: Float[Array, " H"], dt_bias: Float[Array, "H K"], g_min: float
) -> Float[Array, "B T H K"]:
    """The log decays of `kda_gated`, in the dtype of a_log."""
    return g_min * jax.nn.sigmoid(jnp.exp(a_log)[:, None] * (decay_logits.astype(a_log.dtype) + dt_bias))


def _normalised(x: Float[Array, "*lead K"]) -> Float[Array, "*lead K"]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt((wide * wide).sum(-1, keepdims=True) + _EPS)).astype(x.dtype)


def _composed(op, q, k, v, decay_logits, beta, a_log, dt_bias, *, g_min, **rest):
    return op(q, k, v, bounded_gate(decay_logits, a_log, dt_bias, g_min), beta, g_min=g_min, **rest)


def _pallas_gpu(q, k, v, decay_logits, *args, **kwargs):
    in_kernel = decay_logits.dtype == jnp.bfloat16  # wider logits would lose what they were made wide for
    op = kda_gated_pallas_gpu if in_kernel else functools.partial(_composed, IMPLEMENTATIONS["pallas_gpu"])
    return op(q, k, v, decay_logits, *args, **kwargs)


_IMPLEMENTATIONS = {name: functools.partial(_composed, op) for name, op in IMPLEMENTATIONS.items()}
_IMPLEMENTATIONS["pallas_gpu"] = _pallas_gpu

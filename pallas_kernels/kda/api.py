"""The public KDA op: arguments checked, defaults resolved, an implementation chosen."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.kda.pallas_gpu import kda_pallas_gpu
from pallas_kernels.kda.pallas_tpu import kda_pallas_tpu
from pallas_kernels.kda.reference import State, kda_reference
from pallas_kernels.kda.xla import kda_xla

IMPLEMENTATIONS = {
    "reference": kda_reference,
    "xla": kda_xla,
    "pallas_tpu": kda_pallas_tpu,
    "pallas_gpu": kda_pallas_gpu,
}


def kda(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H K"],
    beta: Float[Array, "B T H"],
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    g_min: float | None = -5.0,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], State]:
    """Kimi Delta Attention (Kimi Linear, arXiv:2510.26692, Eq. 1), per batch row and head, from a state S [K, V]:

        S <- Diag(exp g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = scale * S^T q_t

    q and k are used as given: L2 normalisation is the caller's. Matmul operands have the dtype of q, k, v; decays,
    the triangular inverse and the state are float32 (float64 for float64 inputs). Differentiable in q, k, v, g,
    beta and initial_state. An output depends on earlier tokens of its own segment only, bit for bit.

    Args:
      q, k, v: queries, keys, values; bfloat16, float32 or float64, all alike. T may be any length, K may differ from V.
      g: log decay of each key channel in nats, <= 0 and finite; float32 (or float64).
      beta: step size of the update, in [0, 1] for a stable state; any float dtype.
      scale: factor on the output, K**-0.5 if None.
      initial_state: [B, H, K, V], the state before the first token of each row (zero if None); or [B, S, H, K, V],
        one per segment, which needs segment_ids.
      segment_ids: non-decreasing along T; a change of id starts a new document. With a state of [B, H, K, V] the
        ids may be any integers: the first document of a row starts from initial_state, the others from zero. With
        [B, S, H, K, V] segment s starts from initial_state[:, s], and tokens whose id lies outside [0, S) belong
        to no segment: their output is zero and no state sees them.
      g_min: the caller's promise that g >= g_min, which lets every score tile be a dense matmul. What must hold in
        truth is that any 15 neighbouring gates of a channel sum to more than -87 (the exponent range of float32): 5.8
        per token. A broken promise gives non-finite outputs. None promises nothing: the pairs inside 16-token tiles
        are then summed one by one, which is right for any decay and slower.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      o: [B, T, H, V], dtype of v.
      final_state: the state after the last token of each row, or of each segment ([B, S, H, K, V]; a segment without
        tokens keeps its initial state). float32, or float64 for float64 inputs.

    Raises:
      ValueError: shapes, dtypes or arguments that do not fit together; the message says how to mend them.
      NotImplementedError: a named implementation cannot serve the call.
    """
    check(q, k, v, g, beta, initial_state, segment_ids, g_min)
    B, T, H, K = q.shape
    accumulate = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    if initial_state is None:
        initial_state = jnp.zeros((B, H, K, v.shape[-1]), accumulate)
    if T == 0:
        return jnp.zeros_like(v), initial_state.astype(accumulate)
    return dispatch(
        "kda",
        IMPLEMENTATIONS,
        implementation,
        q,
        k,
        v,
        g.astype(accumulate),
        beta.astype(accumulate),
        scale=K**-0.5 if scale is None else scale,
        initial_state=initial_state.astype(accumulate),
        segment_ids=segment_ids,
        g_min=g_min,
    )


def check(q, k, v, g, beta, initial_state, segment_ids, g_min) -> None:
    """Raises ValueError, in one line, for the first argument that does not fit."""
    if q.ndim != 4:
        raise ValueError(f"kda: q has shape {q.shape}; reshape it to [B, T, H, K]")
    B, T, H, K = q.shape
    V = v.shape[-1]
    needed = {
        "k": (k, (B, T, H, K)),
        "v": (v, (B, T, H, V)),
        "g": (g, (B, T, H, K)),
        "beta": (beta, (B, T, H)),
    }
    for name, (array, shape) in needed.items():
        if array.shape != shape:
            raise ValueError(f"kda: {name} has shape {array.shape}; q of shape {q.shape} needs {shape}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"kda: q, k, v have dtypes {q.dtype}, {k.dtype}, {v.dtype}; cast them to one")
    if q.dtype not in (jnp.bfloat16, jnp.float32, jnp.float64):
        raise ValueError(
            f"kda: q, k, v have dtype {q.dtype}, too narrow for e^37; cast them to bfloat16 or float32"
        )
    if g.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(
            f"kda: g has dtype {g.dtype}, which rounds slow decays to none; compute the gate in float32"
        )
    if g_min is not None and g_min > 0:
        raise ValueError(
            f"kda: g_min={g_min} is positive; log decays are <= 0, so pass the lower bound, e.g. -5.0"
        )
    if segment_ids is not None and (
        segment_ids.shape != (B, T) or not jnp.issubdtype(segment_ids.dtype, jnp.integer)
    ):
        raise ValueError(
            f"kda: segment_ids is {segment_ids.dtype}{segment_ids.shape}; pass integers of shape {(B, T)}"
        )
    if initial_state is None:
        return
    if initial_state.ndim == 5:
        S = initial_state.shape[1]
        if segment_ids is None:
            raise ValueError(
                f"kda: initial_state has shape {initial_state.shape}, one per segment; pass segment_ids"
            )
        if initial_state.shape != (B, S, H, K, V) or S == 0:
            raise ValueError(
                f"kda: initial_state has shape {initial_state.shape}; pass {(B, max(S, 1), H, K, V)}"
            )
    elif initial_state.shape != (B, H, K, V):
        raise ValueError(
            f"kda: initial_state has shape {initial_state.shape}; pass {(B, H, K, V)} or [B, S, H, K, V]"
        )

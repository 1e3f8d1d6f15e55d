"""The public decoding step: arguments checked, an implementation chosen."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels.dispatch import dispatch
from pallas_kernels.kda_decode.pallas_gpu import kda_decode_pallas_gpu
from pallas_kernels.kda_decode.pallas_tpu import kda_decode_pallas_tpu
from pallas_kernels.kda_decode.reference import kda_decode_reference
from pallas_kernels.kda_decode.xla import kda_decode_xla

IMPLEMENTATIONS = {
    "reference": kda_decode_reference,
    "xla": kda_decode_xla,
    "pallas_tpu": kda_decode_pallas_tpu,
    "pallas_gpu": kda_decode_pallas_gpu,
}


def kda_decode(
    qkv: Float[Array, "B 3 H K"],
    decay: Float[Array, "B H K"] | Float[Array, "B R"],
    beta: Float[Array, "B H"] | Float[Array, "B D"],
    gate: Float[Array, "B H K"] | None,
    taps: Float[Array, "B S 3 H K"],
    state: Float[Array, "B H K K"],
    *,
    conv: Float[Array, "3 H K C"] | None,
    a_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    out_norm: Float[Array, " K"],
    g_min: float | None,
    norm_eps: float = 1e-5,
    active: Bool[Array, " B"] | None = None,
    decay_up: Float[Array, "X R"] | None = None,
    beta_in: Float[Array, "Y D"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B H K"], Float[Array, "B S 3 H K"], Float[Array, "B H K K"]]:
    """One token of B sequences through a KDA layer, between its input projections and its output projection.

        q, k, v = silu(conv(qkv));   q, k to unit length;   g = g_min sigmoid(e^a_log (decay + dt_bias))
        S <- Diag(e^g) S;   S <- S + sigmoid(beta) k (v - S^T k)^T;   o = K^-0.5 S^T q           (Kimi Linear, Eq. 1)
        o <- rms_norm(o) out_norm sigmoid(gate)

    Memory-bound: the states are read and written once, 8 K^2 bytes per sequence and head. Not differentiable in the
    kernels: it is for generation.

    Args:
      qkv: projections of the token before the convolution, in the compute dtype (bfloat16, float32 or float64).
      decay, beta, gate: logits, without dt_bias; with `decay_up`, decay is what that multiplies, and with `beta_in`,
        beta. gate=None: no output gate.
      taps: the convolutions' last inputs, oldest first; S = C - 1, or 0 without convolution.
      state: recurrent state after the last token, [K, V] per head; float32, or float64 for float64 inputs.
      conv: weights of the three depthwise convolutions, whose last tap meets this token; None: no convolution.
      g_min: bound of the log decay in nats; None: g = -e^a_log softplus(decay + dt_bias).
      norm_eps: added to the mean of squares of an output head.
      active: sequences that have a token; taps and states of the others keep every bit, and their outputs mean nothing.
        None: all.
      decay_up: [H K or more, R]: row h K + k gives the decay logit of channel k of head h; a product in float32.
      beta_in: [H or more, D]: row h gives the logit of head h's step size; a product in float32.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      o in the dtype of qkv, taps and state after this token. Donate taps and state to have them updated in place.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      NotImplementedError: a named implementation cannot serve the call.
    """
    B, _, H, K = qkv.shape
    accumulate = jnp.float64 if qkv.dtype == jnp.float64 else jnp.float32
    if state.dtype != accumulate:
        raise ValueError(
            f"kda_decode: state is {state.dtype}, which drifts with length; keep it in {accumulate.__name__}"
        )
    C = 1 if conv is None else conv.shape[-1]
    needed = {
        "decay": (decay, (B, H, K) if decay_up is None else (B, decay_up.shape[1])),
        "beta": (beta, (B, H) if beta_in is None else (B, beta_in.shape[1])),
        "gate": (gate, (B, H, K)),
        "taps": (taps, (B, C - 1, 3, H, K)),
        "state": (state, (B, H, K, K)),
        "conv": (conv, (3, H, K, C)),
    }
    for name, (array, shape) in needed.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"kda_decode: {name} has shape {array.shape}; qkv of shape {qkv.shape} needs {shape}")
    if taps.dtype != qkv.dtype:
        raise ValueError(f"kda_decode: taps are {taps.dtype}; keep them in the dtype of qkv, {qkv.dtype}")
    return dispatch(
        "kda_decode",
        IMPLEMENTATIONS,
        implementation,
        qkv,
        decay,
        beta,
        gate,
        taps,
        state,
        conv=conv,
        a_log=a_log,
        dt_bias=dt_bias,
        out_norm=out_norm,
        g_min=g_min,
        norm_eps=norm_eps,
        active=active,
        decay_up=decay_up,
        beta_in=beta_in,
    )

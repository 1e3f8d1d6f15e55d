"""KDA on Hopper GPUs, as Pallas Mosaic-GPU kernels: two for the forward pass and two more for the backward pass.

    chunk_operands   all chunks at once    scores, triangular inverse, decayed keys and queries
    state_pass       chunk after chunk     the state, the outputs
    state_adjoint    from last to first    the state's gradient, dv
    chunk_adjoint    all chunks at once    dq, dk, dg, dbeta

The mathematics is that of `xla.py`; `gpu_chunk.py` and `gpu_backward.py` say what differs.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.gpu_backward import chunk_adjoint
from pallas_kernels.kda.gpu_chunk import G_MIN, C, D, chunk_operands, documents
from pallas_kernels.kda.gpu_state import state_adjoint, state_pass
from pallas_kernels.kda.reference import State

# The gradient of beta divides by beta twice. Zero is replaced by what changes no result.
_SMALLEST_BETA = 1e-12

_MOST_CHUNKS = 65535  # of the second axis of a CUDA grid


def kda_pallas_gpu(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    g_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    *,
    scale: float,
    initial_state: State,
    segment_ids: Int[Array, "B T"] | None,
    g_min: float | None = -5.0,
) -> tuple[Float[Array, "B T H V"], State]:
    """`api.kda` with T > 0, defaults resolved and g, beta, initial_state in float32.

    Raises:
      NotImplementedError: anything but bfloat16 heads of 128 x 128 with gates in [-5, 0], one state per row, on Hopper.
    """
    K, V = initial_state.shape[-2:]
    if (K, V) != (D, D):
        raise NotImplementedError(f"K={K}, V={V}; heads of 128 x 128 are supported")
    if q_BTHK.dtype != jnp.bfloat16:
        raise NotImplementedError(f"q, k, v are {q_BTHK.dtype}; bfloat16 is supported")
    if g_min is None or g_min < G_MIN:
        raise NotImplementedError(f"g_min={g_min}; gates of at least {G_MIN} are supported")
    if initial_state.ndim != 4:
        raise NotImplementedError("one state per segment; one per row is supported")
    if not _is_hopper():
        raise NotImplementedError("a GPU of compute capability 9.0 (H100, H200) is needed")
    T = q_BTHK.shape[1]
    if T > C * _MOST_CHUNKS:
        raise NotImplementedError(f"T={T}; at most {C * _MOST_CHUNKS} tokens are supported")
    pad = lambda x: jnp.pad(x, ((0, 0), (0, -T % C)) + ((0, 0),) * (x.ndim - 2))  # zeros change no state
    beta_BHT = pad(beta_BTH).swapaxes(1, 2)
    nonzero_BHT = jnp.where(jnp.abs(beta_BHT) < _SMALLEST_BETA, _SMALLEST_BETA, beta_BHT)
    beta_BHT = beta_BHT + jax.lax.stop_gradient(nonzero_BHT - beta_BHT)  # the gradient of beta itself
    inputs = *(pad(x) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK)), beta_BHT
    if segment_ids is not None:
        segment_ids = jnp.pad(
            segment_ids, ((0, 0), (0, -T % C)), mode="edge"
        )  # the last state passes the padding
    o_BTHV, final_BHKV = _kda(float(scale), *inputs, initial_state, documents(segment_ids))
    return o_BTHV[:, :T], final_BHKV


def _is_hopper() -> bool:
    mesh_device = jax.sharding.get_abstract_mesh().abstract_device
    kind = mesh_device.device_kind if mesh_device else jax.devices()[0].device_kind
    return any(name in kind for name in ("H100", "H200", "H800", "H20", "GH200"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(scale, q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BHT, initial_BHKV, docs):
    operands = chunk_operands(q_BTHK, k_BTHK, g_BTHK, beta_BHT, docs, scale)
    return state_pass(*operands, v_BTHV, beta_BHT, initial_BHKV, keep=False)


def _forward(scale, q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BHT, initial_BHKV, docs):
    operands = chunk_operands(q_BTHK, k_BTHK, g_BTHK, beta_BHT, docs, scale)
    o_BTHV, final_BHKV, s, u = state_pass(*operands, v_BTHV, beta_BHT, initial_BHKV, keep=True)
    return (o_BTHV, final_BHKV), (q_BTHK, k_BTHK, g_BTHK, beta_BHT, docs, operands, s, u)


def _backward(scale, kept, cotangents):
    q_BTHK, k_BTHK, g_BTHK, beta_BHT, docs, operands, s, u = kept
    do_BTHV, d_final_BHKV = cotangents
    dv_BTHV, ds, d_initial_BHKV = state_adjoint(*operands, do_BTHV, beta_BHT, d_final_BHKV)
    dq_BTHK, dk_BTHK, dg_BTHK, dbeta_BHT = chunk_adjoint(
        q_BTHK, k_BTHK, g_BTHK, beta_BHT, do_BTHV, u, dv_BTHV, s, ds, docs, scale
    )
    return dq_BTHK, dk_BTHK, dv_BTHV, dg_BTHK, dbeta_BHT, d_initial_BHKV, None


_kda.defvjp(_forward, _backward)

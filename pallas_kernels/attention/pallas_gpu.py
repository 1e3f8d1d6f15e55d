"""Attention on Hopper GPUs, as Pallas Mosaic-GPU kernels: one for the forward pass, two for the backward pass."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.gpu_backward import key_gradients, query_gradient
from pallas_kernels.attention.gpu_forward import forward
from pallas_kernels.attention.gpu_tiles import BLOCK
from pallas_kernels.dispatch import is_hopper

_KEY_SIZES = (64, 96, 128, 192)
_VALUE_SIZES = (64, 128)
_MOST_BYTES = 16 << 30  # of keys and values expanded from a latent at once


def attention(q_BTHK, k_BTHK, v_BTHV, scale, segment_ids):
    """`api.attention`.

    Raises:
      NotImplementedError: what `attend` refuses.
    """
    ids = (None, None) if segment_ids is None else (segment_ids[None], segment_ids)
    o, top = attend(q_BTHK[None], k_BTHK, v_BTHV, jnp.zeros((1,), jnp.int32), *ids, scale=scale)
    return o[0], top


def attention_from(q_BtHK, k_BTHK, v_BTHV, start_B, scale):
    """`api.attention_from`.

    Raises:
      NotImplementedError: what `attend` refuses.
    """
    o, top = attend(q_BtHK[None], k_BTHK, v_BTHV, start_B[None], None, None, scale=scale)
    return o[0], top


def runs(expand, q_GBtHK, start_G, ids_GBt, weights, source, ids_BT, scale):
    """`api.attention_runs`: all keys and values are expanded at once.

    Raises:
      NotImplementedError: keys and values too large for that, and what `attend` refuses.
    """
    k, v = jax.eval_shape(expand, weights, source)
    _check(q_GBtHK, k, v, scale)
    if (size := 2 * (k.size + v.size)) > _MOST_BYTES:
        raise NotImplementedError(
            f"keys and values of {size >> 30} GiB; at most {_MOST_BYTES >> 30} GiB are supported"
        )
    return attend(q_GBtHK, *expand(weights, source), start_G, ids_GBt, ids_BT, scale=scale)


def attend(
    q_GBtHK: Float[Array, "G B t H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    start_G: Int[Array, " G"] | Int[Array, "G B"],
    ids_GBt: Int[Array, "G B t"] | None,
    ids_BT: Int[Array, "B T"] | None,
    *,
    scale: float,
) -> tuple[Float[Array, "G B t H V"], Float[Array, " H"]]:
    """Attention of G runs of t neighbouring queries each; a query sees its own document's keys up to itself.

    Args:
      start_G: position of each run's first query in the sequence of T keys, or in every row's, [G, B]; may be computed
        on the device.
      ids_GBt, ids_BT: document of every query and of every key, or None for one document.

    Returns:
      The outputs in float32, and the largest scaled logit of each head, through which no gradient flows.

    Raises:
      NotImplementedError: anything but bfloat16 heads of up to 192 with values of 64 or 128 on Hopper.
    """
    _check(q_GBtHK, k_BTHK, v_BTHV, scale)
    G, B, t, H, K = q_GBtHK.shape
    V = v_BTHV.shape[-1]
    size = min(x for x in _KEY_SIZES if x >= K)
    heads = lambda x: jnp.pad(
        x, ((0, 0), (0, -x.shape[1] % BLOCK), (0, 0), (0, size - K))
    )  # zeros change no logit
    tokens = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)) + ((0, 0),) * (x.ndim - 2), mode="edge")
    start_N = jnp.broadcast_to(start_G.astype(jnp.int32).reshape(G, -1), (G, B)).reshape(-1)
    flat = lambda x: x.reshape(G * B, *x.shape[2:])
    ids = None, None
    if ids_BT is not None:
        ids = tokens(flat(ids_GBt).astype(jnp.int32)), tokens(ids_BT.astype(jnp.int32))
    o_NtHV, top_NHt = _attend(
        float(scale), heads(flat(q_GBtHK)), heads(k_BTHK), tokens(v_BTHV), start_N, *ids
    )
    highest_H = jax.lax.stop_gradient(top_NHt[..., :t].max((0, 2)))
    return o_NtHV[:, :t].reshape(G, B, t, H, V), highest_H


def _check(q, k, v, scale):
    K, V = q.shape[-1], v.shape[-1]
    if K > max(_KEY_SIZES) or V not in _VALUE_SIZES:
        raise NotImplementedError(
            f"K={K}, V={V}; K up to {max(_KEY_SIZES)} and V in {_VALUE_SIZES} are supported"
        )
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v)):
        raise NotImplementedError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; bfloat16 is supported")
    if scale <= 0:
        raise NotImplementedError(f"scale={scale}; a positive scale is supported")
    if q.size == 0:
        raise NotImplementedError(f"no queries in {q.shape}; at least one is supported")
    if not is_hopper():
        raise NotImplementedError("a GPU of compute capability 9.0 (H100, H200) is needed")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scale, q_NtHK, k_BTHK, v_BTHV, start_N, ids_Nt, ids_BT):
    o_NtHV, _, top_NHt = forward(q_NtHK, k_BTHK, v_BTHV, start_N, ids_Nt, ids_BT, scale=scale)
    return o_NtHV, top_NHt


def _forward(scale, q_NtHK, k_BTHK, v_BTHV, start_N, ids_Nt, ids_BT):
    o_NtHV, lse_NHt, top_NHt = forward(q_NtHK, k_BTHK, v_BTHV, start_N, ids_Nt, ids_BT, scale=scale)
    return (o_NtHV, top_NHt), (q_NtHK, k_BTHK, v_BTHV, start_N, ids_Nt, ids_BT, o_NtHV, lse_NHt)


def _backward(scale, kept, cotangents):
    q_NtHK, k_BTHK, v_BTHV, start_N, ids_Nt, ids_BT, o_NtHV, lse_NHt = kept
    do_NtHV = cotangents[0].astype(jnp.bfloat16)
    # from the rounded dO that the products see, so that the gradients of a query's scores add up to zero
    own_NHt = (do_NtHV.astype(jnp.float32) * o_NtHV).sum(-1).swapaxes(1, 2)
    inputs = q_NtHK, k_BTHK, v_BTHV, do_NtHV, lse_NHt, own_NHt, start_N, ids_Nt, ids_BT
    dq_NtHK = query_gradient(*inputs, scale=scale)
    dk_BTHK, dv_BTHV = key_gradients(*inputs, scale=scale)
    return dq_NtHK, dk_BTHK, dv_BTHV, None, None, None


_attend.defvjp(_forward, _backward)

"""KDA on Hopper GPUs, as Pallas Mosaic-GPU kernels: two for the forward pass and two more for the backward pass.

    chunk_operands   all chunks at once    scores, triangular inverse, decayed keys and queries
    state_pass       chunk after chunk     the state, the outputs
    state_adjoint    from last to first    the state's gradient, dv
    chunk_adjoint    all chunks at once    dq, dk, dg, dbeta

The mathematics is that of `xla.py`; `gpu_tiles.py` and `gpu_backward.py` say what differs.

What the kernels hand to one another takes about 2.4 KB a token and head. Calls of more tokens and heads than the
workspace of `GPUConfig` go through the sequence in spans, and keep for the backward pass only a few states of each: a
span's operands and states are formed again there, from all the kept states at once, so that few heads fill the chip. So
a million tokens need hardly more memory than their inputs, outputs and gradients. Packed rows with a state of their own
per segment go through in one piece.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import is_hopper, target
from pallas_kernels.kda.config import GPUConfig, gpu_config
from pallas_kernels.kda.gpu_backward import adjoint_shapes, chunk_adjoint
from pallas_kernels.kda.gpu_chunk import chunk_operands
from pallas_kernels.kda.gpu_state import segment_marks, state_adjoint, state_pass
from pallas_kernels.kda.gpu_tiles import G_MIN, LOG2E, C, D, Decay, documents
from pallas_kernels.kda.reference import State
from pallas_kernels.kda.segments import collect, segment_layout, spread

_MOST_CHUNKS = 65535  # of the second axis of a CUDA grid
_BLOCKS = 132  # of a state pass that run at once: one on each multiprocessor

# The gradient of beta divides by beta twice. Zero is replaced by what changes no result.
_SMALLEST_BETA = 1e-12


class Plan(NamedTuple):
    """What the compiled code depends on besides shapes and dtypes."""

    scale: float
    g_min: float
    spans: int
    chunks: int  # of a span
    parts: int  # of a span, whose states are known before its backward pass


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
    config: GPUConfig | None = None,
) -> tuple[Float[Array, "B T H V"], State]:
    """`api.kda` with T > 0, defaults resolved and g, beta, initial_state in float32. config=None: the tuned sizes.

    Raises:
      NotImplementedError: anything but bfloat16 heads of 64 or 128 with gates in [-5, 0] on Hopper.
    """
    _refuse(q_BTHK, initial_state, g_min)
    decay = (_wide(g_BTHK, 3),)
    return _run(q_BTHK, k_BTHK, v_BTHV, decay, beta_BTH, scale, G_MIN, initial_state, segment_ids, config)


def kda_gated_pallas_gpu(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    decay_logits_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    a_log_H: Float[Array, " H"],
    dt_bias_HK: Float[Array, "H K"],
    *,
    g_min: float,
    scale: float,
    initial_state: State,
    segment_ids: Int[Array, "B T"] | None,
    config: GPUConfig | None = None,
) -> tuple[Float[Array, "B T H V"], State]:
    """`gated.kda_gated` with T > 0, beta after its sigmoid, defaults resolved. config=None: the tuned sizes.

    The kernels normalise q and k and compute log decays where they read them, and give the gradients of what was
    projected: neither unit vectors nor decays, nor the gradients of either, are ever in memory.

    Raises:
      NotImplementedError: as `kda_pallas_gpu`.
    """
    _refuse(q_BTHK, initial_state, g_min)
    if decay_logits_BTHK.dtype != jnp.bfloat16:
        decay_logits_BTHK = decay_logits_BTHK.astype(jnp.float32)
    rate_HK = jnp.broadcast_to(-LOG2E * jnp.exp(a_log_H)[:, None], dt_bias_HK.shape)
    decay = tuple(_wide(x, x.ndim - 1) for x in (decay_logits_BTHK, rate_HK, rate_HK * dt_bias_HK))
    return _run(q_BTHK, k_BTHK, v_BTHV, decay, beta_BTH, scale, g_min, initial_state, segment_ids, config)


def _refuse(q_BTHK: Array, initial_state: Array, g_min: float | None) -> None:
    K, V = initial_state.shape[-2:]
    if not {K, V} <= {D // 2, D}:
        raise NotImplementedError(f"K={K}, V={V}; 64 and 128 are supported")
    if q_BTHK.dtype != jnp.bfloat16:
        raise NotImplementedError(f"q, k, v are {q_BTHK.dtype}; bfloat16 is supported")
    if g_min is None or g_min < G_MIN:
        raise NotImplementedError(f"g_min={g_min}; gates of at least {G_MIN} are supported")
    if not is_hopper():
        raise NotImplementedError("a GPU of compute capability 9.0 (H100, H200) is needed")


def _wide(x: Array, *axes: int) -> Array:
    """x with zeros up to D channels: a zero channel of q and k meets nothing, one of v stays zero."""
    return jnp.pad(x, [(0, D - size if axis in axes else 0) for axis, size in enumerate(x.shape)])


def _run(q_BTHK, k_BTHK, v_BTHV, decay: Decay, beta_BTH, scale, g_min, initial_state, segment_ids, config):
    if initial_state.ndim == 4:
        workspace = (config or gpu_config(target()[1], *initial_state.shape[-2:])).workspace
        inputs = (q_BTHK, k_BTHK, v_BTHV, decay, beta_BTH)
        return _rows(*inputs, scale, g_min, initial_state, segment_ids=segment_ids, workspace=workspace)
    # One state per segment: every segment starts a chunk of its own. See `xla.kda_xla`.
    S = initial_state.shape[1]
    place_BT, slot_BN = segment_layout(segment_ids, S, C)
    move = lambda x, fill=0.0: spread(x, place_BT, slot_BN.shape[1] * C, fill)
    ran_BS111 = (slot_BN[:, None] == jnp.arange(S)[:, None]).any(-1)[:, :, None, None, None]
    decay = (move(decay[0], _no_decay(decay)), *decay[1:])
    inputs = (move(q_BTHK), move(k_BTHK), move(v_BTHV), decay, move(beta_BTH))
    o_BTHV, table_BSHKV = _rows(*inputs, scale, g_min, jnp.where(ran_BS111, initial_state, 0), slot_BN=slot_BN)
    # What the kernels leave for a segment without a chunk, state or gradient, is whatever was in memory.
    return collect(o_BTHV, place_BT), jnp.where(ran_BS111, table_BSHKV, initial_state)


def _no_decay(decay: Decay) -> float:
    """The log decay, or logit, of a token that changes no state."""
    return 0.0 if len(decay) == 1 else -1e30


def _rows(
    q_BTHK, k_BTHK, v_BTHV, decay, beta_BTH, scale, g_min, initial_state, segment_ids=None, slot_BN=None, workspace=0
):  # fmt: skip
    B, T, H, _ = q_BTHK.shape
    K, V = initial_state.shape[-2:]
    chunks = -(-T // C)
    most = min(max(1, workspace // (C * B * H)), _MOST_CHUNKS)
    if slot_BN is not None or chunks <= most:
        plan = Plan(float(scale), float(g_min), 1, chunks, 1)
    else:
        parts = min(max(1, _BLOCKS // (B * H)), most)
        spans = -(-chunks // (most - most % parts))
        plan = Plan(float(scale), float(g_min), spans, parts * -(-chunks // (spans * parts)), parts)
    padding = plan.spans * plan.chunks * C - T

    def pad(x, value=0):  # k = beta = g = 0 changes no state
        return jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2), constant_values=value)

    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)), mode="edge")  # the last state passes the padding
    beta_BHT = pad(beta_BTH).swapaxes(1, 2)
    nonzero_BHT = jnp.where(jnp.abs(beta_BHT) < _SMALLEST_BETA, _SMALLEST_BETA, beta_BHT)
    beta_BHT = beta_BHT + lax.stop_gradient(nonzero_BHT - beta_BHT)  # the gradient of beta itself
    o_BTHV, final_state = _kda(
        plan,
        *(_wide(pad(x), 3) for x in (q_BTHK, k_BTHK, v_BTHV)),
        (pad(decay[0], _no_decay(decay)), *decay[1:]),
        beta_BHT,
        _wide(initial_state, initial_state.ndim - 2, initial_state.ndim - 1),
        documents(segment_ids),
        None if slot_BN is None else segment_marks(slot_BN),
    )
    return o_BTHV[:, :T, :, :V], final_state[..., :K, :V]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(plan, q_BTHK, k_BTHK, v_BTHV, decay, beta_BHT, initial_BHKV, docs, marks):
    return _forward(plan, q_BTHK, k_BTHK, v_BTHV, decay, beta_BHT, initial_BHKV, docs, marks, keep=False)[0]


def _operands(plan, q_BTHK, k_BTHK, decay, beta_BHT, docs, start, chunks):
    return chunk_operands(
        q_BTHK, k_BTHK, decay, beta_BHT, docs, start, chunks=chunks, scale=plan.scale, g_min=plan.g_min
    )


def _chunk(n: Array | int) -> Int[Array, " 1"]:
    return jnp.full((1,), n, jnp.int32)


@functools.partial(jax.jit, static_argnames=("plan", "keep"))
def _forward(plan, q_BTHK, k_BTHK, v_BTHV, decay, beta_BHT, initial_BHKV, docs, marks, keep=True):
    inputs = (q_BTHK, k_BTHK, decay, beta_BHT, docs)
    if plan.spans == 1:
        operands = _operands(plan, *inputs, _chunk(0), plan.chunks)
        o_BTHV, final_BHKV, *states = state_pass(
            *operands, v_BTHV, beta_BHT, initial_BHKV, _chunk(0), marks, keep=keep
        )
        return (o_BTHV, final_BHKV), (inputs, v_BTHV, None, (operands, *states), marks)

    o_ref = jax.empty_ref(jax.typeof(v_BTHV))
    chunks = plan.chunks // plan.parts

    def part(entry_BHKV, i):
        start = _chunk(i * chunks)
        operands = _operands(plan, *inputs, start, chunks)
        (exit_BHKV,) = state_pass(*operands, v_BTHV, beta_BHT, entry_BHKV, start, keep=False, into=(o_ref,))
        return exit_BHKV, entry_BHKV

    final_BHKV, entries = lax.scan(part, initial_BHKV, jnp.arange(plan.spans * plan.parts))
    return (jax.freeze(o_ref), final_BHKV), (inputs, v_BTHV, entries, None, None)


@functools.partial(jax.jit, static_argnames="plan")
def _backward(plan, kept, cotangents):
    inputs, v_BTHV, entries, of_span, marks = kept
    q_BTHK, k_BTHK, decay, beta_BHT, docs = inputs
    do_BTHV, d_final_BHKV = cotangents

    def side_by_side(operands, entries_PBHKV, start):
        """The states and U of every chunk of a span, from the states at the entry of its parts."""
        P, B, H, *KV = entries_PBHKV.shape
        entries = jnp.moveaxis(entries_PBHKV, 0, 2).reshape(B, H * P, *KV)
        kept = state_pass(
            *operands, v_BTHV, beta_BHT, entries, start, keep=True, outputs=False, parts=plan.parts
        )[1:]
        return (x.reshape(B, H, plan.chunks, *x.shape[3:]) for x in kept)

    def adjoint(operands, s, u, d_exit_BHKV, start, into=((), ())):
        *dv_BTHV, ds, d_entry_BHKV = state_adjoint(
            *operands, do_BTHV, beta_BHT, d_exit_BHKV, start, marks, into=into[0]
        )
        (dv_BTHV,) = dv_BTHV or into[0]
        gradients = chunk_adjoint(
            q_BTHK, k_BTHK, decay, beta_BHT, do_BTHV, u, dv_BTHV, s, ds, docs, start,
            scale=plan.scale, g_min=plan.g_min, into=into[1],
        )  # fmt: skip
        return d_entry_BHKV, dv_BTHV, *gradients

    if plan.spans == 1:
        d_initial_BHKV, *gradients = adjoint(*of_span, d_final_BHKV, _chunk(0))
    else:
        dv_ref, *refs = map(jax.empty_ref, (jax.typeof(v_BTHV), *adjoint_shapes(q_BTHK, decay)))

        def span(d_exit_BHKV, x):
            i, entries_PBHKV = x
            start = _chunk(i * plan.chunks)
            operands = _operands(plan, *inputs, start, plan.chunks)
            s, u = side_by_side(operands, entries_PBHKV, start)
            return adjoint(operands, s, u, d_exit_BHKV, start, ((dv_ref,), tuple(refs)))[0], None

        entries = entries.reshape(plan.spans, plan.parts, *entries.shape[1:])
        d_initial_BHKV, _ = lax.scan(span, d_final_BHKV, (jnp.arange(plan.spans), entries), reverse=True)
        gradients = [jax.freeze(x) for x in (dv_ref, *refs)]

    dv_BTHV, dq_BTHK, dk_BTHK, dbeta_BHT, *d_decay = gradients
    if len(decay) > 1:
        d_logits_BTHK, parts_BHNP2K = d_decay
        d_offset_HK, d_rate_HK = jnp.moveaxis(parts_BHNP2K.sum((0, 2, 3)), 1, 0)
        d_decay = (d_logits_BTHK, d_rate_HK, d_offset_HK)
    return dq_BTHK, dk_BTHK, dv_BTHV, tuple(d_decay), dbeta_BHT, d_initial_BHKV, None, None


_kda.defvjp(_forward, _backward)

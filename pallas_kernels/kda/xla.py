"""KDA in chunks, as matrix products that any XLA backend runs well, with a hand-written backward pass.

With S the state [K, V] at chunk entry, G_i the sum of the chunk's gates up to token i, and (all exponents <= 0)

    K+_i = e^{G_i} k_i,   Q+_i = e^{G_i} q_i,   K-_i = e^{G_C - G_i} k_i,
    P_ij = sum_c q_ic k_jc e^{G_ic - G_jc}  (j <= i),   X_ij = the same with k_i for q_i  (j < i),

a chunk is (Kimi Linear, arXiv:2510.26692, section 3; here in residual form, which never builds W = T diag(beta) K+)

    R = beta (V - K+ S),   T = (I + diag(beta) X)^-1,   U = T R,   O = Q+ S + P U,   S' = diag(e^{G_C}) S + K-^T U.

Everything except the pass of S from chunk to chunk is done for all chunks at once (`chunk`). The backward pass keeps
the inputs and the entry state of every chunk and recomputes the rest.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import target
from pallas_kernels.kda import chunk
from pallas_kernels.kda.config import ChunkConfig, chunk_config
from pallas_kernels.kda.numerics import lowest_kernel_gate
from pallas_kernels.kda.reference import State
from pallas_kernels.kda.segments import collect, segment_layout, spread


def kda_xla(
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
    config: ChunkConfig | None = None,
) -> tuple[Float[Array, "B T H V"], State]:
    """`api.kda` with T > 0, defaults resolved and g, beta, initial_state in the accumulation dtype.

    Raises:
      ValueError: tiles of `config` cannot hold decays down to g_min.
    """
    K, V = initial_state.shape[-2:]
    config = config or chunk_config(target()[1], K, V)
    lowest = lowest_kernel_gate(config.tile)
    if g_min is not None and g_min < lowest:
        raise ValueError(
            f"kda: g_min={g_min} overflows {config.tile}-row tiles; pass None, or at least {lowest:.2f}"
        )
    chunked = functools.partial(_chunked, chunk.Plan(float(scale), g_min, config))
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    if initial_state.ndim == 4:
        o_BTHV, table_BSHKV = chunked(inputs, initial_state[:, None], segment_ids, None)
        return o_BTHV, table_BSHKV[:, 0]

    # One state per segment: move the tokens so that every segment starts a chunk of its own. A token of no segment has
    # no place; a place without a token holds zeros, which change no state.
    place_BT, slot_BN = segment_layout(segment_ids, initial_state.shape[1], config.chunk)
    spread_inputs = tuple(spread(x, place_BT, slot_BN.shape[1] * config.chunk) for x in inputs)
    o, table_BSHKV = chunked(spread_inputs, initial_state, None, slot_BN)
    return collect(o, place_BT), table_BSHKV


def _chunk_rows(x_BTH: Array, C: int) -> Array:
    """[B, T, H, ..] -> [N, B, H, C, ..], the tail padded with zeros: k = beta = g = 0 changes no state."""
    x = jnp.pad(x_BTH, ((0, 0), (0, chunk.padding(x_BTH.shape[1], C))) + ((0, 0),) * (x_BTH.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, C, *x.shape[2:]), (1, 3), (0, 2))


def _token_rows(x_NBHC: Array, T: int) -> Array:
    """Undoes `_chunk_rows`."""
    x = jnp.moveaxis(x_NBHC, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]


class _Local(NamedTuple):
    """Inputs in chunks and all that follows from them without the state. ".." is N B H."""

    q: Array  # [.., C, K], times scale
    k: Array
    v: Array
    beta: Array  # [.., C, 1]
    see: chunk.Visibility
    decay: chunk.Decay
    tiles: chunk.Tiles
    qk_own: Array  # [.., C, 1]: the diagonal of P
    qk: Array  # [.., C, C]: P without its diagonal
    kk: Array  # [.., C, C]: X
    inverse: Array  # [.., C, C]: T
    q_enter: Array  # [.., C, K]: Q+
    k_enter: Array  # K+
    k_leave: Array  # K-


def _local(
    plan: chunk.Plan, mm: chunk.Products, inputs: tuple[Array, ...], segment_ids: Array | None
) -> _Local:
    config = plan.config
    q, k, v, g, beta = (_chunk_rows(x.astype(mm.accumulate), config.chunk) for x in inputs)
    q, beta = q * plan.scale, beta[..., None]
    see = chunk.visibility(segment_ids, config)
    decay = chunk.decays(g, see, config)
    tiles = chunk.tiles(q, k, decay, plan, mm)
    qk, kk = chunk.scores(q, k, tiles, decay, see, plan, mm)
    return _Local(
        q=q,
        k=k,
        v=v,
        beta=beta,
        see=see,
        decay=decay,
        tiles=tiles,
        qk_own=(q * k).sum(-1, keepdims=True),
        qk=qk,
        kk=kk,
        inverse=chunk.unit_lower_inverse(beta * kk, config.tile),
        q_enter=q * decay.enter,
        k_enter=k * decay.enter,
        k_leave=k * decay.leave,
    )


def _read(table_BSHKV: Array, slot_B: Array | None) -> Array:
    return (
        table_BSHKV[:, 0]
        if slot_B is None
        else jax.vmap(lambda states, slot: states[slot])(table_BSHKV, slot_B)
    )


def _write(table_BSHKV: Array, slot_B: Array | None, state_BHKV: Array) -> Array:
    if slot_B is None:
        return state_BHKV[:, None]
    return jax.vmap(lambda states, slot, state: states.at[slot].set(state))(table_BSHKV, slot_B, state_BHKV)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(plan: chunk.Plan, inputs, table_BSHKV, segment_ids_BT, slot_BN):
    """(o, final table) from (q, k, v, g, beta) and a table of states.

    Chunk n of row b finds its entry state in slot_BN[b, n] of the table and leaves its exit state there; slot_BN=None
    means the only slot.
    """
    return _forward(plan, inputs, table_BSHKV, segment_ids_BT, slot_BN)[0]


def _forward(plan, inputs, table_BSHKV, segment_ids_BT, slot_BN):
    v_BTHV = inputs[2]
    mm = chunk.Products(v_BTHV.dtype, table_BSHKV.dtype)
    x = _local(plan, mm, inputs, segment_ids_BT)

    def step(table_BSHKV, of_chunk):
        k_enter, k_leave, inverse, across, v, beta, slot_B = of_chunk
        state = _read(table_BSHKV, slot_B)
        entry = state.astype(mm.operand)
        residual = beta * (v - mm("bhck,bhkv->bhcv", k_enter, entry))
        update = mm("bhij,bhjv->bhiv", inverse, residual).astype(mm.operand)
        state = across[..., None] * state + mm("bhck,bhcv->bhkv", k_leave, update)
        return _write(table_BSHKV, slot_B, state), (entry, update)

    final_BSHKV, (entries, updates) = jax.lax.scan(
        step,
        table_BSHKV,
        (*_scan_operands(x, mm), x.decay.across, x.v, x.beta, None if slot_BN is None else slot_BN.T),
    )
    o = (
        mm("...ck,...kv->...cv", x.q_enter, entries)
        + mm("...ij,...jv->...iv", x.qk, updates)
        + x.qk_own * updates
    )
    o_BTHV = _token_rows(o, v_BTHV.shape[1]).astype(v_BTHV.dtype)
    return (o_BTHV, final_BSHKV), (inputs, entries, segment_ids_BT, slot_BN)


def _scan_operands(x: _Local, mm: chunk.Products) -> tuple[Array, ...]:
    return tuple(operand.astype(mm.operand) for operand in (x.k_enter, x.k_leave, x.inverse))


def _backward(plan, saved, cotangents):
    inputs, entries, segment_ids_BT, slot_BN = saved
    d_o_BTHV, d_final_BSHKV = cotangents
    mm = chunk.Products(d_o_BTHV.dtype, d_final_BSHKV.dtype)
    x = _local(plan, mm, inputs, segment_ids_BT)
    d_o = _chunk_rows(d_o_BTHV, plan.config.chunk)
    unexplained = x.v - mm("...ck,...kv->...cv", x.k_enter, entries)
    update = mm("...ij,...jv->...iv", x.inverse, x.beta * unexplained).astype(mm.operand)

    def step(d_table_BSHKV, of_chunk):
        k_enter, k_leave, inverse, across, beta, d_update, d_entry, slot_B = of_chunk
        d_exit = _read(d_table_BSHKV, slot_B)
        d_update = d_update + mm("bhck,bhkv->bhcv", k_leave, d_exit)
        d_residual = mm("bhij,bhiv->bhjv", inverse, d_update)
        d_entry = d_entry + across[..., None] * d_exit - mm("bhck,bhcv->bhkv", k_enter, beta * d_residual)
        return _write(d_table_BSHKV, slot_B, d_entry), (d_exit.astype(mm.operand), d_residual)

    d_update = mm("...ij,...iv->...jv", x.qk, d_o) + x.qk_own * d_o
    d_entry = mm("...ck,...cv->...kv", x.q_enter, d_o)
    slots = None if slot_BN is None else slot_BN.T
    of_chunks = (*_scan_operands(x, mm), x.decay.across, x.beta, d_update, d_entry, slots)
    d_initial_BSHKV, (d_exits, d_residual) = jax.lax.scan(step, d_final_BSHKV, of_chunks, reverse=True)

    d_v = x.beta * d_residual
    d_qk_own = (d_o * update).sum(-1, keepdims=True)
    d_qk = jnp.where(x.see.earlier, mm("...iv,...jv->...ij", d_o, update), 0)
    # Since U = T R, the gradient of T's argument is -dR U^T: no T^T dT T^T.
    d_a = jnp.where(x.see.earlier, -mm("...iv,...jv->...ij", d_residual, update), 0)
    d_beta = (d_residual * unexplained).sum(-1) + (d_a * x.kk).sum(-1)
    d_q_enter = mm("...cv,...kv->...ck", d_o, entries)
    d_k_enter = -mm("...cv,...kv->...ck", d_v, entries)
    d_k_leave = mm("...cv,...kv->...ck", update, d_exits)
    d_q, d_k, d_sum = chunk.scores_adjoint(d_qk, x.beta * d_a, x.q, x.k, x.tiles, x.decay, plan, mm)
    d_q = plan.scale * (d_q + x.decay.enter * d_q_enter + d_qk_own * x.k)
    d_k = d_k + x.decay.enter * d_k_enter + x.decay.leave * d_k_leave + d_qk_own * x.q

    # A gate scales what this and later tokens see of the past, what earlier tokens hand on, and what crosses the chunk.
    seen = d_sum + x.q_enter * d_q_enter + x.k_enter * d_k_enter
    crossing = x.decay.across * (entries.astype(mm.accumulate) * d_exits).sum(-1)
    d_g = (
        seen
        + chunk.sum_gates("...it,...ik->...tk", x.see.earlier, seen)
        + chunk.sum_gates("...tj,...jk->...tk", x.see.earlier, x.k_leave * d_k_leave)
        + crossing[..., None, :]
    )
    T = d_o_BTHV.shape[1]
    d_inputs = (d_q, d_k, d_v, d_g, d_beta)
    return (
        tuple(_token_rows(d, T).astype(x.dtype) for d, x in zip(d_inputs, inputs)),
        d_initial_BSHKV,
        None,
        None,
    )


_chunked.defvjp(_forward, _backward)

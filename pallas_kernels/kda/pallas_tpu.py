"""KDA on TPUs, as two Pallas Mosaic kernels: the forward pass, and the backward pass in one walk from last to first.

A program owns some heads of one row (`TPUConfig`). The chunks of the row are the last, sequential axis of the grid, and
the state stays in VMEM from one to the next, transposed ([V, K], float32) so that decays scale lanes. Between dependent
products of one head the matrix unit works for the others. HBM sees inputs, outputs and, when a gradient is wanted, the
entry state of every chunk in the dtype of q; the backward pass recomputes the rest of a chunk (`tpu_chunk`).

The mathematics is that of `xla.py`. Arrays of heads come as [B, T, H K]: a head is 128 lanes of a row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import target
from pallas_kernels.kda.config import TPUConfig, tpu_config
from pallas_kernels.kda.numerics import lowest_kernel_gate
from pallas_kernels.kda.reference import L2_EPS, State
from pallas_kernels.kda.segments import collect, segment_layout, spread
from pallas_kernels.kda.tpu_chunk import (
    NN,
    NT,
    TN,
    C,
    R,
    dot,
    f32,
    join_heads,
    keep,
    local,
    scores_adjoint,
    split_heads,
    sum_gates,
    visibility,
)

WIDTHS = (64, 128)
NO_DECAY = -1e30  # logit
LANES = 128
VMEM_BYTES = 32 << 20  # a quarter of what v5e and v6e have, half of v5p and tpu7x


def kda_pallas_tpu(
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
    config: TPUConfig | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H V"], State]:
    """`api.kda` with T > 0, defaults resolved and g, beta, initial_state in float32.

    Args:
      config: None: the tuned sizes.
      interpret: True or `pltpu.InterpretParams` run the kernels on any platform, for tests.

    Raises:
      NotImplementedError: anything but bfloat16 or float32 heads whose K and V are 64 or 128, gates bounded within the
        range of 16-row tiles, on a TPU.
    """
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    return _run(inputs, None, scale, g_min, initial_state, segment_ids, config, interpret)


def kda_gated_pallas_tpu(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    decay_logits_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    a_log_H: Float[Array, " H"],
    dt_bias_HK: Float[Array, "H K"],
    *,
    g_min: float | None,
    scale: float,
    initial_state: State,
    segment_ids: Int[Array, "B T"] | None,
    config: TPUConfig | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "B T H V"], State]:
    """`gated.kda_gated` with T > 0, beta after its sigmoid, defaults resolved. config, interpret: see `kda_pallas_tpu`.

    The kernels normalise q and k and compute log decays where they read them, and give the gradients of what was
    projected: neither unit vectors nor decays, nor the gradients of either, are ever in memory.

    Raises:
      NotImplementedError: as `kda_pallas_tpu`.
    """
    if decay_logits_BTHK.dtype != jnp.bfloat16:
        decay_logits_BTHK = decay_logits_BTHK.astype(f32)
    rate_HK = jnp.broadcast_to(jnp.exp(a_log_H)[:, None], dt_bias_HK.shape)
    gate_2X = jnp.stack([rate_HK, rate_HK * dt_bias_HK]).reshape(2, -1)
    inputs = (q_BTHK, k_BTHK, v_BTHV, decay_logits_BTHK, beta_BTH)
    return _run(inputs, gate_2X, scale, g_min, initial_state, segment_ids, config, interpret)


def _run(inputs, gate_2X, scale, g_min, initial_state, segment_ids, config, interpret):
    q_BTHK, H, (K, V) = inputs[0], inputs[0].shape[2], initial_state.shape[-2:]
    if K not in WIDTHS or V not in WIDTHS:
        raise NotImplementedError(f"K={K}, V={V}; heads with K and V of 64 or 128 are supported")
    if q_BTHK.dtype not in (jnp.bfloat16, f32):
        raise NotImplementedError(f"q, k, v are {q_BTHK.dtype}; bfloat16 and float32 are supported")
    lowest = lowest_kernel_gate(R)
    if g_min is None or g_min < lowest:
        raise NotImplementedError(f"g_min={g_min}; gates bounded by at least {lowest:.2f} are supported")
    heads = _heads_per_program(H, K, V, (config or tpu_config(target()[1], K, V)).heads)
    if not interpret and target()[0] != "tpu":
        raise NotImplementedError(f"the platform is {target()[0]}; a TPU is needed")

    plan = Plan(float(scale), float(g_min), heads, interpret)
    B, T = q_BTHK.shape[:2]
    logits_at = None if gate_2X is None else 3  # what changes no state: zeros, but logits of no decay
    if initial_state.ndim == 4:
        pad = lambda x, **how: jnp.pad(x, ((0, 0), (0, -T % C)) + ((0, 0),) * (x.ndim - 2), **how)
        # the last document's state passes the padding
        docs = None if segment_ids is None else documents(pad(segment_ids, mode="edge"))
        slots_BN = jnp.zeros((B, -(-T // C)), jnp.int32)
        inputs = tuple(pad(x, constant_values=NO_DECAY if i == logits_at else 0.0) for i, x in enumerate(inputs))
        o_BTHV, table = _kda(plan, inputs, gate_2X, initial_state[:, None], docs, slots_BN)
        return o_BTHV[:, :T], table[:, 0]
    place_BT, slots_BN = segment_layout(segment_ids, initial_state.shape[1], C)
    move = lambda x, fill: spread(x, place_BT, slots_BN.shape[1] * C, fill)
    inputs = tuple(move(x, NO_DECAY if i == logits_at else 0.0) for i, x in enumerate(inputs))
    o_BTHV, table = _kda(plan, inputs, gate_2X, initial_state, None, slots_BN)
    return collect(o_BTHV, place_BT), table


class Plan(NamedTuple):
    """What the kernels depend on besides shapes and dtypes."""

    scale: float
    g_min: float
    heads: int  # of a program
    interpret: Any

    @property
    def shift(self) -> float:
        """Nats from a tile's first row to the reference point of its decays."""
        return -self.g_min * (R - 1) / 2


def _heads_per_program(H: int, K: int, V: int, most: int) -> int:
    """The largest divisor of H, at most `most`, whose heads fill whole lanes; or all heads of a narrow row."""
    for heads in range(min(H, most), 0, -1):
        whole = all(heads * width % LANES == 0 for width in (K, V))
        if H % heads == 0 and (whole or heads == H):
            return heads
    raise NotImplementedError(
        f"H={H} heads with K={K}, V={V}; with widths of 64, H must be even or at most {most}"
    )


def documents(segment_ids: Int[Array, "B T"]) -> Float[Array, "B N 2 C"]:
    """For `tpu_chunk.visibility`: how many documents have started in the chunk, up to a token and up to the one before.

    The first chunk is entered by the first document. T is a multiple of C.
    """
    starts_BT = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    starts_BNC = starts_BT.reshape(starts_BT.shape[0], -1, C)
    ordinal_BNC = jnp.cumsum(starts_BNC, axis=-1)
    return jnp.stack([ordinal_BNC, ordinal_BNC - starts_BNC], axis=2).astype(f32)


# ---- the kernels


def _edges(slots_ref, n, N):
    """Whether chunk n is the first, and the last, of its slot of the state table."""
    b, slot = pl.program_id(0), slots_ref[pl.program_id(0), n]
    first = (n == 0) | (slots_ref[b, jnp.maximum(n - 1, 0)] != slot)
    last = (n == N - 1) | (slots_ref[b, jnp.minimum(n + 1, N - 1)] != slot)
    return first, last


class Raw(NamedTuple):
    """What the gradients of raw projections need."""

    norms: tuple  # 1 / |q|, 1 / |k|  [H, C, 1]
    logits: jax.Array  # [C, H K], of the decays
    gate: jax.Array  # [2, H K]: rate and offset of g = g_min sigmoid(rate logits + offset)
    open: jax.Array  # g / g_min


def _inputs(plan: Plan, docs_ref, gate_ref, q_ref, k_ref, v_ref, g_ref, beta_ref):
    """q times scale, k, v [H, C, ..], beta [H, C, 1] and what follows from them, in float32. Last, `Raw` or None."""
    q, k, v = (split_heads(ref[0].astype(f32), plan.heads) for ref in (q_ref, k_ref, v_ref))
    g, beta, raw = g_ref[0].astype(f32), split_heads(beta_ref[0, 0], plan.heads), None
    if gate_ref is not None:
        norms = [jax.lax.rsqrt(jnp.sum(x * x, axis=2, keepdims=True) + L2_EPS) for x in (q, k)]
        q, k = q * norms[0], k * norms[1]
        gate = gate_ref[...]
        raw = Raw(norms, g, gate, 1 / (1 + jnp.exp(-(gate[:1] * g + gate[1:]))))
        g = plan.g_min * raw.open
    q, see = q * plan.scale, visibility(None if docs_ref is None else docs_ref[0, 0])
    return q, k, v, beta, see, local(q, k, g, beta, see, plan.shift, q_ref.dtype), raw


def _forward_kernel(
    plan: Plan, slots_ref, docs_ref, gate_ref, inputs, initial_ref, o_ref, final_ref, entries_ref, state_HVK
):
    n, N = pl.program_id(2), pl.num_programs(2)
    first, last = _edges(slots_ref, n, N)

    @pl.when(first)
    def _():
        state_HVK[...] = initial_ref[0, 0]

    q, k, v, beta, _, x, _ = _inputs(plan, docs_ref, gate_ref, *inputs)
    operand = inputs[0].dtype
    entry = state_HVK[...].astype(operand)
    if entries_ref is not None:
        entries_ref[0, 0] = entry
    # keys above queries: the entry state is loaded into the matrix unit once
    entering = jnp.concatenate([k * x.enter, q * x.enter], axis=1).astype(operand)
    predicted, seen = jnp.split(dot(NT, entering, entry), 2, axis=1)
    residual = (beta * (v - predicted)).astype(operand)
    update = dot(NN, x.inverse.astype(operand), residual).astype(operand)
    o = seen + dot(NN, x.qk.astype(operand), update)
    o_ref[0] = join_heads(o).astype(o_ref.dtype)
    state_HVK[...] = x.across * state_HVK[...] + dot(TN, update, (k * x.leave).astype(operand))

    @pl.when(last)
    def _():
        final_ref[0, 0] = state_HVK[...]


def _backward_kernel(
    plan: Plan, slots_ref, docs_ref, gate_ref, inputs, entries_ref, d_o_ref, d_final_ref,
    d_inputs, d_gate_ref, d_initial_ref, d_state_HVK,
):  # fmt: skip
    N = pl.num_programs(2)
    first, last = _edges(slots_ref, N - 1 - pl.program_id(2), N)

    @pl.when(last)
    def _():
        d_state_HVK[...] = d_final_ref[0, 0]

    q, k, v, beta, see, x, raw = _inputs(plan, docs_ref, gate_ref, *inputs)
    operand = inputs[0].dtype
    rounded = lambda *parts: jnp.concatenate(parts, axis=1).astype(operand)
    q_enter, k_enter, k_leave = q * x.enter, k * x.enter, k * x.leave
    entry, d_exit = entries_ref[0, 0], d_state_HVK[...]
    d_exit_rounded, inverse = d_exit.astype(operand), x.inverse.astype(operand)
    d_o = split_heads(d_o_ref[0].astype(f32), plan.heads)

    unexplained = v - dot(NT, rounded(k_enter), entry)
    update = dot(NN, inverse, rounded(beta * unexplained)).astype(operand)
    d_update = dot(TN, rounded(x.qk), rounded(d_o)) + dot(NT, rounded(k_leave), d_exit_rounded)
    d_residual = dot(TN, inverse, rounded(d_update))
    d_v = beta * d_residual
    # outputs above the values that the state predicted: both read the entry state
    d_read = rounded(d_o, -d_v)
    d_state_HVK[...] = x.across * d_exit + dot(TN, d_read, rounded(q_enter, k_enter))
    d_q_enter, d_k_enter = jnp.split(dot(NN, d_read, entry), 2, axis=1)
    d_k_leave = dot(NN, update, d_exit_rounded)
    # Since U = T R, the gradient of T's argument is -dR U^T: no T^T dT T^T.
    d_qk, d_a = jnp.split(dot(NT, rounded(d_o, -d_residual), update), 2, axis=1)
    d_qk, d_a = keep(see.upto, d_qk), keep(see.earlier, d_a)
    d_beta = jnp.sum(d_residual * unexplained, 2, keepdims=True) + jnp.sum(d_a * x.kk, 2, keepdims=True)
    d_q, d_k, d_sum = scores_adjoint(d_qk, beta * d_a, x)
    d_q = plan.scale * (d_q + x.enter * d_q_enter)
    d_k = d_k + x.enter * d_k_enter + x.leave * d_k_leave

    # A gate scales what this and later tokens see of the past, what earlier tokens hand on, and what crosses the chunk.
    seen = d_sum + q_enter * d_q_enter + k_enter * d_k_enter
    handed = jnp.concatenate([join_heads(seen), join_heads(k_leave * d_k_leave)])
    crossing = x.across * jnp.sum(entry.astype(f32) * d_exit, axis=1, keepdims=True)
    d_g_CX = sum_gates(_gate_readers(see), handed) + join_heads(crossing)

    dq_ref, dk_ref, dv_ref, dg_ref, dbeta_ref = d_inputs
    if raw is not None:
        # x / |x| takes no part of the gradient that is along x
        along = lambda unit, d: unit * jnp.sum(unit * d, axis=2, keepdims=True)
        d_q, d_k = (n * (d - along(x, d)) for n, x, d in zip(raw.norms, (q / plan.scale, k), (d_q, d_k)))
        d_open = d_g_CX * (plan.g_min * raw.open * (1 - raw.open))
        d_g_CX = raw.gate[:1] * d_open
        d_gate = [jnp.sum(y, axis=0, keepdims=True) for y in (raw.logits * d_open, d_open)]

        @pl.when(pl.program_id(2) == 0)
        def _():
            d_gate_ref[0] = jnp.zeros_like(d_gate_ref[0])

        d_gate_ref[0] += jnp.concatenate(d_gate)
    for ref, d in ((dq_ref, d_q), (dk_ref, d_k), (dv_ref, d_v)):
        ref[0] = join_heads(d).astype(ref.dtype)
    dg_ref[0] = d_g_CX.astype(dg_ref.dtype)
    dbeta_ref[0, 0] = join_heads(d_beta)

    @pl.when(first)
    def _():
        d_initial_ref[0, 0] = d_state_HVK[...]


def _gate_readers(see):
    """0/1 weights [C, 2C]: gate t reaches the tokens i >= t of its document, and what the tokens j < t hand on."""
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    earlier = see.earlier.astype(f32)
    return jnp.concatenate([earlier.T + (i == j).astype(f32), earlier], axis=1)


# ---- the calls


def _specs(plan: Plan, K: int, V: int, chunk_of):
    """Block specs of the arrays that the kernels share; chunk_of(n) is the chunk that step n of the grid works on."""
    H = plan.heads
    rows = lambda width: pl.BlockSpec((1, C, H * width), lambda b, h, n, _: (b, chunk_of(n), h))
    beta = pl.BlockSpec((1, 1, C, H), lambda b, h, n, _: (b, h, chunk_of(n), 0))
    docs = pl.BlockSpec((1, 1, 2, C), lambda b, h, n, _: (b, chunk_of(n), 0, 0))
    table = pl.BlockSpec((1, 1, H, V, K), lambda b, h, n, slots: (b, slots[b, chunk_of(n)], h, 0, 0))
    entries = pl.BlockSpec((1, 1, H, V, K), lambda b, h, n, _: (b, chunk_of(n), h, 0, 0))
    gate = pl.BlockSpec((2, H * K), lambda b, h, n, _: (0, h))
    d_gate = pl.BlockSpec((1, 2, H * K), lambda b, h, n, _: (b, 0, h))
    return (rows(K), rows(K), rows(V), rows(K), beta), docs, table, entries, gate, d_gate


def _if(given, spec):
    """The spec of an array that may be None."""
    return None if given is None else spec


def _call(plan: Plan, name: str, kernel, grid, in_specs, out_specs, out_shape, V: int, K: int):
    return pl.pallas_call(
        functools.partial(kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((plan.heads, V, K), f32)],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=plan.interpret,
        name=name,
    )


def _flat(plan: Plan, inputs):
    """[B, T, H, K] -> [B, T, H K], and beta as [B, groups of heads, T, heads of a group]."""
    B, T, H = inputs[-1].shape
    beta = jnp.moveaxis(inputs[-1].reshape(B, T, H // plan.heads, plan.heads), 2, 1)
    return *(x.reshape(B, T, -1) for x in inputs[:-1]), beta


def _shaped(plan: Plan, flat, H: int):
    """Undoes `_flat`."""
    *rows, beta = flat
    B, _, T, _ = beta.shape
    return *(x.reshape(B, T, H, -1) for x in rows), jnp.moveaxis(beta, 1, 2).reshape(B, T, H)


def _visited(slots_BN, S: int):
    """[B, S, 1, 1, 1]: slots that own a chunk. The kernels leave the others' results unwritten."""
    visited_BS = jnp.zeros((slots_BN.shape[0], S), bool)
    return visited_BS.at[jnp.arange(slots_BN.shape[0])[:, None], slots_BN].set(True)[..., None, None, None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kda(plan: Plan, inputs, gate_2X, table_BSHKV, docs_BN2C, slots_BN):
    """(o, final table) from (q, k, v, g, beta) and a table of states. T is a multiple of C.

    With gate_2X, rate and offset of all channels, q and k are raw and logits stand for g: see `Raw`.

    Chunk n of row b finds its entry state in slot slots_BN[b, n] of the table and leaves its exit state there; slots do
    not decrease along a row. docs_BN2C marks documents that start inside a chunk.
    """
    return _forward(plan, inputs, gate_2X, table_BSHKV, docs_BN2C, slots_BN, keep_entries=False)[0]


def _forward(plan, inputs, gate_2X, table_BSHKV, docs_BN2C, slots_BN, keep_entries=True):
    (B, N), (S, H, K, V) = slots_BN.shape, table_BSHKV.shape[1:]
    flat = _flat(plan, inputs)
    rows, docs, table, entries, gate, _ = _specs(plan, K, V, lambda n: n)
    table_BSHVK = table_BSHKV.swapaxes(-1, -2)
    out_shape = [
        jax.ShapeDtypeStruct(flat[2].shape, flat[2].dtype),
        jax.ShapeDtypeStruct(table_BSHVK.shape, f32),
        jax.ShapeDtypeStruct((B, N, H, V, K), flat[0].dtype) if keep_entries else None,
    ]
    o, final_BSHVK, entries_BNHVK = _call(
        plan,
        "kda_forward",
        _forward_kernel,
        (B, H // plan.heads, N),
        [_if(docs_BN2C, docs), _if(gate_2X, gate), rows, table],
        [rows[2], table, entries if keep_entries else None],
        out_shape,
        V,
        K,
    )(slots_BN, docs_BN2C, gate_2X, flat, table_BSHVK)
    final_BSHKV = jnp.where(_visited(slots_BN, S), final_BSHVK.swapaxes(-1, -2), table_BSHKV)
    return (o.reshape(inputs[2].shape), final_BSHKV), (inputs, gate_2X, entries_BNHVK, docs_BN2C, slots_BN)


def _backward(plan, saved, cotangents):
    inputs, gate_2X, entries_BNHVK, docs_BN2C, slots_BN = saved
    d_o_BTHV, d_final_BSHKV = cotangents
    (B, N), (S, H, K, V) = slots_BN.shape, d_final_BSHKV.shape[1:]
    flat = _flat(plan, inputs)
    rows, docs, table, entries, gate, d_gate = _specs(plan, K, V, lambda n: N - 1 - n)
    d_final_BSHVK = d_final_BSHKV.swapaxes(-1, -2)
    d_flat, d_gate_B2X, d_initial_BSHVK = _call(
        plan,
        "kda_backward",
        _backward_kernel,
        (B, H // plan.heads, N),
        [_if(docs_BN2C, docs), _if(gate_2X, gate), rows, entries, rows[2], table],
        [rows, _if(gate_2X, d_gate), table],
        [
            tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in flat),
            _if(gate_2X, jax.ShapeDtypeStruct((B, 2, H * K), f32)),
            jax.ShapeDtypeStruct(d_final_BSHVK.shape, f32),
        ],
        V,
        K,
    )(slots_BN, docs_BN2C, gate_2X, flat, entries_BNHVK, d_o_BTHV.reshape(B, N * C, -1), d_final_BSHVK)
    d_initial_BSHKV = jnp.where(_visited(slots_BN, S), d_initial_BSHVK.swapaxes(-1, -2), d_final_BSHKV)
    d_gate_2X = None if d_gate_B2X is None else d_gate_B2X.sum(0)
    return _shaped(plan, d_flat, H), d_gate_2X, d_initial_BSHKV, None, None


_kda.defvjp(_forward, _backward)

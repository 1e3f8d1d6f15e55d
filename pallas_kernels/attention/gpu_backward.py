"""Attention on Hopper: the backward pass (Pallas Mosaic-GPU), from the log-sum-exp of the forward pass.

With P the probabilities and own_i = <dO_i, O_i>, what normalisation takes from every score of a query:

    dS = P (dO V^T - own),   dQ = scale dS K,   dK = scale dS^T Q,   dV = P^T dO.

Two kernels, each with its sums in registers: one per block of queries, over keys, for dQ; one per block of keys, over
queries, for dK and dV, on transposed scores, so that P^T and dS^T are products' left operands in registers as well. The
scores are computed twice; nothing is added up in device memory, so gradients do not depend on timing.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.gpu_forward import LOG2E, QUERIES
from pallas_kernels.attention.gpu_tiles import (
    COL,
    COMPILER_PARAMS,
    CONSUMERS,
    ROW,
    ROWS,
    TILE,
    Visits,
    along_columns,
    along_rows,
    bf16,
    f32,
    full,
    i32,
    index,
    key_spans,
    operand,
    positions,
    products,
    query_spans,
    quotient,
    remainder,
    rows_sharing,
    transposed,
)


@dataclasses.dataclass(frozen=True)
class Tuning:
    stages: int = 2
    keys: int = 64  # of a block, for dQ
    queries: int = 64  # of a block, for dK and dV


def _documents(ids_Nt, ids_BT, N, t, B, T):
    zeros = lambda n, length: jnp.zeros((n, length), i32)
    return (zeros(N, t), zeros(B, T)) if ids_Nt is None else (ids_Nt, ids_BT)


@functools.partial(jax.jit, static_argnames=("scale", "tuning"))
def query_gradient(
    q_NtHK: Float[Array, "N t H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    do_NtHV: Float[Array, "N t H V"],
    lse_NHt: Float[Array, "N H t"],
    own_NHt: Float[Array, "N H t"],
    start_N: Int[Array, " N"],
    ids_Nt: Int[Array, "N t"] | None,
    ids_BT: Int[Array, "B T"] | None,
    *,
    scale: float,
    tuning: Tuning = Tuning(),
) -> Float[Array, "N t H K"]:
    """dQ in bfloat16; arguments as in `gpu_forward.forward`."""
    N, t, H, K = q_NtHK.shape
    B, T, _, V = v_BTHV.shape
    KEYS, STAGES = tuning.keys, tuning.stages
    packed = () if ids_Nt is None else (ids_Nt, ids_BT)
    rows_ids, columns_ids = _documents(ids_Nt, ids_BT, N, t, B, T)
    spans = query_spans(rows_ids, start_N, columns_ids, QUERIES, KEYS)
    blocks, rows = t // QUERIES, N * H
    beside = rows_sharing(rows, T * (K + V) * 2)
    unit = scale * LOG2E

    def kernel(*refs_and_scoped):
        *refs, scoped = refs_and_scoped
        q_g, k_g, v_g, do_g, lse_g, own_g, start_g, spans_g, *ids_g, dq_g = refs
        (
            (q_s, do_s, k_s, v_s, small_s),
            (rows_s, columns_s),
            (mine_full, k_full, v_full),
            (k_empty, v_empty),
        ) = scoped
        i, wg = lax.axis_index("block"), lax.axis_index("wg")
        section, i = quotient(i, beside * blocks), remainder(i, beside * blocks)
        block, row = blocks - 1 - quotient(i, beside), section * beside + remainder(i, beside)
        n, h = quotient(row, H), remainder(row, H)
        b = remainder(n, B)
        visits = Visits([spans_g[n, block, x] for x in range(4)])

        def produce():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, visits.total)
            def _(i):
                slot = remainder(i, STAGES)
                keys = pl.ds(visits[i][0] * KEYS, KEYS)

                def load(src, dst, loaded, empty):
                    @pl.when(i >= STAGES)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    for x, y in zip(src, dst):
                        plgpu.copy_gmem_to_smem(x, y.at[slot], loaded.at[slot])

                load(
                    [k_g.at[b, keys, h], *(x.at[b, keys] for x in ids_g[1:])],
                    [k_s, columns_s],
                    k_full,
                    k_empty,
                )
                load([v_g.at[b, keys, h]], [v_s], v_full, v_empty)

        def consume():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(block * QUERIES + wg * ROWS, ROWS)
            loads = [
                (q_g.at[n, mine, h], q_s),
                (do_g.at[n, mine, h], do_s),
                *((x.at[n, mine], rows_s) for x in ids_g[:1]),
            ]
            for src, dst in loads:
                plgpu.copy_gmem_to_smem(src, dst.at[wg], mine_full.at[wg])
            for x, src in enumerate((lse_g, own_g)):
                plgpu.copy_gmem_to_smem(src.at[n, h, mine], small_s.at[wg, x], mine_full.at[wg])
            first = start_g[n] + block * QUERIES + wg * ROWS
            shape = (ROWS, KEYS)
            plgpu.barrier_wait(mine_full.at[wg])
            lse, own = (plgpu.load(small_s.at[wg, x], layout=ROW) for x in range(2))

            def step(i, dq, masked):
                slot = remainder(i, STAGES)
                k, v = k_s.at[slot], v_s.at[slot]
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.barrier_wait(v_full.at[slot])
                s, dp = products(shape, (q_s.at[wg], transposed(k)), (do_s.at[wg], transposed(v)))
                plgpu.barrier_arrive(v_empty.at[slot])
                p = jnp.exp2(s * unit - along_columns(lse, shape))
                if masked:
                    key = visits[i][0] * KEYS
                    seen = along_columns(positions(ROWS) + (first - key), shape) >= index(1, shape)
                    if ids_g:
                        theirs = plgpu.load(columns_s.at[slot], layout=COL)
                        rows_ids = plgpu.load(rows_s.at[wg], layout=ROW)
                        seen = seen & (along_columns(rows_ids, shape) == along_rows(theirs, shape))
                    p = jnp.where(seen, p, 0.0)
                ds = (p * (dp - along_columns(own, shape))).astype(bf16)
                dq = pl.run_state(lambda acc: plgpu.wgmma(acc, ds, k))(plgpu.ACC.init(dq))
                plgpu.barrier_arrive(k_empty.at[slot])
                return dq

            dq = full((ROWS, K), 0, TILE)
            dq = lax.fori_loop(0, visits.masked, functools.partial(step, masked=True), dq)
            dq = lax.fori_loop(visits.masked, visits.total, functools.partial(step, masked=False), dq)
            dq_g[n, mine, h] = (dq * scale).astype(bf16)

        pl.when(wg < CONSUMERS)(consume)
        pl.when(wg == CONSUMERS)(produce)

    def entry(*refs):
        pl.run_scoped(
            lambda *scoped: kernel(*refs, scoped),
            (
                operand(CONSUMERS, ROWS, K),
                operand(CONSUMERS, ROWS, V),
                operand(STAGES, KEYS, K),
                operand(STAGES, KEYS, V),
                plgpu.SMEM((CONSUMERS, 2, ROWS), f32),
            ),
            (plgpu.SMEM((CONSUMERS, ROWS), i32), plgpu.SMEM((STAGES, KEYS), i32)),
            (
                plgpu.Barrier(num_arrivals=5 if packed else 4, num_barriers=CONSUMERS),
                plgpu.Barrier(num_arrivals=2 if packed else 1, num_barriers=STAGES),
                plgpu.Barrier(num_barriers=STAGES),
            ),
            (plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),) * 2,
            collective_axes="wg",
        )

    return plgpu.kernel(
        entry,
        out_type=jax.ShapeDtypeStruct(q_NtHK.shape, bf16),
        grid=(blocks * rows,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
    )(q_NtHK, k_BTHK, v_BTHV, do_NtHV, lse_NHt, own_NHt, start_N, spans, *packed)


@functools.partial(jax.jit, static_argnames=("scale", "tuning"))
def key_gradients(
    q_NtHK: Float[Array, "N t H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    do_NtHV: Float[Array, "N t H V"],
    lse_NHt: Float[Array, "N H t"],
    own_NHt: Float[Array, "N H t"],
    start_N: Int[Array, " N"],
    ids_Nt: Int[Array, "N t"] | None,
    ids_BT: Int[Array, "B T"] | None,
    *,
    scale: float,
    tuning: Tuning = Tuning(),
) -> tuple[Float[Array, "B T H K"], Float[Array, "B T H V"]]:
    """dK and dV in bfloat16; arguments as in `gpu_forward.forward`."""
    N, t, H, K = q_NtHK.shape
    B, T, _, V = v_BTHV.shape
    QUERIES, STAGES, KEYS = tuning.queries, tuning.stages, CONSUMERS * ROWS
    packed = () if ids_Nt is None else (ids_Nt, ids_BT)
    rows_ids, columns_ids = _documents(ids_Nt, ids_BT, N, t, B, T)
    spans = key_spans(rows_ids, start_N, columns_ids, QUERIES, KEYS)
    blocks, rows = T // KEYS, B * H
    beside = rows_sharing(rows, N // B * t * (K + V) * 2)
    unit = scale * LOG2E

    def kernel(*refs_and_scoped):
        *refs, scoped = refs_and_scoped
        q_g, k_g, v_g, do_g, lse_g, own_g, start_g, spans_g, *ids_g, dk_g, dv_g = refs
        (
            (k_s, v_s, q_s, do_s, lse_s, own_s),
            (rows_s, columns_s),
            (mine_full, q_full, do_full),
            (q_empty, do_empty),
        ) = scoped
        i, wg = lax.axis_index("block"), lax.axis_index("wg")
        section, i = quotient(i, beside * blocks), remainder(i, beside * blocks)
        block, row = quotient(i, beside), section * beside + remainder(i, beside)
        b, h = quotient(row, H), remainder(row, H)
        visits = Visits(*([spans_g[run * B + b, block, x] for x in range(4)] for run in range(N // B)))

        def produce():
            plgpu.set_max_registers(24, action="decrease")

            @pl.loop(0, visits.total)
            def _(i):
                slot = remainder(i, STAGES)
                queries, run = visits[i]
                queries, n = pl.ds(queries * QUERIES, QUERIES), run * B + b

                def load(pairs, loaded, empty):
                    @pl.when(i >= STAGES)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    for src, dst in pairs:
                        plgpu.copy_gmem_to_smem(src, dst.at[slot], loaded.at[slot])

                ids = [(x.at[n, queries], columns_s) for x in ids_g[:1]]
                load([(q_g.at[n, queries, h], q_s), (lse_g.at[n, h, queries], lse_s), *ids], q_full, q_empty)
                load([(do_g.at[n, queries, h], do_s), (own_g.at[n, h, queries], own_s)], do_full, do_empty)

        def consume():
            plgpu.set_max_registers(240, action="increase")
            first = block * KEYS + wg * ROWS
            mine = pl.ds(first, ROWS)
            loads = [
                (k_g.at[b, mine, h], k_s),
                (v_g.at[b, mine, h], v_s),
                *((x.at[b, mine], rows_s) for x in ids_g[1:]),
            ]
            for src, dst in loads:
                plgpu.copy_gmem_to_smem(src, dst.at[wg], mine_full.at[wg])
            shape = (ROWS, QUERIES)
            plgpu.barrier_wait(mine_full.at[wg])

            def step(i, carry, masked):
                dk, dv = carry
                slot = remainder(i, STAGES)
                q, do = q_s.at[slot], do_s.at[slot]
                plgpu.barrier_wait(q_full.at[slot])
                (s,) = products(shape, (k_s.at[wg], transposed(q)))
                p = jnp.exp2(s * unit - along_rows(plgpu.load(lse_s.at[slot], layout=COL), shape))
                if masked:
                    query, run = visits[i]
                    query = query * QUERIES + start_g[run * B + b]
                    seen = along_columns(positions(ROWS) + (first - query), shape) <= index(1, shape)
                    if ids_g:
                        theirs = plgpu.load(columns_s.at[slot], layout=COL)
                        rows_ids = plgpu.load(rows_s.at[wg], layout=ROW)
                        seen = seen & (along_columns(rows_ids, shape) == along_rows(theirs, shape))
                    p = jnp.where(seen, p, 0.0)
                p16 = p.astype(bf16)
                plgpu.barrier_wait(do_full.at[slot])

                def multiply(refs):
                    dv, dp = refs
                    plgpu.wgmma(dp, v_s.at[wg], transposed(do))
                    plgpu.wgmma(dv, p16, do)

                dv, dp = pl.run_state(multiply)((plgpu.ACC.init(dv), plgpu.ACC.init(full(shape, 0, TILE))))
                ds = p * (dp - along_rows(plgpu.load(own_s.at[slot], layout=COL), shape))
                plgpu.barrier_arrive(do_empty.at[slot])
                ds = ds.astype(bf16)
                dk = pl.run_state(lambda acc: plgpu.wgmma(acc, ds, q))(plgpu.ACC.init(dk))
                plgpu.barrier_arrive(q_empty.at[slot])
                return dk, dv

            carry = full((ROWS, K), 0, TILE), full((ROWS, V), 0, TILE)
            carry = lax.fori_loop(0, visits.masked, functools.partial(step, masked=True), carry)
            dk, dv = lax.fori_loop(visits.masked, visits.total, functools.partial(step, masked=False), carry)
            dk_g[b, mine, h] = (dk * scale).astype(bf16)
            dv_g[b, mine, h] = dv.astype(bf16)

        pl.when(wg < CONSUMERS)(consume)
        pl.when(wg == CONSUMERS)(produce)

    def entry(*refs):
        per_query = plgpu.SMEM((STAGES, QUERIES), f32)
        pl.run_scoped(
            lambda *scoped: kernel(*refs, scoped),
            (
                operand(CONSUMERS, ROWS, K),
                operand(CONSUMERS, ROWS, V),
                operand(STAGES, QUERIES, K),
                operand(STAGES, QUERIES, V),
                per_query,
                per_query,
            ),
            (plgpu.SMEM((CONSUMERS, ROWS), i32), plgpu.SMEM((STAGES, QUERIES), i32)),
            (
                plgpu.Barrier(num_arrivals=3 if packed else 2, num_barriers=CONSUMERS),
                plgpu.Barrier(num_arrivals=3 if packed else 2, num_barriers=STAGES),
                plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            ),
            (plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),) * 2,
            collective_axes="wg",
        )

    return plgpu.kernel(
        entry,
        out_type=(jax.ShapeDtypeStruct(k_BTHK.shape, bf16), jax.ShapeDtypeStruct(v_BTHV.shape, bf16)),
        grid=(blocks * rows,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
    )(q_NtHK, k_BTHK, v_BTHV, do_NtHV, lse_NHt, own_NHt, start_N, spans, *packed)

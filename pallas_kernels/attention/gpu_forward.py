"""Attention on Hopper: the forward pass (Pallas Mosaic-GPU).

One thread block per 128 queries and head: a producer warpgroup feeds keys and values by TMA, two consumers own 64
queries each. A consumer issues the scores of the next block together with the outputs of this one; while it computes
their softmax, the other one is at the tensor cores (making them take turns with barriers cost a tenth).
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.gpu_tiles import (
    COL,
    COMPILER_PARAMS,
    CONSUMERS,
    FAR,
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
    operand,
    positions,
    products,
    query_spans,
    quotient,
    remainder,
    rows_sharing,
    transposed,
)

QUERIES = CONSUMERS * ROWS
LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Tuning:
    keys: int = 128  # of a block
    stages: int = 2  # blocks in flight


@functools.partial(jax.jit, static_argnames=("scale", "tuning"))
def forward(
    q_NtHK: Float[Array, "N t H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    start_N: Int[Array, " N"],
    ids_Nt: Int[Array, "N t"] | None,
    ids_BT: Int[Array, "B T"] | None,
    *,
    scale: float,
    tuning: Tuning = Tuning(),
) -> tuple[Float[Array, "N t H V"], Float[Array, "N H t"], Float[Array, "N H t"]]:
    """Row n of the queries stands at position start_N[n] and reads row n % B of the keys. t and T: multiples of BLOCK.

    Returns:
      The output in float32, the log2-sum-exp2 of the logits times log2(e), and the largest scaled logit of each query.
    """
    N, t, H, K = q_NtHK.shape
    B, T, _, V = v_BTHV.shape
    KEYS, STAGES = tuning.keys, tuning.stages
    packed = () if ids_Nt is None else (ids_Nt, ids_BT)
    same = lambda n, length: jnp.zeros((n, length), i32)
    spans = query_spans(
        *((same(N, t), start_N, same(B, T)) if ids_Nt is None else (ids_Nt, start_N, ids_BT)), QUERIES, KEYS
    )
    blocks, rows = t // QUERIES, N * H
    beside = rows_sharing(rows, T * (K + V) * 2)
    unit = scale * LOG2E

    def kernel(*refs_and_scoped):
        *refs, scoped = refs_and_scoped
        q_g, k_g, v_g, start_g, spans_g, *ids_g, o_g, lse_g, top_g = refs
        (q_s, k_s, v_s, small_s), (rows_s, columns_s), (q_full, k_full, v_full), (k_empty, v_empty) = scoped
        i, wg = lax.axis_index("block"), lax.axis_index("wg")
        # long blocks first, the heads that share the L2 cache together
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

                load([k_g.at[b, keys, h]], [k_s], k_full, k_empty)
                load(
                    [v_g.at[b, keys, h], *(x.at[b, keys] for x in ids_g[1:])],
                    [v_s, columns_s],
                    v_full,
                    v_empty,
                )

        def consume():
            plgpu.set_max_registers(232, action="increase")
            mine = pl.ds(block * QUERIES + wg * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(q_g.at[n, mine, h], q_s.at[wg], q_full.at[wg])
            for x in ids_g[:1]:
                plgpu.copy_gmem_to_smem(x.at[n, mine], rows_s.at[wg], q_full.at[wg])
            first = start_g[n] + block * QUERIES + wg * ROWS
            shape = (ROWS, KEYS)

            def softmax(i, s, top, total, masked):
                if masked:
                    key = visits[i][0] * KEYS
                    seen = along_columns(positions(ROWS) + (first - key), shape) >= index(1, shape)
                    if ids_g:
                        theirs = plgpu.load(columns_s.at[remainder(i, STAGES)], layout=COL)
                        own = plgpu.load(rows_s.at[wg], layout=ROW)
                        seen = seen & (along_columns(own, shape) == along_rows(theirs, shape))
                    s = jnp.where(seen, s, FAR)
                new = jnp.maximum(top, s.max(axis=1))
                # a row that has seen no key: FAR would cancel against itself with an error that exp2 makes infinite
                shift = jnp.where(new > FAR, new * unit, 0.0)
                p = jnp.exp2(s * unit - along_columns(shift, shape))
                keep = jnp.exp2((top - new) * unit)
                return p.astype(bf16), keep, new, total * keep + p.sum(axis=1)

            def step(i, carry, masked):
                """Softmax of visit i; then its outputs, and the scores of the next visit."""
                o, s, top, total = carry
                slot, ahead = remainder(i, STAGES), remainder(i + 1, STAGES)
                if masked and ids_g:
                    plgpu.barrier_wait(v_full.at[slot])
                p, keep, top, total = softmax(i, s, top, total, masked)
                o = o * along_columns(keep, (ROWS, V))
                plgpu.barrier_wait(k_full.at[ahead])
                if not (masked and ids_g):
                    plgpu.barrier_wait(v_full.at[slot])

                def multiply(refs):
                    s, o = refs
                    plgpu.wgmma(s, q_s.at[wg], transposed(k_s.at[ahead]))
                    plgpu.wgmma(o, p, v_s.at[slot])

                s, o = pl.run_state(multiply)((plgpu.ACC.init(full(shape, 0, TILE)), plgpu.ACC.init(o)))
                plgpu.barrier_arrive(k_empty.at[ahead])
                plgpu.barrier_arrive(v_empty.at[slot])
                return o, s, top, total

            plgpu.barrier_wait(q_full.at[wg])
            plgpu.barrier_wait(k_full.at[0])
            (s,) = products(shape, (q_s.at[wg], transposed(k_s.at[0])))
            plgpu.barrier_arrive(k_empty.at[0])
            carry = full((ROWS, V), 0, TILE), s, full((ROWS,), FAR, ROW), full((ROWS,), 0, ROW)
            last = visits.total - 1
            masked = jnp.minimum(visits.masked, last)
            carry = lax.fori_loop(0, masked, functools.partial(step, masked=True), carry)
            o, s, top, total = lax.fori_loop(masked, last, functools.partial(step, masked=False), carry)
            slot = remainder(last, STAGES)
            plgpu.barrier_wait(v_full.at[slot])
            p, keep, top, total = softmax(last, s, top, total, True)
            o = o * along_columns(keep, (ROWS, V))
            o = pl.run_state(lambda acc: plgpu.wgmma(acc, p, v_s.at[slot]))(plgpu.ACC.init(o))
            plgpu.barrier_arrive(v_empty.at[slot])
            o_g[n, mine, h] = o / along_columns(total, (ROWS, V))
            small_s[wg, 0] = top * unit + jnp.log(total) * LOG2E
            small_s[wg, 1] = top * scale
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(small_s.at[wg, 0], lse_g.at[n, h, mine])
            plgpu.copy_smem_to_gmem(small_s.at[wg, 1], top_g.at[n, h, mine])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        pl.when(wg < CONSUMERS)(consume)
        pl.when(wg == CONSUMERS)(produce)

    def entry(*refs):
        pl.run_scoped(
            lambda *scoped: kernel(*refs, scoped),
            (
                operand(CONSUMERS, ROWS, K),
                operand(STAGES, KEYS, K),
                operand(STAGES, KEYS, V),
                plgpu.SMEM((CONSUMERS, 2, ROWS), f32),
            ),
            (plgpu.SMEM((CONSUMERS, ROWS), i32), plgpu.SMEM((STAGES, KEYS), i32)),
            (
                plgpu.Barrier(num_arrivals=2 if packed else 1, num_barriers=CONSUMERS),
                plgpu.Barrier(num_barriers=STAGES),
                plgpu.Barrier(num_arrivals=2 if packed else 1, num_barriers=STAGES),
            ),
            (plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=STAGES),) * 2,
            collective_axes="wg",
        )

    per_query = jax.ShapeDtypeStruct((N, H, t), f32)
    return plgpu.kernel(
        entry,
        out_type=(jax.ShapeDtypeStruct((N, t, H, V), f32), per_query, per_query),
        grid=(blocks * rows,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
    )(q_NtHK, k_BTHK, v_BTHV, start_N, spans, *packed)

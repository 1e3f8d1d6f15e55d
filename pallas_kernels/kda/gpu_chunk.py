"""KDA on Hopper: everything a chunk needs from its own tokens, one warpgroup per chunk and head (Pallas Mosaic-GPU)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.gpu_inverse import inverse_transposed
from pallas_kernels.kda.gpu_tiles import (
    COL,
    COMPILER_PARAMS,
    HALF,
    PAD,
    SHIFT,
    TILE,
    C,
    D,
    Decay,
    Documents,
    R,
    along_columns,
    along_rows,
    bf16,
    channels,
    column_factors,
    entering,
    f32,
    gate_of,
    index,
    inverse_norm,
    leaving,
    operand,
    plain,
    references,
    squares,
    sum_gates,
    transposed,
)


@functools.partial(jax.jit, static_argnames=("chunks", "scale", "g_min"))
def chunk_operands(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    decay: Decay,
    beta_BHT: Float[Array, "B H T"],
    docs: Float[Array, "B M 3 C"] | None,
    start: Int[Array, " 1"],
    *,
    chunks: int,
    scale: float,
    g_min: float,
) -> tuple[Array, ...]:
    """Of N = `chunks` chunks, the first of which is number start[0] of the M in a row of tokens:

    Q+ = scale e^G q, K+ = e^G k, K- = e^{G_C - G} k  [B, H, N, C, K] bf16, P^T (scaled) and T^T = (I + beta X)^-T
    [B, H, N, C, C] bf16, e^{G_C}  [B, H, N, K] float32. T is a multiple of C. With logits for `decay` q and k are raw.
    """
    B, T, H, K = q_BTHK.shape
    N = chunks
    packed = () if docs is None else (docs,)
    ready = len(decay) == 1  # log decays; else their logits, and raw q and k

    def kernel(*refs_and_scoped):
        *refs, scoped = refs_and_scoped
        q_g, k_g, beta_g, start_g, *refs = refs
        decay_g, refs = refs[: len(decay)], refs[len(decay) :]
        *docs_g, qp_g, kp_g, km_g, pT_g, tT_g, dec_g = refs
        (
            q_s,
            k_s,
            G_s,
            km_s,
            (g_s, (rq_s, rk_s, c0_s, c1_s), (y_s, m_s, p_s, x_s)),
            beta_s,
            dec_s,
            docs_s,
            bar,
        ) = scoped
        docs = Documents(docs_s if docs_g else None)
        bh, n = lax.axis_index("bh"), lax.axis_index("n")
        b, h = bh // H, lax.rem(bh, jnp.int32(H))
        rows = pl.ds((start_g[0] + n) * C, C)
        for src, dst in ((decay_g[0], g_s), (q_g, q_s), (k_g, k_s)):
            plgpu.copy_gmem_to_smem(src.at[b, rows, h], dst, bar)
        plgpu.copy_gmem_to_smem(beta_g.at[b, h, rows], beta_s, bar)
        for src in docs_g:
            plgpu.copy_gmem_to_smem(src.at[b, start_g[0] + n], docs_s, bar)
        gate = gate_of(decay_g, g_min, h)
        plgpu.barrier_wait(bar)
        sum_gates(lambda i: gate(channels(g_s, i)), G_s, docs)
        plgpu.commit_smem()
        q_factor = k_factor = None
        if not ready:
            both = (pl.ds(0, HALF), pl.ds(HALF, HALF))
            q_factor, k_factor = (inverse_norm(sum(squares(x.at[:, at]) for at in both)) for x in (q_s, k_s))

        def rows_of(ref, columns, factor, scale=1.0):
            x = plgpu.load(ref.at[:, columns], layout=TILE).astype(f32)
            return x * scale if factor is None else x * along_columns(factor * scale, HALF)

        def halves(*accs):
            for half in range(D // HALF):
                columns = pl.ds(half * HALF, HALF)
                base, second = references(G_s, columns, docs)
                G = plain(G_s.at[:, columns])
                q, k = rows_of(q_s, columns, q_factor, scale), rows_of(k_s, columns, k_factor)
                r = jnp.exp2(G - base + SHIFT)
                rq_s[...] = (q * r).astype(bf16)
                rk_s[...] = (k * r).astype(bf16)
                own, other = column_factors(G, base, second, docs)
                c0_s[...] = (k * own).astype(bf16)
                c1_s[...] = (k * jnp.where(index(0, HALF) < R, other, own)).astype(bf16)
                plgpu.commit_smem()
                for i, acc in enumerate(accs):  # P and X of the first tile, then of the second
                    of_tile = pl.ds(i // 2 * R, R)
                    plgpu.wgmma(acc, (c0_s, c1_s)[i // 2], transposed((rq_s, rk_s)[i % 2].at[of_tile]))
                # While the tensor cores work: the operands of the state. q and k of this half are not needed again.
                eG = entering(G, docs)
                q_s[:, columns] = (q * eG).astype(bf16)
                k_s[:, columns] = (k * eG).astype(bf16)
                last = plgpu.load(G_s.at[C - 1, columns], layout=COL)
                if half:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                km_s[...] = (k * leaving(G, G_s, columns, docs)).astype(bf16)
                dec_s[columns] = jnp.exp2(last) * docs.across()
                plgpu.wgmma_wait(0)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(km_s, km_g.at[b, h, n, :, columns])
            return [acc[...] for acc in accs]

        scores = pl.run_scoped(halves, *[plgpu.ACC((C, R), f32)] * 4)
        for src, dst in ((q_s, qp_g), (k_s, kp_g), (dec_s, dec_g)):
            plgpu.copy_smem_to_gmem(src, dst.at[b, h, n])
        for i, score in enumerate(scores):
            to, strict = (p_s, x_s)[i % 2], i % 2
            key, query = index(0, R), index(1, R) + i // 2 * R
            score = docs.pairs(jnp.where(key + strict <= query, score, 0.0), i // 2 * R)
            to[:, pl.ds(i // 2 * R, R)] = score.astype(bf16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(p_s, pT_g.at[b, h, n])
        A = plgpu.load(x_s, layout=TILE).astype(f32) * along_rows(plgpu.load(beta_s, layout=COL), C)
        inverse_transposed(A, y_s, m_s)
        plgpu.copy_smem_to_gmem(y_s, tT_g.at[b, h, n])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def chunk_operands_kernel(*refs):
        half = operand(C, HALF)
        pl.run_scoped(
            lambda *scoped: kernel(*refs, scoped),
            operand(C, K),
            operand(C, K),
            plgpu.SMEM((C, K + PAD), f32),
            half,
            plgpu.RefUnion(
                plgpu.SMEM((C, K), decay[0].dtype),
                (half, half, half, half),
                (operand(C, C), operand(C, C), operand(C, C, columns=R), operand(C, C, columns=R)),
            ),
            plgpu.SMEM((C,), f32),
            plgpu.SMEM((K,), f32),
            plgpu.SMEM((Documents.ROWS, C), f32),
            plgpu.Barrier(num_arrivals=4 + len(packed)),
        )

    out = lambda *shape: jax.ShapeDtypeStruct((B, H, N, *shape), bf16)
    return plgpu.kernel(
        chunk_operands_kernel,
        out_type=(
            *[out(C, K)] * 3,
            *[out(C, C)] * 2,
            jax.ShapeDtypeStruct((B, H, N, K), f32),
        ),
        grid=(N, B * H),
        grid_names=("n", "bh"),
        compiler_params=COMPILER_PARAMS,
    )(q_BTHK, k_BTHK, beta_BHT, start, *decay, *packed)

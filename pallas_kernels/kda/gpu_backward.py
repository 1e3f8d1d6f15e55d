"""KDA on Hopper: the gradients of a chunk's own tokens, once the states and their gradients are known (Mosaic-GPU).

Four warpgroups per chunk and head, each with a quarter of the key channels. With S the state at chunk entry, dS the
gradient of the state at exit, U the updates, and the operands x e^{G - r}, k e^{r - G} of `gpu_tiles`:

    dP = tril(dO U^T),   dX = -stril(dV U^T),   dQ+ = dO S^T,   dK+ = -dV S^T,   dK- = U dS^T,
    dq = e^G dQ+ + rows(dP),   dk = e^G dK+ + e^{G_C - G} dK- + rows(dX) + columns(dP, dX),
    dbeta_i = <dV_i, U_i> / beta_i^2.

(U_i = beta_i (..) and dV_i = beta_i (..) hold exactly, and the caller keeps beta away from zero.) A pair (i, j) adds to
dG_i what it takes from dG_j. The sums over G that give dg must see the two cancel, so both are formed from the rounded
operands that entered the products: with un-rounded q and k a third of dg is lost when gates sit at -5.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.gpu_tiles import (
    CHANNELS,
    COMPILER_PARAMS,
    HALF,
    PAD,
    ROW,
    SHIFT,
    STEP,
    TILE,
    C,
    D,
    Decay,
    Documents,
    R,
    along_columns,
    bf16,
    channels,
    column_factors,
    entering,
    f32,
    gate_adjoint,
    gate_of,
    index,
    inverse_norm,
    leaving,
    operand,
    plain,
    products,
    references,
    squares,
    sum_gates,
    transposed,
)

WARPGROUPS = 4
WIDTH = D // WARPGROUPS  # channels of a warpgroup


def adjoint_shapes(q_BTHK: Array, decay: Decay) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of the results of `chunk_adjoint`."""
    B, T, H, K = q_BTHK.shape
    weights = () if len(decay) == 1 else ((B, H, T // C, WARPGROUPS, 2, K),)
    shapes = (q_BTHK.shape, q_BTHK.shape, (B, H, T), q_BTHK.shape, *weights)
    return tuple(map(jax.ShapeDtypeStruct, shapes, (bf16, bf16, f32, decay[0].dtype, f32)))


@functools.partial(jax.jit, static_argnames=("scale", "g_min"))
def chunk_adjoint(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    decay: Decay,
    beta_BHT: Float[Array, "B H T"],
    do_BTHV: Float[Array, "B T H V"],
    u: Float[Array, "B H N C V"],
    dv_BTHV,  # [B, T, H, V]; an array, or a reference
    s: Float[Array, "B H N K V"],
    ds: Float[Array, "B H N K V"],
    docs: Float[Array, "B M 3 C"] | None,
    start: Int[Array, " 1"],
    *,
    scale: float,
    g_min: float,
    into=(),
) -> tuple[Array, ...]:
    """dq, dk [B, T, H, K] bf16, dbeta [B, H, T] float32, dg [B, T, H, K] float32. T is a multiple of C.

    With logits for `decay`, those of the raw q and k, dbeta, those of the logits, in their dtype, and [B, H, M, parts,
    2, K] float32, whose sums over all but the last two axes are the gradients of offset and rate.

    With references to all of them in `into`, those of N chunks from number start[0] on are written there; nothing is
    returned.
    """
    B, T, H, K = q_BTHK.shape
    N = u.shape[2]

    packed = () if docs is None else (docs,)
    ready = len(decay) == 1  # log decays; else their logits, and raw q and k

    def kernel(q_g, k_g, beta_g, do_g, u_g, dv_g, s_g, ds_g, start_g, *refs_and_scoped):
        *refs, scoped = refs_and_scoped
        decay_g, refs = refs[: len(decay)], refs[len(decay) :]
        docs_g, (dq_g, dk_g, dbeta_g, dg_g, *weights_g) = refs[: len(packed)], refs[len(packed) :]
        (x_s, past_s), u_s, (g_s, d_s, raw_s), q_s, k_s, (s_s, c_s, last_s), (ds_s, rest_s), G_s = scoped[:8]
        small_s, docs_s, sums_s, gates_loaded, loaded, summed, states, own, again, meet = scoped[8:]
        docs = Documents(docs_s if docs_g else None)
        bh, n, wg = lax.axis_index("bh"), lax.axis_index("n"), lax.axis_index("wg")
        b, h = bh // H, lax.rem(bh, jnp.int32(H))
        token = (start_g[0] + n) * C
        rows, columns = pl.ds(token, C), pl.ds(wg * WIDTH, WIDTH)
        beta_s, dbeta_s, cross_s = (small_s.at[pl.ds(*at)] for at in ((0, C), (C, C), (2 * C, D)))

        def together(i):
            """All warpgroups have come here, and see each other's writes."""
            plgpu.commit_smem()
            plgpu.barrier_arrive(meet.at[i])
            plgpu.barrier_wait(meet.at[i])

        def tile(ref):
            return plgpu.load(ref, layout=TILE).astype(f32)

        def over_channels(x):
            """A sum over the channels of q (x = 0) or k (1), of which every warpgroup has left its part in sums_s."""
            return sum(plgpu.load(sums_s.at[x, w], layout=ROW) for w in range(WARPGROUPS))

        # ---- loads
        @pl.when(wg == 0)
        def _():
            plgpu.copy_gmem_to_smem(decay_g[0].at[b, rows, h], g_s, gates_loaded)
            plgpu.copy_gmem_to_smem(beta_g.at[b, h, rows], beta_s, gates_loaded)
            for src in docs_g:
                plgpu.copy_gmem_to_smem(src.at[b, start_g[0] + n], docs_s, gates_loaded)

        @pl.when(wg == 1)
        def _():
            plgpu.copy_gmem_to_smem(u_g.at[b, h, n], u_s, loaded)
            plgpu.copy_gmem_to_smem(do_g.at[b, rows, h], x_s.at[0], loaded)
            plgpu.copy_gmem_to_smem(dv_g.at[b, rows, h], x_s.at[1], loaded)

        @pl.when(wg == 2)
        def _():
            plgpu.copy_gmem_to_smem(s_g.at[b, h, n], s_s, states)
            plgpu.copy_gmem_to_smem(ds_g.at[b, h, n], ds_s, states)

        plgpu.copy_gmem_to_smem(q_g.at[b, rows, h, columns], q_s.at[wg], own.at[wg])
        plgpu.copy_gmem_to_smem(k_g.at[b, rows, h, columns], k_s.at[wg], own.at[wg])

        # ---- what all need: the sums of the gates; dP and dX; dbeta; the part of dg that crosses the chunk
        @pl.when(wg == 0)
        def _():
            gate = gate_of(decay_g, g_min, h)
            plgpu.barrier_wait(gates_loaded)
            sum_gates(lambda i: gate(channels(g_s, i)), G_s, docs)
            plgpu.barrier_arrive(summed)

        plgpu.barrier_wait(loaded)

        @pl.when(wg == 1)
        def _():
            if docs_g:
                plgpu.barrier_wait(gates_loaded)
            i, j = index(0, C), index(1, C)
            scores = products((C, C), *([(x_s.at[x], transposed(u_s))] for x in (0, 1)))
            plgpu.barrier_wait(summed)  # the gates have left the memory of dP and dX
            for x, (sign, strict) in enumerate(((1.0, 0), (-1.0, 1))):
                score = docs.pairs(jnp.where(j + strict <= i, scores[x] * sign, 0.0))
                d_s[x, 0] = jnp.where(i < R, score, 0.0).astype(bf16)
                d_s[x, 1] = jnp.where(i >= R, score, 0.0).astype(bf16)

        def inner(a, b):
            """<a_i, b_i> of two references to rows of D."""
            parts = (tile(a.at[:, x]) * tile(b.at[:, x]) for x in (pl.ds(0, HALF), pl.ds(HALF, HALF)))
            return sum(x.sum(1) for x in parts)

        plgpu.barrier_wait(states)

        @pl.when(wg == 2)
        def _():
            plgpu.barrier_wait(gates_loaded)
            beta = plgpu.load(beta_s, layout=ROW)
            dbeta_s[...] = inner(x_s.at[1], u_s) / beta / beta

        @pl.when(wg == 3)
        def _():
            for half in (pl.ds(0, HALF), pl.ds(HALF, HALF)):
                cross_s[half] = inner(s_s.at[half], ds_s.at[half])

        s_w, ds_w, q_w, k_w = s_s.at[columns], ds_s.at[columns], q_s.at[wg], k_s.at[wg]
        plgpu.barrier_wait(own.at[wg])
        if not ready:
            for x, ref in enumerate((q_w, k_w)):
                sums_s[x, wg] = squares(ref)

        together(0)

        # ---- through the state
        factors_qk = [] if ready else [inverse_norm(over_channels(x)) for x in (0, 1)]

        def unit(refs):
            """q and k of unit length, of this warpgroup's channels."""
            return [
                tile(ref) if ready else tile(ref) * along_columns(factor, WIDTH)
                for ref, factor in zip(refs, factors_qk or (None, None))
            ]

        dq, dk, leave = products(
            (C, WIDTH),
            [(x_s.at[0], transposed(s_w))],
            [(x_s.at[1], transposed(s_w))],
            [(u_s, transposed(ds_w))],
        )
        G = plain(G_s.at[:, columns])
        eG = entering(G, docs)
        q, k = unit((q_w, k_w))
        q = q * scale
        dq, dk = dq * eG, -dk * eG
        dG = q * dq + k * dk
        leave = leave * leaving(G, G_s, columns, docs)
        dk = dk + leave
        past = k * leave

        # ---- through the scores
        def factors():
            G = plain(G_s.at[:, columns])
            base, second = references(G_s, columns, docs)
            return jnp.exp2(G - base + SHIFT), *column_factors(G, base, second, docs)

        in_first = index(0, WIDTH) < R
        r, own_factor, other_factor = factors()
        together(1)  # dO, dV, S and dS have been read; what follows goes where they were
        past_s[:, columns] = past
        q_w[...] = (q * r).astype(bf16)
        k_w[...] = (k * r).astype(bf16)
        c0_w, c1_w = c_s.at[wg, 0], c_s.at[wg, 1]
        c0_w[...] = (k * own_factor).astype(bf16)
        c1_w[...] = (k * jnp.where(in_first, other_factor, own_factor)).astype(bf16)
        plgpu.commit_smem()

        z_q, z_k = products((C, WIDTH), *([(d_s.at[x, 0], c0_w), (d_s.at[x, 1], c1_w)] for x in (0, 1)))
        r, _, _ = factors()
        dq, dk = dq + z_q * r, dk + z_k * r
        dG = dG + z_q * tile(q_w) + z_k * tile(k_w)
        z_0, z_1 = products(
            (C, WIDTH),
            *([(transposed(d_s.at[0, a]), q_w), (transposed(d_s.at[1, a]), k_w)] for a in (0, 1)),
        )
        _, own_factor, other_factor = factors()
        dk = dk + own_factor * jnp.where(in_first, z_0, z_1) + other_factor * z_1
        dG = dG - z_0 * tile(c0_w) - z_1 * tile(c1_w)
        rest_s[:, columns] = dG

        # ---- dg: a gate scales what this and later tokens see of the past, what earlier tokens hand on, and the state
        together(2)
        if not ready:
            for src, dst in zip((q_g, k_g), raw_s):
                plgpu.copy_gmem_to_smem(src.at[b, rows, h, columns], dst.at[wg], own.at[wg])

            @pl.when(wg == 2)
            def _():
                plgpu.copy_gmem_to_smem(decay_g[0].at[b, rows, h], last_s, again)

        @pl.when(wg == 0)
        def _():
            def later(n, total):
                for i in range(STEP):
                    row = C - 1 - (n * STEP + i)
                    total = total + channels(rest_s, row)
                    rest_s[row, pl.ds(0, D)] = total
                    total = total * docs.same(row)  # the rows above may be another document's
                return total

            lax.fori_loop(0, C // STEP, later, plgpu.layout_cast(jnp.zeros((D,), f32), CHANNELS))

        @pl.when(wg == 1)
        def _():
            across = jnp.exp2(channels(G_s, C - 1)) * docs.across()

            def earlier(n, total):
                for i in range(STEP):
                    row = n * STEP + i
                    here = channels(past_s, row)
                    past_s[row, pl.ds(0, D)] = total
                    total = total + here
                return total

            lax.fori_loop(0, C // STEP, earlier, across * plgpu.load(cross_s, layout=CHANNELS))

        dq = dq * scale
        if ready:
            together(3)
        else:  # x / |x| takes no part of the gradient that is along x
            plgpu.barrier_wait(own.at[wg])
            raw_w = [ref.at[wg] for ref in raw_s]
            for x, (unit_x, d) in enumerate(zip(unit(raw_w), (dq, dk))):
                sums_s[x, wg] = (unit_x * d).sum(1)
            together(3)
            dq, dk = (
                (d - unit_x * along_columns(over_channels(x), WIDTH)) * along_columns(factors_qk[x], WIDTH)
                for x, (unit_x, d) in enumerate(zip(unit(raw_w), (dq, dk)))
            )
        for d, mine, dst in ((dq, q_w, dq_g), (dk, k_w, dk_g)):
            mine[...] = d.astype(bf16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(mine, dst.at[b, rows, h, columns])
        if ready:
            dg_w = last_s.at[wg]
            dg_w[...] = plain(rest_s.at[:, columns]) + plain(past_s.at[:, columns])
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(dg_w, dg_g.at[b, rows, h, columns])
        else:  # a warpgroup has all channels of a quarter of the tokens
            adjoint = gate_adjoint(decay_g, g_min, h)
            plgpu.barrier_wait(again)

            def token_rows(i, sums):
                for j in range(STEP):
                    row = wg * (C // WARPGROUPS) + i * STEP + j
                    dg = channels(rest_s, row) + channels(past_s, row)
                    d_logits, *d_gate = adjoint(channels(last_s, row), dg)
                    dg_g[b, token + row, h] = d_logits.astype(dg_g.dtype)
                    sums = [total + d for total, d in zip(sums, d_gate)]
                return sums

            zero = plgpu.layout_cast(jnp.zeros((D,), f32), CHANNELS)
            for x, total in enumerate(lax.fori_loop(0, C // WARPGROUPS // STEP, token_rows, [zero, zero])):
                weights_g[0][b, h, start_g[0] + n, wg, x] = total

        @pl.when(wg == 1)
        def _():
            plgpu.copy_smem_to_gmem(dbeta_s, dbeta_g.at[b, h, rows])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def chunk_adjoint_kernel(*refs):
        channel_rows = operand(WARPGROUPS, C, WIDTH, columns=WIDTH)
        sums = plgpu.SMEM((C, D + PAD), f32)
        tiled = (plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(4 * WIDTH))
        # at the end the gradient of log decays, or the logits once more
        logits = plgpu.SMEM((C, D), decay[0].dtype)
        last = plgpu.SMEM((WARPGROUPS, C, WIDTH), f32, transforms=tiled) if ready else logits
        pl.run_scoped(
            lambda *scoped: kernel(*refs, scoped),
            plgpu.RefUnion(operand(2, C, D), sums),
            operand(C, D),
            plgpu.RefUnion(
                plgpu.SMEM((C, D), decay[0].dtype),
                operand(2, 2, C, C, columns=WIDTH),
                (channel_rows, channel_rows),
            ),
            channel_rows,
            channel_rows,
            plgpu.RefUnion(operand(D, D), operand(WARPGROUPS, 2, C, WIDTH, columns=WIDTH), last),
            plgpu.RefUnion(operand(D, D), sums),
            sums,
            plgpu.SMEM((2 * C + D,), f32),
            plgpu.SMEM((Documents.ROWS, C), f32),
            plgpu.SMEM((2, WARPGROUPS, C), f32),
            plgpu.Barrier(num_arrivals=2 + len(packed)),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=4),
            collective_axes="wg",
        )

    return plgpu.kernel(
        chunk_adjoint_kernel,
        out_type=() if into else adjoint_shapes(q_BTHK, decay),
        grid=(N, B * H),
        grid_names=("n", "bh"),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=COMPILER_PARAMS,
    )(q_BTHK, k_BTHK, beta_BHT, do_BTHV, u, dv_BTHV, s, ds, start, *decay, *packed, *into)

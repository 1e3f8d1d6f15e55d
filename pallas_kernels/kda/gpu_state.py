"""KDA on Hopper: the pass of the state through the chunks, forward and backward (Pallas Mosaic-GPU).

One thread block per sequence and head. A producer warpgroup feeds chunks by TMA; two consumer warpgroups own half of
the value columns each and never wait for one another. The state [K, V/2], or its gradient, stays in float32 registers;
a bfloat16 copy in shared memory is the operand.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.gpu_tiles import (
    ROW,
    TILE,
    C,
    D,
    added,
    along_columns,
    bf16,
    f32,
    operand,
    product,
    transposed,
)

STAGES = 2
VH = D // 2  # value columns of a consumer


def _pipeline(N: int, load, consume, full, empty, reverse: bool):
    """Runs `load(n, slot)` in the producer and `consume(n, slot, carry)` in two consumers, in order of n."""
    at = (lambda i: N - 1 - i) if reverse else (lambda i: i)

    def produce():
        plgpu.set_max_registers(40, action="decrease")
        for i in range(min(STAGES, N)):
            load(jnp.int32(at(i)), i)

        @pl.loop(0, max(N - STAGES, 0))
        def _(i):
            slot = lax.rem(i, jnp.int32(STAGES))
            plgpu.barrier_wait(empty.at[slot])
            load(at(i + STAGES), slot)

        for i in range(max(N - STAGES, 0), N):  # every arrival is waited for, as the interpreter demands
            plgpu.barrier_wait(empty.at[i % STAGES])

    def run(enter, leave):
        plgpu.set_max_registers(232, action="increase")

        def step(i, carry):
            slot = lax.rem(i, jnp.int32(STAGES))
            return consume(at(i), slot, carry, full.at[slot], empty.at[slot])

        leave(lax.fori_loop(0, N, step, enter()))
        plgpu.wait_smem_to_gmem(0)

    return produce, run


_SEGMENT, _FIRST, _LAST = range(3)


def segment_marks(slot_BN: Int[Array, "B N"]) -> Int[Array, "B N 3"]:
    """The segment of each chunk, and whether it is the first, and the last, of its segment."""
    change_BN = jnp.diff(slot_BN, axis=1) != 0
    edge_B1 = jnp.ones_like(change_BN, shape=(len(slot_BN), 1))
    first_BN, last_BN = (jnp.concatenate(x, axis=1) for x in ((edge_B1, change_BN), (change_BN, edge_B1)))
    return jnp.stack([slot_BN, first_BN, last_BN], axis=-1).astype(jnp.int32)


def _entering(marks_g, mark: int, b, h, n, columns, table_g, state: Array) -> Array:
    """The segment's state in the table if chunk n has the mark, else `state`."""
    if not marks_g:
        return state
    place = table_g.at[b, marks_g[0][b, n, _SEGMENT], h, :, columns]
    fresh = lambda: plgpu.load(place, layout=TILE, optimized=False)
    return lax.cond(marks_g[0][b, n, mark] == 1, fresh, lambda: state)


def _leaving(marks_g, mark: int, b, h, n, columns, table_g, state: Array) -> None:
    """Writes the state to the segment's place in the table if chunk n has the mark."""
    if not marks_g:
        return

    @pl.when(marks_g[0][b, n, mark] == 1)
    def _():
        table_g[b, marks_g[0][b, n, _SEGMENT], h, :, columns] = state


@functools.partial(jax.jit, static_argnames=("keep", "outputs", "parts"))
def state_pass(
    qp: Float[Array, "B H N C K"],
    kp: Float[Array, "B H N C K"],
    km: Float[Array, "B H N C K"],
    pT: Float[Array, "B H N C C"],
    tT: Float[Array, "B H N C C"],
    dec: Float[Array, "B H N K"],
    v_BTHV: Float[Array, "B T H V"],
    beta_BHT: Float[Array, "B H T"],
    initial_BHKV: Float[Array, "B *S HP K V"],
    start: Int[Array, " 1"],
    marks: Int[Array, "B N 3"] | None = None,
    *,
    keep: bool,
    into=(),
    outputs: bool = True,
    parts: int = 1,
) -> tuple[Array, ...]:
    """From the results of `chunk_operands`, with S the state at chunk entry:

        R = beta (V - K+ S),   U = T R,   O = Q+ S + P U,   S <- diag(e^{G_C}) S + K-^T U.

    Returns (o [B, T, H, V] bf16, final state [B, H, K, V] float32) and, if `keep`, for the backward pass
    (S [B, H, N, K, V], U [B, H, N, C, V]), both bf16. With `into` = (a reference to o,) the outputs of these N chunks
    are written there, and not returned; nor are they computed if not `outputs`. With `marks` the initial and final
    states are tables of one state per segment: see `segment_marks`.

    `parts`: where the states at chunks 0, N/parts, ... are known, they start that many passes side by side instead of
    one. `initial_BHKV` and the results then have H x parts heads of N / parts chunks, the parts of a head in turn.
    """
    B, H, N, _, K = kp.shape
    H, N = H * parts, N // parts
    qp, kp, km, pT, tT, dec = (x.reshape(B, H, N, *x.shape[3:]) for x in (qp, kp, km, pT, tT, dec))
    marked = () if marks is None else (marks,)
    new_o = (jax.ShapeDtypeStruct(v_BTHV.shape, bf16),) if outputs and not into else ()

    def kernel(*refs_and_scoped):
        *refs, scoped = refs_and_scoped
        qp_g, kp_g, km_g, pT_g, tT_g, dec_g, v_g, beta_g, initial_g, start_g, *refs = refs
        marks_g, refs = refs[: len(marked)], refs[len(marked) :]
        o_g, refs = refs[: int(outputs)], refs[int(outputs) :]
        final_g, *kept_g = refs
        (kp_s, km_s, tT_s, dec_s, beta_s, v_s, *of_o), (s_s, u_s, *o_s), full, empty = scoped
        qp_s, pT_s = of_o or (None, None)
        bh, wg = lax.axis_index("bh"), lax.axis_index("wg")
        b, h = bh // H, lax.rem(bh, jnp.int32(H))
        row = h // parts  # of v, beta and o, which have all chunks
        start = start_g[0] + lax.rem(h, jnp.int32(parts)) * N
        columns = pl.ds(wg * VH, VH)
        s_w, u_w = s_s.at[wg], u_s.at[wg]

        def load(n, slot):
            bar = full.at[slot]
            for_o = ((qp_g, qp_s), (pT_g, pT_s)) if outputs else ()
            for src, dst in ((kp_g, kp_s), (km_g, km_s), (tT_g, tT_s), (dec_g, dec_s), *for_o):
                plgpu.copy_gmem_to_smem(src.at[b, h, n], dst.at[slot], bar)
            rows = pl.ds((start + n) * C, C)
            plgpu.copy_gmem_to_smem(beta_g.at[b, row, rows], beta_s.at[slot], bar)
            for w in range(2):
                src = v_g.at[b, rows, row, pl.ds(w * VH, VH)]
                plgpu.copy_gmem_to_smem(src, v_s.at[slot, w], bar)

        def consume(n, slot, s, full, empty):
            s = _entering(marks_g, _FIRST, b, h, n, columns, initial_g, s)
            s_w[...] = s.astype(bf16)
            plgpu.commit_smem()
            if keep:
                plgpu.copy_smem_to_gmem(s_w, kept_g[0].at[b, h, n, :, columns])
            plgpu.barrier_wait(full)
            explained = product((C, VH), (kp_s.at[slot], s_w))
            beta = plgpu.load(beta_s.at[slot], layout=ROW)
            v = plgpu.load(v_s.at[slot, wg], layout=TILE).astype(f32)
            u_w[...] = (along_columns(beta, VH) * (v - explained)).astype(bf16)
            plgpu.commit_smem()
            u = product((C, VH), (transposed(tT_s.at[slot]), u_w))
            u_w[...] = u.astype(bf16)
            plgpu.commit_smem()
            if keep:
                plgpu.copy_smem_to_gmem(u_w, kept_g[1].at[b, h, n, :, columns])
            if outputs:
                o = product((C, VH), (qp_s.at[slot], s_w), (transposed(pT_s.at[slot]), u_w))
            s = s * along_columns(plgpu.load(dec_s.at[slot], layout=ROW), VH)
            s = added(s, (transposed(km_s.at[slot]), u_w))
            plgpu.barrier_arrive(empty)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if outputs:
                o_w = o_s[0].at[wg]
                o_w[...] = o.astype(bf16)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_w, o_g[0].at[b, pl.ds((start + n) * C, C), row, columns])
            _leaving(marks_g, _LAST, b, h, n, columns, final_g, s)
            return s

        def enter():
            if marks_g:
                return plgpu.layout_cast(jnp.zeros((K, VH), f32), TILE)
            return plgpu.load(initial_g.at[b, h, :, columns], layout=TILE, optimized=False)

        def leave(s):
            if not marks_g:
                final_g[b, h, :, columns] = s

        produce, run = _pipeline(N, load, consume, full, empty, reverse=False)
        pl.when(wg < 2)(lambda: run(enter, leave))
        pl.when(wg == 2)(produce)

    kept = (jax.ShapeDtypeStruct((B, H, N, K, D), bf16), jax.ShapeDtypeStruct((B, H, N, C, D), bf16))
    return _call(
        kernel,
        (*new_o, jax.ShapeDtypeStruct(initial_BHKV.shape, f32), *(kept if keep else ())),
        B * H,
        9 if outputs else 7,
        (
            *[operand(STAGES, C, K)] * 2,
            operand(STAGES, C, C),
            plgpu.SMEM((STAGES, K), f32),
            plgpu.SMEM((STAGES, C), f32),
            operand(STAGES, 2, C, VH),
            *((operand(STAGES, C, K), operand(STAGES, C, C)) if outputs else ()),
        ),
        (operand(2, K, VH), *[operand(2, C, VH)] * (2 if outputs else 1)),
    )(qp, kp, km, pT, tT, dec, v_BTHV, beta_BHT, initial_BHKV, start, *marked, *into)


@jax.jit
def state_adjoint(
    qp: Float[Array, "B H N C K"],
    kp: Float[Array, "B H N C K"],
    km: Float[Array, "B H N C K"],
    pT: Float[Array, "B H N C C"],
    tT: Float[Array, "B H N C C"],
    dec: Float[Array, "B H N K"],
    do_BTHV: Float[Array, "B T H V"],
    beta_BHT: Float[Array, "B H T"],
    d_final_BHKV: Float[Array, "B *S H K V"],
    start: Int[Array, " 1"],
    marks: Int[Array, "B N 3"] | None = None,
    *,
    into=(),
) -> tuple[Array, ...]:
    """The adjoint of `state_pass`, from the last chunk to the first, with dS the gradient of the state at chunk exit:

        dU = P^T dO + K- dS,   dV = beta (T^T dU),   dS <- diag(e^{G_C}) dS + Q+^T dO - K+^T dV.

    Returns dV [B, T, H, V] bf16, dS of every chunk [B, H, N, K, V] bf16, d_initial [B, H, K, V] float32. With `into` =
    (a reference to dV,) it is written there, and not returned. `marks` as in `state_pass`.
    """
    B, H, N, _, K = kp.shape
    marked = () if marks is None else (marks,)

    def kernel(*refs_and_scoped):
        *refs, scoped = refs_and_scoped
        qp_g, kp_g, km_g, pT_g, tT_g, dec_g, do_g, beta_g, final_g, start_g, *refs = refs
        marks_g, (dv_g, ds_g, initial_g) = refs[: len(marked)], refs[len(marked) :]
        start = start_g[0]
        (qp_s, kp_s, km_s, pT_s, tT_s, dec_s, beta_s, do_s), (s_s, u_s, dv_s), full, empty = scoped
        bh, wg = lax.axis_index("bh"), lax.axis_index("wg")
        b, h = bh // H, lax.rem(bh, jnp.int32(H))
        columns = pl.ds(wg * VH, VH)
        s_w, u_w, dv_w = s_s.at[wg], u_s.at[wg], dv_s.at[wg]

        def load(n, slot):
            bar = full.at[slot]
            for src, dst in (
                (pT_g, pT_s), (km_g, km_s), (tT_g, tT_s), (qp_g, qp_s), (kp_g, kp_s), (dec_g, dec_s)
            ):  # fmt: skip
                plgpu.copy_gmem_to_smem(src.at[b, h, n], dst.at[slot], bar)
            rows = pl.ds((start + n) * C, C)
            plgpu.copy_gmem_to_smem(beta_g.at[b, h, rows], beta_s.at[slot], bar)
            for w in range(2):
                src = do_g.at[b, rows, h, pl.ds(w * VH, VH)]
                plgpu.copy_gmem_to_smem(src, do_s.at[slot, w], bar)

        def consume(n, slot, ds, full, empty):
            ds = _entering(marks_g, _LAST, b, h, n, columns, final_g, ds)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            s_w[...] = ds.astype(bf16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(s_w, ds_g.at[b, h, n, :, columns])
            plgpu.barrier_wait(full)
            do_w = do_s.at[slot, wg]
            u_w[...] = product((C, VH), (pT_s.at[slot], do_w), (km_s.at[slot], s_w)).astype(bf16)
            plgpu.commit_smem()
            beta = along_columns(plgpu.load(beta_s.at[slot], layout=ROW), VH)
            dv = beta * product((C, VH), (tT_s.at[slot], u_w))
            plgpu.commit_smem()  # every warp's product has read u_w
            dv_w[...] = dv.astype(bf16)
            u_w[...] = (-dv).astype(bf16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(dv_w, dv_g.at[b, pl.ds((start + n) * C, C), h, columns])
            ds = ds * along_columns(plgpu.load(dec_s.at[slot], layout=ROW), VH)
            ds = added(ds, (transposed(qp_s.at[slot]), do_w), (transposed(kp_s.at[slot]), u_w))
            plgpu.barrier_arrive(empty)
            _leaving(marks_g, _FIRST, b, h, n, columns, initial_g, ds)
            return ds

        def enter():
            if marks_g:
                return plgpu.layout_cast(jnp.zeros((K, VH), f32), TILE)
            return plgpu.load(final_g.at[b, h, :, columns], layout=TILE, optimized=False)

        def leave(ds):
            if not marks_g:
                initial_g[b, h, :, columns] = ds

        produce, run = _pipeline(N, load, consume, full, empty, reverse=True)
        pl.when(wg < 2)(lambda: run(enter, leave))
        pl.when(wg == 2)(produce)

    return _call(
        kernel,
        (
            *(() if into else (jax.ShapeDtypeStruct(do_BTHV.shape, bf16),)),
            jax.ShapeDtypeStruct((B, H, N, K, D), bf16),
            jax.ShapeDtypeStruct(d_final_BHKV.shape, f32),
        ),
        B * H,
        9,
        (
            *[operand(STAGES, C, K)] * 3,
            *[operand(STAGES, C, C)] * 2,
            plgpu.SMEM((STAGES, K), f32),
            plgpu.SMEM((STAGES, C), f32),
            operand(STAGES, 2, C, VH),
        ),
        (operand(2, K, VH), operand(2, C, VH), operand(2, C, VH)),
    )(qp, kp, km, pT, tT, dec, do_BTHV, beta_BHT, d_final_BHKV, start, *marked, *into)


def _call(kernel, out_type, blocks: int, copies: int, staged, own):
    """`copies` fill a slot of the buffers `staged`; the buffers `own` are the consumers'."""

    def state_kernel(*refs):
        pl.run_scoped(
            lambda *scoped: kernel(*refs, scoped),
            staged,
            own,
            plgpu.Barrier(num_arrivals=copies, num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
            collective_axes="wg",
        )

    return plgpu.kernel(
        state_kernel, out_type=out_type, grid=(blocks,), grid_names=("bh",), num_threads=3, thread_name="wg"
    )

"""KDA on Hopper: everything a chunk needs from its own tokens, one warpgroup per chunk and head (Pallas Mosaic-GPU).

A chunk of C = 64 tokens is cut into two tiles of 32. With G the running sum of the gates and r_a the value of G at the
first row of tile a, minus SHIFT, the scores of tile a's rows are one product

    sum_c (x_ic e^{G_ic - r_ac}) (k_jc e^{r_ac - G_jc})        x = q, k;  j <= i.

31 gates of at most 5 nats span 155, so both factors stay within e^{+-77.5}, which float32 and bfloat16 hold. SHIFT is a
constant, so that no row depends on a later gate (fla#1240). What lies above the diagonal may overflow and is dropped by
select. Exponents are in log2 units throughout.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

C = 64  # tokens of a chunk
R = 32  # rows of a tile
D = 128  # channels of a key and of a value
HALF = 64  # channels worked on at a time: what the registers hold
G_MIN = -5.0  # the lowest gate that a tile of R rows can span
SHIFT = (R - 1) * -G_MIN / 2 * math.log2(math.e)
LOG2E = math.log2(math.e)

STEP = 8  # rows that a scan over tokens has in flight
PAD = 8  # columns that keep the rows of a float32 array, read as a TILE, in different banks

f32, bf16 = jnp.float32, jnp.bfloat16
TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)  # a vector over the rows of a tile
COL = plgpu.Layout.WGMMA.reduce(0)  # a vector over its columns
CHANNELS = plgpu.Layout.WG_STRIDED((D,), vec_size=1)  # one thread per channel


# Layouts are all given, so none are inferred: inference takes minutes for kernels of this size.
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
)


def operand(*shape: int, columns: int = 64):
    """Shared memory that the tensor cores read, in tiles of 8 rows. Both operands of a product need the same tiles."""
    tiles = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))
    return plgpu.SMEM(shape, bf16, transforms=tiles)


def product(shape: tuple[int, int], *pairs) -> Array:
    """Sum of a @ b over pairs, in float32 registers."""

    def body(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(body, plgpu.ACC(shape, f32))


def transposed(ref):
    return ref.transpose((1, 0))


def channels(ref, row) -> Array:
    return plgpu.load(ref.at[row, pl.ds(0, D)], layout=CHANNELS)


def plain(ref) -> Array:
    """A TILE from memory that is not swizzled."""
    return plgpu.load(ref, layout=TILE, optimized=False)


def products(shape: tuple[int, int], *sums) -> list[Array]:
    """For each list of pairs the sum of a @ b, in float32 registers; all in flight together."""

    def body(*accs):
        for acc, pairs in zip(accs, sums):
            for a, b in pairs:
                plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)
        return [acc[...] for acc in accs]

    return pl.run_scoped(body, *[plgpu.ACC(shape, f32)] * len(sums))


def index(axis: int, columns: int) -> Array:
    return plgpu.broadcasted_iota(jnp.int32, (C, columns), axis, layout=TILE)


def along_rows(x: Array, columns: int) -> Array:
    """The row vector x under each other, C times."""
    return lax.broadcast_in_dim(x, (C, columns), [1])


def along_columns(x: Array, columns: int) -> Array:
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


class Documents:
    """What a chunk must know of packed documents, from a row of `documents`. Without packing nothing is masked.

    Gate sums restart with each document, so that no document sees a bit of another's gates.
    """

    ROWS = 3  # ordinal, same, across

    def __init__(self, ref):
        self.ref = ref

    def same(self, row):
        """1 if the token is of the document of the token before it, else 0."""
        return 1.0 if self.ref is None else self.ref[1, row]

    def across(self):
        """1 if one document runs from chunk entry to exit, else 0."""
        return 1.0 if self.ref is None else self.ref[2, 0]

    def keep(self, x: Array, row: int | None) -> Array:
        """x [C, n] where the token is of the document of `row`, or (None) of the one at chunk entry; else 0."""
        if self.ref is None:
            return x
        ordinal = along_columns(plgpu.load(self.ref.at[0], layout=ROW), x.shape[1])
        return jnp.where(ordinal == (0.0 if row is None else self.ref[0, row]), x, 0.0)

    def pairs(self, x: Array, first: int = 0) -> Array:
        """x [C, n], where the row's and the column's token (`first` on) are of one document; else 0."""
        if self.ref is None:
            return x
        n = x.shape[1]
        row = along_columns(plgpu.load(self.ref.at[0], layout=ROW), n)
        column = along_rows(plgpu.load(self.ref.at[0, pl.ds(first, n)], layout=COL), n)
        return jnp.where(row == column, x, 0.0)


def documents(segment_ids: Int[Array, "B T"] | None) -> Float[Array, "B N 3 C"] | None:
    """For `Documents`. The first chunk is entered by the first document; T is a multiple of C."""
    if segment_ids is None:
        return None
    ids_BNC = segment_ids.reshape(segment_ids.shape[0], -1, C)
    before_BT = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)
    starts_BNC = ids_BNC != before_BT.reshape(ids_BNC.shape)
    ordinal_BNC = jnp.cumsum(starts_BNC, axis=-1)
    across_BNC = jnp.broadcast_to(ordinal_BNC[..., -1:] == 0, ids_BNC.shape)
    return jnp.stack([ordinal_BNC, ~starts_BNC, across_BNC], axis=2).astype(f32)


def sum_gates(g_s, G_s, docs: Documents) -> None:
    """Gates [C, D] in nats to their running sums [C, D + PAD] in log2 units, each thread down its own channel."""

    def rows(n, total):
        for i in range(STEP):
            row = n * STEP + i
            total = total * docs.same(row) + channels(g_s, row) * LOG2E
            G_s[row, pl.ds(0, D)] = total
        return total

    lax.fori_loop(0, C // STEP, rows, plgpu.layout_cast(jnp.zeros((D,), f32), CHANNELS))


def references(G_s, columns, docs: Documents) -> tuple[Array, Array]:
    """(r of each row [C, n], r of the second tile in each row [C, n]), both without SHIFT, of n channels.

    A row of a document that starts inside the tile refers to its document's start, where G is 0 by definition.
    """
    first, second = (plgpu.load(G_s.at[R * a, columns], layout=COL) for a in (0, 1))
    first, second = (along_rows(x, x.shape[0]) for x in (first, second))
    return jnp.where(index(0, first.shape[1]) < R, docs.keep(first, 0), docs.keep(second, R)), second


def column_factors(G: Array, base: Array, second: Array, docs: Documents) -> tuple[Array, Array]:
    """e^{r_a - G_j} for the tile of token j itself, and for the second tile where j is in the first, else 0."""
    other = docs.keep(jnp.exp2(second - SHIFT - G), R)
    return jnp.exp2(base - SHIFT - G), jnp.where(index(0, G.shape[1]) < R, other, 0.0)


def entering(G: Array, docs: Documents) -> Array:
    """e^G: the decay from chunk entry to each token."""
    return docs.keep(jnp.exp2(G), None)


def leaving(G: Array, g_s, columns, docs: Documents) -> Array:
    """e^{G_C - G}: the decay from each token to chunk exit."""
    last = plgpu.load(g_s.at[C - 1, columns], layout=COL)
    return docs.keep(jnp.exp2(along_rows(last, G.shape[1]) - G), C - 1)


def chunk_operands(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    g_BTHK: Float[Array, "B T H K"],
    beta_BHT: Float[Array, "B H T"],
    docs: Float[Array, "B N 3 C"] | None,
    scale: float,
) -> tuple[Array, ...]:
    """Q+ = scale e^G q, K+ = e^G k, K- = e^{G_C - G} k  [B, H, N, C, K] bf16, P^T (scaled) and
    T^T = (I + beta X)^-T  [B, H, N, C, C] bf16, e^{G_C}  [B, H, N, K] float32. T is a multiple of C."""
    B, T, H, K = q_BTHK.shape
    N = T // C

    packed = () if docs is None else (docs,)

    def kernel(q_g, k_g, g_g, beta_g, *refs_and_scoped):
        *refs, scoped = refs_and_scoped
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
        rows = pl.ds(n * C, C)
        for src, dst in ((g_g, g_s), (q_g, q_s), (k_g, k_s)):
            plgpu.copy_gmem_to_smem(src.at[b, rows, h], dst, bar)
        plgpu.copy_gmem_to_smem(beta_g.at[b, h, rows], beta_s, bar)
        for src in docs_g:
            plgpu.copy_gmem_to_smem(src.at[b, n], docs_s, bar)
        plgpu.barrier_wait(bar)
        sum_gates(g_s, G_s, docs)
        plgpu.commit_smem()

        def halves(*accs):
            for half in range(D // HALF):
                columns = pl.ds(half * HALF, HALF)
                base, second = references(G_s, columns, docs)
                G = plain(G_s.at[:, columns])
                q = plgpu.load(q_s.at[:, columns], layout=TILE).astype(f32) * scale
                k = plgpu.load(k_s.at[:, columns], layout=TILE).astype(f32)
                r = jnp.exp2(G - base + SHIFT)
                rq_s[...] = (q * r).astype(bf16)
                rk_s[...] = (k * r).astype(bf16)
                own, other = column_factors(G, base, second, docs)
                c0_s[...] = (k * own).astype(bf16)
                c1_s[...] = (k * jnp.where(index(0, HALF) < R, other, own)).astype(bf16)
                plgpu.commit_smem()
                for i, acc in enumerate(accs):  # P and X of the first tile, then of the second
                    of_tile = pl.ds(i // 2 * R, R)
                    x_s_ = (rq_s, rk_s)[i % 2]
                    plgpu.wgmma(acc, (c0_s, c1_s)[i // 2], transposed(x_s_.at[of_tile]))
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

        # (I + A)^-1 by doubling the diagonal blocks, transposed: Y <- Y - Y (A restricted to the new corners) Y. Every
        # Y is an inverse of diagonal blocks, with entries in [-1, 1] for unit keys and beta <= 1; no power series.
        A = plgpu.load(x_s, layout=TILE).astype(f32) * along_rows(plgpu.load(beta_s, layout=COL), C)
        j, i = index(0, C), index(1, C)

        def corners(w):
            return jnp.where((j // (2 * w) == i // (2 * w)) & (j % (2 * w) < w) & (i % (2 * w) >= w), A, 0.0)

        Y = jnp.where(i == j, 1.0, 0.0) - corners(1)
        for w in (2, 4, 8, 16, 32):
            y_s[...] = Y.astype(bf16)
            plgpu.commit_smem()
            m_s[...] = product((C, C), (corners(w).astype(bf16), y_s)).astype(bf16)
            plgpu.commit_smem()
            Y = Y - product((C, C), (Y.astype(bf16), m_s))
        y_s[...] = Y.astype(bf16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_s, tT_g.at[b, h, n])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def entry(*refs):
        half = operand(C, HALF)
        pl.run_scoped(
            lambda *scoped: kernel(*refs, scoped),
            operand(C, K),
            operand(C, K),
            plgpu.SMEM((C, K + PAD), f32),
            half,
            plgpu.RefUnion(
                plgpu.SMEM((C, K), f32),
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
        entry,
        out_type=(
            *[out(C, K)] * 3,
            *[out(C, C)] * 2,
            jax.ShapeDtypeStruct((B, H, N, K), f32),
        ),
        grid=(N, B * H),
        grid_names=("n", "bh"),
        compiler_params=COMPILER_PARAMS,
    )(q_BTHK, k_BTHK, g_BTHK, beta_BHT, *packed)

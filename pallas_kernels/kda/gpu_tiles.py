"""KDA on Hopper: what the kernels share: sizes, layouts, products, packed documents, decays (Pallas Mosaic-GPU).

A chunk of C = 64 tokens is cut into two tiles of 32. With G the running sum of the gates and r_a the value of G at the
first row of tile a, minus SHIFT, the scores of tile a's rows are one product

    sum_c (x_ic e^{G_ic - r_ac}) (k_jc e^{r_ac - G_jc})        x = q, k;  j <= i.

31 gates of at most 5 nats span 155, so both factors stay within e^{+-77.5}, which float32 and bfloat16 hold. SHIFT is a
constant, so that no row depends on a later gate (fla#1240). What lies above the diagonal may overflow and is dropped by
select. Exponents are in log2 units throughout.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.reference import L2_EPS

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


def added(x: Array, *pairs) -> Array:
    """x [M, N] float32 plus the sum of a @ b over pairs."""

    def body(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)

    return pl.run_state(body)(plgpu.ACC.init(x))


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
    """Row (0) or column (1) of each element."""
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


Decay = tuple[Array, ...]
"""Log decays, (g [B, T, H, K] float32,); then q and k have unit length.

Or (logits [B, T, H, K], rate [H, K], offset [H, K]) of g = g_min / (1 + 2^(rate logits + offset)), which the kernels
compute where they sum the gates; then q and k are raw, and the kernels normalise their rows: see `inverse_norm`.
"""



def squares(ref) -> Array:
    """The sum of squares of each row of a reference, as ROW."""
    x = plgpu.load(ref, layout=TILE).astype(f32)
    return (x * x).sum(1)


def inverse_norm(sum_of_squares: Array) -> Array:
    return lax.rsqrt(sum_of_squares + L2_EPS)


def gate_of(decay_g, g_min: float, h):
    """What a token has in decay_g[0] -> its gates in nats, as CHANNELS. decay_g: a `Decay` in global memory."""
    if len(decay_g) == 1:
        return lambda g: g
    rate, offset = (plgpu.load(ref.at[h], layout=CHANNELS) for ref in decay_g[1:])
    return lambda logits: g_min / (1.0 + jnp.exp2(rate * logits.astype(f32) + offset))


def gate_adjoint(decay_g, g_min: float, h):
    """(logits, dg) of a token -> (gradient of the logits, of offset, of rate), as CHANNELS."""
    rate, offset = (plgpu.load(ref.at[h], layout=CHANNELS) for ref in decay_g[1:])

    def adjoint(logits, dg):
        logits = logits.astype(f32)
        open_ = 1.0 / (1.0 + jnp.exp2(rate * logits + offset))
        d = dg * (-g_min / LOG2E) * open_ * (1.0 - open_)
        return rate * d, d, logits * d

    return adjoint


def sum_gates(gates, G_s, docs: Documents) -> None:
    """Running sums of the gates [C, D + PAD] in log2 units, each thread down its own channel.

    gates(row): the D gates of a token in nats, as CHANNELS.
    """

    def rows(n, total):
        for i, gate in enumerate([gates(n * STEP + i) for i in range(STEP)]):
            total = total * docs.same(n * STEP + i) + gate * LOG2E
            G_s[n * STEP + i, pl.ds(0, D)] = total
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



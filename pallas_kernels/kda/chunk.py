"""The part of a KDA chunk that needs no state: decays, score tiles and the triangular inverse, for all chunks at once.

Three rules keep the numbers right:
  * A sum of gates adds exactly the gates between its two ends; it is never a difference of two longer sums. So it is
    as accurate as it is short, and gates of later tokens or of other documents cannot touch a single bit of it.
  * Scores are masked by select, never by multiplication: what is masked may be infinite.
  * A factor is zero where its token may not meet the state (another document), so no product needs a mask.

Axes: N chunks, C tokens of a chunk, A tiles of a chunk, R rows of a tile (C = A R); ".." stands for N B H.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.config import ChunkConfig

HIGHEST = jax.lax.Precision.HIGHEST


class Plan(NamedTuple):
    """What the compiled code depends on besides shapes and dtypes."""

    scale: float
    g_min: float | None
    config: ChunkConfig

    @property
    def shift(self) -> float:
        """Distance in nats from a tile's first row to the reference point of its decays.

        Half of what a tile can span, so that row and column factors share the exponent range evenly; and a constant, so
        that no earlier row depends on a later gate (fla#1240).
        """
        return 0.0 if self.g_min is None else -self.g_min * (self.config.tile - 1) / 2


@dataclasses.dataclass(frozen=True)
class Products:
    """Matrix products of operands rounded to `operand`, accumulated in `accumulate` (float32 or float64)."""

    operand: jnp.dtype
    accumulate: jnp.dtype

    def __call__(self, spec: str, a: Array, b: Array) -> Array:
        # On a TPU a float32 product is one bfloat16 pass unless more is asked for; on a GPU it may be tf32.
        precision = None if self.operand == jnp.bfloat16 else HIGHEST
        a, b = a.astype(self.operand), b.astype(self.operand)
        return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=self.accumulate)


def sum_gates(spec: str, mask: np.ndarray | Array, g: Array) -> Array:
    """Sums of g over the sets of tokens that a boolean mask picks, as an exact matrix product with 0/1 weights."""
    return jnp.einsum(spec, mask.astype(g.dtype), g, precision=HIGHEST, preferred_element_type=g.dtype)


class Visibility(NamedTuple):
    """Which tokens of a chunk may meet. Leading axes [N, B, 1] if there are segments, else none."""

    earlier: Array | np.ndarray  # [.., C, C]: j is before i and of the same document
    tile: (
        Array | np.ndarray
    )  # [.., R, R]: gate l lies after the tile's and the document's first row, not after row i
    enter: Array | np.ndarray  # [.., C, 1]: the token is of the document that ran at chunk entry
    leave: Array | np.ndarray  # [.., C, 1]: the token is of the document that runs at chunk exit
    across: Array | np.ndarray  # [.., 1]: one document runs from entry to exit


def padding(T: int, C: int) -> int:
    """Tokens that are missing to whole chunks, of which there are two at least.

    XLA inlines a loop of one step, and then its CPU backend (0.11.2) reads past the end of the entry state where that
    is a constant: products of a broadcast zero came out as 1e30.
    """
    return max(2 * C - T, -T % C)


def visibility(segment_ids: Int[Array, "B T"] | None, config: ChunkConfig) -> Visibility:
    C, R = config.chunk, config.tile
    earlier = np.tri(C, k=-1, dtype=bool)
    tile = np.tri(R, dtype=bool) & (np.arange(R) > 0)
    if segment_ids is None:
        return Visibility(earlier, tile, np.ones((C, 1), bool), np.ones((C, 1), bool), np.ones(1, bool))

    B, T = segment_ids.shape
    ids = jnp.pad(segment_ids, ((0, 0), (0, padding(T, C))), mode="edge")  # padding must let the last state through
    before = jnp.pad(ids, ((0, 0), (1, 0)), mode="edge")[
        :, :-1
    ]  # the first chunk is entered by its first document
    ids_NBC, before_NBC = (x.reshape(B, -1, C).swapaxes(0, 1) for x in (ids, before))
    ids_NBAR, before_NBAR = (x.reshape(*x.shape[:-1], C // R, R) for x in (ids_NBC, before_NBC))
    entry_NB1, exit_NB1 = before_NBC[..., :1], ids_NBC[..., -1:]
    seen = Visibility(
        earlier=earlier & (ids_NBC[..., :, None] == ids_NBC[..., None, :]),
        tile=tile & (ids_NBAR[..., :, None] == before_NBAR[..., None, :]),
        enter=(ids_NBC == entry_NB1)[..., None],
        leave=(ids_NBC == exit_NB1)[..., None],
        across=entry_NB1 == exit_NB1,
    )
    return Visibility(*(x[:, :, None] for x in seen))


class Decay(NamedTuple):
    """Decays of a chunk. All but the first are factors in [0, 1]."""

    fall: Array  # [.., A, R, K]: nats from the tile's (or the document's) first row to row i
    row: Array  # [.., A, R, K]: e^fall
    col: Array  # [.., A, R, K]: from row j to the tile's last row
    between: Array  # [.., A, A, K]: from the last row of tile b to the first row of tile a; zero unless b < a
    enter: Array  # [.., C, K]: from chunk entry to token i; zero if the entry state is another document's
    leave: Array  # [.., C, K]: from token i to chunk exit; zero if the exit state is another document's
    across: Array  # [.., K]: from entry to exit; zero if a document starts in between


def decays(g: Float[Array, "N B H C K"], see: Visibility, config: ChunkConfig) -> Decay:
    """Two exponentials per token and channel; the others are per tile."""
    C, R = config.chunk, config.tile
    A, K = C // R, g.shape[-1]
    lower_A, lower_R = np.tri(A, k=-1, dtype=bool), np.tri(R, k=-1, dtype=bool)
    a, b, c = np.ogrid[:A, :A, :A]

    g = g.reshape(*g.shape[:-2], A, R, K)
    first, total = g[..., 0, :], g.sum(-2)
    fall = sum_gates("...il,...lk->...ik", see.tile, g)
    row = jnp.exp(fall)
    col = jnp.exp(sum_gates("lj,...lk->...jk", lower_R, g))
    to_first = jnp.exp(first + sum_gates("ac,...ck->...ak", lower_A, total))
    from_last = jnp.exp(sum_gates("cb,...ck->...bk", lower_A, total))
    between = first[..., None, :] + sum_gates("abc,...ck->...abk", (b < c) & (c < a), total)

    chunk_rows = (*g.shape[:-3], C, K)
    enter = (row * to_first[..., None, :]).reshape(chunk_rows)
    leave = (col * from_last[..., None, :]).reshape(chunk_rows)
    return Decay(
        fall=fall,
        row=row,
        col=col,
        between=jnp.exp(jnp.where(b < a, between, -jnp.inf)),
        enter=jnp.where(see.enter, enter, 0),
        leave=jnp.where(see.leave, leave, 0),
        across=jnp.where(see.across, jnp.exp(total.sum(-2)), 0),
    )


class Tiles(NamedTuple):
    """Operands of the score products. Tile a has its rows of q above those of k, against the columns of the chunk.

    Row i of tile a carries e^{G_i - r_a} and column j e^{r_a - G_j}, with r_a = G_first - shift, so that a diagonal
    tile and an off-diagonal one are the same product. Columns right of the diagonal tile are zero.
    """

    row_factor: Array  # [.., A, R, K]
    col_factor: Array  # [.., A, C, K]
    rows: Array  # [.., A, 2R, K], rounded to the operand dtype
    cols: Array  # [.., A, C, K], rounded likewise


def tiles(q: Array, k: Array, decay: Decay, plan: Plan, mm: Products) -> Tiles:
    A, R, K = decay.row.shape[-3:]
    q, k = (x.reshape(decay.row.shape) for x in (q, k))
    lift = math.exp(plan.shift)
    row_factor = decay.row * lift
    # The own tile's factor must not come from `col`, which knows the gates of later rows.
    own = jnp.zeros_like(decay.row) if plan.g_min is None else 1 / row_factor
    other = decay.col[..., None, :, :, :] * (decay.between / lift)[..., None, :]  # [.., a, b, R, K]
    col_factor = jnp.where(np.eye(A, dtype=bool)[..., None, None], own[..., None, :, :, :], other)
    cols = k[..., None, :, :, :] * col_factor
    col_factor, cols = (x.reshape(*x.shape[:-3], A * R, K) for x in (col_factor, cols))
    rows = jnp.concatenate([q * row_factor, k * row_factor], axis=-2)
    return Tiles(row_factor, col_factor, rows.astype(mm.operand), cols.astype(mm.operand))


def _own_tile(A: int) -> np.ndarray:
    """Picks the diagonal tiles out of scores laid out as [.., A, 2, R, A, R]."""
    return np.eye(A, dtype=bool)[:, None, None, :, None]


def _pairwise(fall: Float[Array, "*lead R K"]) -> Float[Array, "*lead R R K"]:
    """e^{G_i - G_j} for j < i of a tile, else zero. Any gate is safe; XLA fuses it into the sums that use it."""
    earlier = np.tri(fall.shape[-2], k=-1, dtype=bool)[..., None]
    return jnp.exp(jnp.where(earlier, fall[..., :, None, :] - fall[..., None, :, :], -jnp.inf))


def scores(
    q: Array, k: Array, t: Tiles, decay: Decay, see: Visibility, plan: Plan, mm: Products
) -> tuple[Float[Array, "*lead C C"], Float[Array, "*lead C C"]]:
    """sum_c x_ic k_jc e^{G_ic - G_jc} for j < i of one document, else zero; for x = q and x = k.

    The pair j = i has no decay and is left to the caller: q_i . k_i.
    """
    A, R, K = decay.row.shape[-3:]
    qk_kk = mm("...ik,...jk->...ij", t.rows, t.cols)
    lead = qk_kk.shape[:-3]
    if plan.g_min is None:
        q, k = (x.reshape(decay.row.shape) for x in (q, k))
        pairs = _pairwise(decay.fall) * k[..., None, :, :]
        own = jnp.stack([(x[..., :, None, :] * pairs).sum(-1) for x in (q, k)], axis=-3)  # [.., A, 2, R, R]
        qk_kk = jnp.where(_own_tile(A), own[..., None, :], qk_kk.reshape(*lead, A, 2, R, A, R))
    qk_kk = qk_kk.reshape(*lead, A, 2, R, A * R)
    qk, kk = (qk_kk[..., x, :, :].reshape(*lead, A * R, A * R) for x in (0, 1))
    return jnp.where(see.earlier, qk, 0), jnp.where(see.earlier, kk, 0)


def scores_adjoint(
    d_qk: Array, d_kk: Array, q: Array, k: Array, t: Tiles, decay: Decay, plan: Plan, mm: Products
) -> tuple[Float[Array, "*lead C K"], Float[Array, "*lead C K"], Float[Array, "*lead C K"]]:
    """Gradients of q, k and the gate sums G from those of the scores, which are zero unless j < i of one document.

    Every pair (i, j) adds p_ij to dG_i and takes it from dG_j, and the sums over G that give dg must see the two
    cancel. They do, to accumulation rounding, because both are formed from the very operands that entered the products:
    with un-rounded q and k, bfloat16 loses a third of dg when gates sit at -5.
    """
    A, R, K = decay.row.shape[-3:]
    lead = d_qk.shape[:-2]
    d_scores = jnp.stack([x.reshape(*lead, A, R, A * R) for x in (d_qk, d_kk)], axis=-3)
    if plan.g_min is None:
        d_scores = d_scores.reshape(*lead, A, 2, R, A, R)
        d_own = jnp.where(_own_tile(A), d_scores, 0).sum(-2)
        d_scores = jnp.where(_own_tile(A), 0, d_scores)
    d_scores = d_scores.reshape(*lead, A, 2 * R, A * R).astype(mm.operand)
    d_rows = mm("...ij,...jk->...ik", d_scores, t.cols)
    d_cols = mm("...ij,...ik->...jk", d_scores, t.rows)

    d_q, d_k = (t.row_factor * x for x in jnp.split(d_rows, 2, axis=-2))
    d_sum = sum(jnp.split(t.rows * d_rows, 2, axis=-2))
    if plan.g_min is None:
        q, k = (x.reshape(decay.row.shape) for x in (q, k))
        pairs = _pairwise(decay.fall)
        d_own_qk, d_own_kk = (d_own[..., x, :, :, None] * pairs for x in (0, 1))
        d_q_row, d_k_row = ((x * k[..., None, :, :]).sum(-2) for x in (d_own_qk, d_own_kk))
        d_k_col = (d_own_qk * q[..., :, None, :] + d_own_kk * k[..., :, None, :]).sum(-3)
        d_sum = d_sum + q * d_q_row + k * (d_k_row - d_k_col)
        d_q, d_k = d_q + d_q_row, d_k + d_k_row + d_k_col

    d_q, d_k, d_sum = (x.reshape(*lead, A * R, K) for x in (d_q, d_k, d_sum))
    return d_q, d_k + (t.col_factor * d_cols).sum(-3), d_sum - (t.cols * d_cols).sum(-3)


def unit_lower_inverse(a: Float[Array, "*lead n n"], tile: int) -> Float[Array, "*lead n n"]:
    """(I + a)^-1 for strictly lower triangular a: row by row within a tile, then by doubling,

        [[I + a1, 0], [b, I + a2]]^-1 = [[t1, 0], [-t2 b t1, t2]].

    Every intermediate is the inverse of a diagonal block, with entries in [-1, 1] for unit keys and beta <= 1. Power
    series of a are out: with repeated keys their terms grow like binomials (FlashKDA#34, tt-metal#54813).
    """
    n = a.shape[-1]
    matmul = functools.partial(jnp.matmul, precision=HIGHEST)
    if n <= tile:

        def next_row(i, inverse):  # row_i = e_i - a_i inverse, where the rows from i on are still zero
            row = jax.nn.one_hot(i, n, dtype=a.dtype) - matmul(
                jax.lax.dynamic_slice_in_dim(a, i, 1, -2), inverse
            )
            return jax.lax.dynamic_update_slice_in_dim(inverse, row, i, -2)

        return jax.lax.fori_loop(0, n, next_row, jnp.zeros_like(a))

    h = n // 2
    top, bottom = unit_lower_inverse(jnp.stack([a[..., :h, :h], a[..., h:, h:]]), tile)
    corner = matmul(matmul(bottom, a[..., h:, :h]), top)
    return jnp.block([[top, jnp.zeros_like(top)], [-corner, bottom]])

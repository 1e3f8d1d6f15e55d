"""KDA in chunks, as matrix products that any XLA backend runs well, with a hand-written backward pass.

With S the state [K, V] at chunk entry, G_i the sum of the gates of the chunk up to token i, and (all exponents <= 0)

    K+_i = e^{G_i} k_i,   Q+_i = e^{G_i} q_i,   K-_i = e^{G_C - G_i} k_i,
    P_ij = sum_c q_ic k_jc e^{G_ic - G_jc}  (j <= i),   X_ij = the same with k_i for q_i  (j < i),

a chunk is (Kimi Linear, arXiv:2510.26692, section 3; here in residual form, which never builds W = T diag(beta) K+)

    R = beta (V - K+ S),   U = (I + beta X)^{-1} R,   O = Q+ S + P U,   S' = diag(e^{G_C}) S + K-^T U.

Everything except the pass of S from chunk to chunk is done for all chunks at once. The backward pass keeps the inputs
and the entry state of every chunk and recomputes the rest.

Three rules keep the numbers right:
  * A sum of gates adds exactly the gates between its two ends; it is never a difference of two longer sums. So it
    is as accurate as it is short, and gates of later tokens or of other documents cannot touch a single bit of it.
  * Scores are masked by select, never by multiplication: what is masked may be infinite.
  * A factor is zero where its token may not meet the state (another document), so no product needs a mask.

Axes: N chunks, C tokens of a chunk, A tiles of a chunk, R rows of a tile (C = A R); ".." stands for N B H.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.config import ChunkConfig, chunk_config

State = Float[Array, "B H K V"] | Float[Array, "B S H K V"]

# Largest sum of nats whose exponential and its inverse are both normal float32 (and bfloat16) numbers: 126 ln 2.
_EXPONENT_RANGE = 87.0
_HIGHEST = jax.lax.Precision.HIGHEST


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
    """`api.kda` with defaults resolved and g, beta, initial_state in the accumulation dtype.

    Raises:
      ValueError: g_min is too low for the tile's exponent range.
    """
    K, V = initial_state.shape[-2:]
    config = config or chunk_config(jax.devices()[0].device_kind, K, V)
    if g_min is not None and (config.tile - 1) * -g_min > _EXPONENT_RANGE:
        lowest = -_EXPONENT_RANGE / (config.tile - 1)
        raise ValueError(f"kda: g_min={g_min} overflows {config.tile}-row tiles; raise it to {lowest:.2f} or pass None")
    core = functools.partial(_chunked, _Static(float(scale), g_min, config))
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    if initial_state.ndim == 4:
        o_BTHV, table_BSHKV = core(inputs, initial_state[:, None], segment_ids, None)
        return o_BTHV, table_BSHKV[:, 0]

    # One state per segment: re-lay the tokens so that every segment starts a chunk of its own. A token that belongs to
    # no segment has no place, and a place without a token is filled with zeros, which change no state.
    S = initial_state.shape[1]
    place_BT, slot_BN = _segment_layout(segment_ids, S, config.chunk)
    places = slot_BN.shape[1] * config.chunk
    scatter = jax.vmap(lambda x, place: jnp.zeros((places, *x.shape[1:]), x.dtype).at[place].set(x, mode="drop"))
    gather = jax.vmap(lambda x, place: x.at[place].get(mode="fill", fill_value=0))
    o_BLHV, table_BSHKV = core(tuple(scatter(x, place_BT) for x in inputs), initial_state, None, slot_BN)
    return gather(o_BLHV, place_BT), table_BSHKV


def _segment_layout(
    ids_BT: Int[Array, "B T"], S: int, C: int
) -> tuple[Int[Array, "B T"], Int[Array, "B N"]]:
    """Where tokens go if every segment starts a chunk: N = ceil(T / C) + S chunks always suffice.

    Returns the place of each token, past the end for a token of no segment, and the segment of each chunk (spare
    chunks, which hold no token, get the last segment).
    """
    T = ids_BT.shape[1]
    N = -(-T // C) + S
    member_BST = ids_BT[:, None, :] == jnp.arange(S)[:, None]
    chunks_BS = -(-member_BST.sum(-1) // C)
    end_BS = jnp.cumsum(chunks_BS, axis=-1)
    rank_BST = jnp.cumsum(member_BST, axis=-1) - 1
    place_BST = (end_BS - chunks_BS)[..., None] * C + rank_BST
    place_BT = jnp.where(member_BST, place_BST, 0).sum(1)
    place_BT = jnp.where(member_BST.any(1), place_BT, N * C)
    slot_BN = (jnp.arange(N)[:, None] >= end_BS[:, None, :]).sum(-1)
    return place_BT, jnp.minimum(slot_BN, S - 1)


class _Static(NamedTuple):
    """What the compiled code depends on."""

    scale: float
    g_min: float | None
    config: ChunkConfig

    @property
    def shift(self) -> float:
        """Distance in nats from a tile's first row to the reference of its decays.

        Half of what the tile can span, so that row and column factors share the exponent range evenly; and a constant,
        so that no earlier row depends on a later gate (fla#1240).
        """
        return 0.0 if self.g_min is None else -self.g_min * (self.config.tile - 1) / 2


# ---- which tokens may meet


class _Visibility(NamedTuple):
    """What each token of a chunk may see. Leading axes [N, B, 1] if there are segments, else none."""

    causal: Array  # [.., C, C]: j is not after i and of the same document
    tile: Array  # [.., A, R, R]: gate l lies between i and the later of its tile's and its document's first row
    enter: Array  # [.., C, 1]: the document that ran at chunk entry is the token's
    leave: Array  # [.., C, 1]: the document that runs at chunk exit is the token's
    across: Array  # [.., 1]: one document runs from entry to exit


def _visibility(segment_ids: Int[Array, "B T"] | None, config: ChunkConfig) -> _Visibility:
    C, R = config.chunk, config.tile
    A = C // R
    causal = np.tri(C, dtype=bool)
    after_first = np.tri(R, dtype=bool) & (np.arange(R) > 0)
    if segment_ids is None:
        everywhere = np.ones((C, 1), bool)
        return _Visibility(causal, after_first, everywhere, everywhere, np.ones(1, bool))

    B, T = segment_ids.shape
    padded = jnp.pad(segment_ids, ((0, 0), (0, -T % C)), mode="edge")
    ids_NBC = padded.reshape(B, -1, C).swapaxes(0, 1)
    previous_NBC = jnp.pad(padded, ((0, 0), (1, 0)), mode="edge")[:, :-1].reshape(B, -1, C).swapaxes(0, 1)
    entry_NB1, exit_NB1 = previous_NBC[..., :1], ids_NBC[..., -1:]
    ids_NBAR, previous_NBAR = (x.reshape(*x.shape[:-1], A, R) for x in (ids_NBC, previous_NBC))
    seen = _Visibility(
        causal=causal & (ids_NBC[..., :, None] == ids_NBC[..., None, :]),
        tile=after_first & (ids_NBAR[..., :, None] == previous_NBAR[..., None, :]),
        enter=(ids_NBC == entry_NB1)[..., None],
        leave=(ids_NBC == exit_NB1)[..., None],
        across=entry_NB1 == exit_NB1,
    )
    return _Visibility(*(x[:, :, None] for x in seen))


# ---- decays and scores


class _Decay(NamedTuple):
    """Decays of a chunk. All but the first are factors in [0, 1]."""

    fall: Array  # [.., A, R, K]: nats from the tile's first row to row i
    row: Array  # [.., A, R, K]: e^fall
    col: Array  # [.., A, R, K]: from row j to the tile's last row
    between: Array  # [.., A, A, K]: from the last row of tile b to the first row of tile a; zero unless b < a
    enter: Array  # [.., C, K]: from chunk entry to token i; zero if the entry state is another document's
    leave: Array  # [.., C, K]: from token i to chunk exit; zero if the exit state is another document's
    across: Array  # [.., K]: from entry to exit; zero if a document starts in between


def _decay(g: Float[Array, "N B H C K"], see: _Visibility, config: ChunkConfig) -> _Decay:
    C, R = config.chunk, config.tile
    A, K = C // R, g.shape[-1]
    sum_gates = functools.partial(jnp.einsum, precision=_HIGHEST, preferred_element_type=g.dtype)

    def weights(mask):  # 0/1 weights make a sum over any set of gates a matrix product
        return mask.astype(g.dtype)

    g = g.reshape(*g.shape[:-2], A, R, K)
    fall = sum_gates("...il,...lk->...ik", weights(see.tile), g)
    rise = sum_gates("jl,...lk->...jk", weights(np.tri(R, k=-1, dtype=bool).T), g)
    first, total = g[..., 0, :], g.sum(-2)
    a, b, c = np.ogrid[:A, :A, :A]
    to_first = first + sum_gates("ac,...ck->...ak", weights(np.tri(A, k=-1, dtype=bool)), total)
    from_last = sum_gates("bc,...ck->...bk", weights(np.tri(A, k=-1, dtype=bool).T), total)
    between = first[..., None, :] + sum_gates("abc,...ck->...abk", weights((b < c) & (c < a)), total)

    row, col = jnp.exp(fall), jnp.exp(rise)
    chunk_rows = (*g.shape[:-3], C, K)
    enter = (row * jnp.exp(to_first)[..., None, :]).reshape(chunk_rows)
    leave = (col * jnp.exp(from_last)[..., None, :]).reshape(chunk_rows)
    return _Decay(
        fall,
        row,
        col,
        jnp.exp(jnp.where((b < a), between, -jnp.inf)),
        jnp.where(see.enter, enter, 0),
        jnp.where(see.leave, leave, 0),
        jnp.where(see.across, jnp.exp(total.sum(-2)), 0),
    )


class _Products:
    """Matrix products of operands rounded to the input dtype, accumulated in float32 (or float64)."""

    def __init__(self, dtype, accumulate):
        self.dtype, self.accumulate = dtype, accumulate
        # On a TPU a float32 product is one bfloat16 pass unless more is asked for; on a GPU it may be tf32.
        self.precision = None if dtype == jnp.bfloat16 else _HIGHEST

    def __call__(self, spec: str, a: Array, b: Array) -> Array:
        return jnp.einsum(
            spec,
            a.astype(self.dtype),
            b.astype(self.dtype),
            precision=self.precision,
            preferred_element_type=self.accumulate,
        )


class _Tiles(NamedTuple):
    """Operands of the score products. Tile a holds the rows of q above those of k, against all columns up to its own.

    Row i of tile a carries e^{G_i - r_a}, column j e^{r_a - G_j}, with r_a = G_first - shift: a diagonal tile and an
    off-diagonal one are the same product.
    """

    row_factor: Array  # [.., A, R, K]
    rows: Array  # [.., A, 2R, K], rounded
    col_factor: Array  # [.., A, C, K]; zero right of the diagonal tile
    cols: Array  # [.., A, C, K], rounded


def _tiles(q: Array, k: Array, decay: _Decay, static: _Static, mm: _Products) -> _Tiles:
    A, R, K = decay.row.shape[-3:]
    q, k = (x.reshape(decay.row.shape) for x in (q, k))
    row_factor = decay.row * math.exp(static.shift)
    rows = jnp.concatenate([q * row_factor, k * row_factor], axis=-2)
    # Own tile: not from `col`, which knows the gates of later rows.
    own = math.exp(-static.shift) / decay.row if static.g_min is not None else jnp.zeros_like(decay.row)
    earlier = decay.col[..., None, :, :, :] * (decay.between * math.exp(-static.shift))[..., None, :]
    col_factor = jnp.where(np.eye(A, dtype=bool)[:, :, None, None], own[..., None, :, :, :], earlier)
    cols = k[..., None, :, :, :] * col_factor
    flat = (*cols.shape[:-3], A * R, K)
    return _Tiles(row_factor, rows.astype(mm.dtype), col_factor.reshape(flat), cols.reshape(flat).astype(mm.dtype))


def _pairwise(decay: _Decay) -> Array:
    """[.., A, R, R, K]: e^{G_i - G_j} for j <= i of one tile, else zero. Any gate is safe; XLA fuses it into its sums."""
    fall = decay.fall
    R = fall.shape[-2]
    later = np.tri(R, dtype=bool)[:, :, None]
    return jnp.exp(jnp.where(later, fall[..., :, None, :] - fall[..., None, :, :], -jnp.inf))


def _scores(q: Array, k: Array, tiles: _Tiles, decay: _Decay, static: _Static, mm: _Products) -> tuple[Array, Array]:
    """Q K^T and K K^T with decays, [.., C, C] each; what lies right of the diagonal is to be masked (by select)."""
    A, R, K = decay.row.shape[-3:]
    scores = mm("...ik,...jk->...ij", tiles.rows, tiles.cols)  # [.., A, 2R, C]
    scores = scores.reshape(*scores.shape[:-2], 2, R, A, R)
    if static.g_min is None:
        q, k = (x.reshape(decay.row.shape) for x in (q, k))
        pairs = _pairwise(decay)
        diagonal = jnp.stack([((x[..., :, None, :] * k[..., None, :, :]) * pairs).sum(-1) for x in (q, k)], axis=-3)
        own = np.eye(A, dtype=bool)[:, None, None, :, None]
        scores = jnp.where(own, diagonal[..., None, :], scores)
    scores = scores.reshape(*scores.shape[:-2], A * R)
    qk, kk = scores[..., 0, :, :], scores[..., 1, :, :]
    square = (*qk.shape[:-3], A * R, A * R)
    return qk.reshape(square), kk.reshape(square)


def _scores_adjoint(
    d_qk: Array, d_kk: Array, q: Array, k: Array, tiles: _Tiles, decay: _Decay, static: _Static, mm: _Products
) -> tuple[Array, Array, Array]:
    """Gradients of q, k and of the gate sums G, [.., C, K] each; d_qk and d_kk are masked.

    Every pair (i, j) adds p_ij to dG_i and takes it from dG_j, and the sums over G that give dg must see the two cancel.
    They do, to accumulation rounding, because both are formed from the very operands that entered the products
    (with un-rounded q and k, bfloat16 loses a third of dg when gates sit at -5).
    """
    A, R, K = decay.row.shape[-3:]
    lead = d_qk.shape[:-2]
    d_scores = jnp.stack([x.reshape(*lead, A, R, A * R) for x in (d_qk, d_kk)], axis=-3)  # [.., A, 2, R, C]
    if static.g_min is None:
        d_scores = d_scores.reshape(*lead, A, 2, R, A, R)
        own = np.eye(A, dtype=bool)[:, None, None, :, None]
        d_diagonal = jnp.where(own, d_scores, 0).sum(-2)
        d_scores = jnp.where(own, 0, d_scores)
    d_scores = d_scores.reshape(*lead, A, 2 * R, A * R).astype(mm.dtype)
    d_rows = mm("...ij,...jk->...ik", d_scores, tiles.cols)
    d_cols = mm("...ij,...ik->...jk", d_scores, tiles.rows)

    def halves(x):
        return x[..., :R, :], x[..., R:, :]

    d_q, d_k = (tiles.row_factor * x for x in halves(d_rows))
    from_rows = sum(halves(tiles.rows * d_rows))
    if static.g_min is None:
        q, k = (x.reshape(decay.row.shape) for x in (q, k))
        pairs = _pairwise(decay)
        qk, kk = d_diagonal[..., 0, :, :, None], d_diagonal[..., 1, :, :, None]
        d_q_own = (qk * pairs * k[..., None, :, :]).sum(-2)
        d_k_own = (kk * pairs * k[..., None, :, :]).sum(-2)
        d_col_own = (pairs * (qk * q[..., :, None, :] + kk * k[..., :, None, :])).sum(-3)
        from_rows += q * d_q_own + k * (d_k_own - d_col_own)
        d_q, d_k = d_q + d_q_own, d_k + d_k_own + d_col_own

    d_q, d_k, from_rows = (x.reshape(*lead, A * R, K) for x in (d_q, d_k, from_rows))
    d_k = d_k + (tiles.col_factor * d_cols).sum(-3)
    return d_q, d_k, from_rows - (tiles.cols * d_cols).sum(-3)


# ---- the inverse


def _unit_lower_inverse(a: Float[Array, "*lead n n"], tile: int) -> Float[Array, "*lead n n"]:
    """(I + a)^-1 for strictly lower triangular a: row by row within a tile, then by doubling,

        [[I + a1, 0], [b, I + a2]]^-1 = [[t1, 0], [-t2 b t1, t2]].

    Every intermediate is the inverse of a diagonal block, whose entries stay within [-1, 1] for unit keys and beta <= 1.
    Power series of a are out: with repeated keys their terms grow like binomials (FlashKDA#34, tt-metal#54813).
    """
    n = a.shape[-1]
    if n <= tile:

        def next_row(i, inverse):  # row_i = e_i - a_i inverse; the rows from i on are still zero
            a_row = jax.lax.dynamic_slice_in_dim(a, i, 1, axis=-2)
            row = jax.nn.one_hot(i, n, dtype=a.dtype) - jnp.matmul(a_row, inverse, precision=_HIGHEST)
            return jax.lax.dynamic_update_slice_in_dim(inverse, row, i, axis=-2)

        return jax.lax.fori_loop(0, n, next_row, jnp.zeros_like(a))

    h = n // 2
    top, bottom = _unit_lower_inverse(jnp.stack([a[..., :h, :h], a[..., h:, h:]]), tile)
    corner = jnp.matmul(jnp.matmul(bottom, a[..., h:, :h], precision=_HIGHEST), top, precision=_HIGHEST)
    return jnp.block([[top, jnp.zeros_like(top)], [-corner, bottom]])


# ---- the op: forward, state pass, backward


class _Chunk(NamedTuple):
    """All that a chunk computes without the state."""

    see: _Visibility
    decay: _Decay
    tiles: _Tiles
    qk: Array  # P, masked
    kk: Array  # X, masked
    inverse: Array  # (I + beta X)^-1
    k_enter: Array  # K+
    k_leave: Array  # K-
    q_enter: Array  # Q+


def _chunk_rows(x_BTH: Array, C: int) -> Array:
    """[B, T, H, ..] -> [N, B, H, C, ..], the tail padded with zeros: k = beta = 0 and g = 0 change no state."""
    B, T, H = x_BTH.shape[:3]
    x = jnp.pad(x_BTH, ((0, 0), (0, -T % C)) + ((0, 0),) * (x_BTH.ndim - 2))
    return jnp.moveaxis(x.reshape(B, -1, C, *x.shape[2:]), (1, 3), (0, 2))


def _token_rows(x_NBHC: Array, T: int) -> Array:
    """Undoes `_chunk_rows`."""
    x = jnp.moveaxis(x_NBHC, (0, 2), (1, 3))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]


def _prepare(static: _Static, inputs, segment_ids, accumulate, mm):
    """Chunked inputs in the accumulation dtype, q times scale, and everything local to the chunks."""
    C = static.config.chunk
    q, k, v, g, beta = (_chunk_rows(x.astype(accumulate), C) for x in inputs)
    q = q * static.scale
    see = _visibility(segment_ids, static.config)
    decay = _decay(g, see, static.config)
    tiles = _tiles(q, k, decay, static, mm)
    qk, kk = _scores(q, k, tiles, decay, static, mm)
    earlier = see.causal & ~np.eye(C, dtype=bool)
    qk, kk = (jnp.where(earlier, x, 0) for x in (qk, kk))
    inverse = _unit_lower_inverse(beta[..., None] * kk, static.config.tile)
    chunk = _Chunk(see, decay, tiles, qk, kk, inverse, k * decay.enter, k * decay.leave, q * decay.enter)
    return (q, k, v, beta), chunk


def _read(table_BSHKV, slot_B):
    return table_BSHKV[:, 0] if slot_B is None else jax.vmap(lambda t, s: t[s])(table_BSHKV, slot_B)


def _write(table_BSHKV, slot_B, state_BHKV):
    if slot_B is None:
        return state_BHKV[:, None]
    return jax.vmap(lambda t, s, x: t.at[s].set(x))(table_BSHKV, slot_B, state_BHKV)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(static: _Static, inputs, table_BSHKV, segment_ids, slot_BN):
    """(o, final table) from (q, k, v, g, beta), [B, T, H, ..] each, and a table of states.

    Chunk n of row b reads its entry state from slot_BN[b, n] of the table and writes its exit state there (slot 0 if
    slot_BN is None).
    """
    return _forward(static, inputs, table_BSHKV, segment_ids, slot_BN)[0]


def _forward(static, inputs, table_BSHKV, segment_ids, slot_BN):
    dtype, T = inputs[0].dtype, inputs[0].shape[1]
    mm = _Products(dtype, table_BSHKV.dtype)
    (q, k, v, beta), chunk = _prepare(static, inputs, segment_ids, table_BSHKV.dtype, mm)

    def step(table_BSHKV, x):
        k_enter, k_leave, inverse, across, v, beta, slot_B = x
        state = _read(table_BSHKV, slot_B)
        entry = state.astype(dtype)
        residual = beta[..., None] * (v - mm("bhck,bhkv->bhcv", k_enter, entry))
        update = mm("bhij,bhjv->bhiv", inverse, residual).astype(dtype)
        state = across[..., None] * state + mm("bhck,bhcv->bhkv", k_leave, update)
        return _write(table_BSHKV, slot_B, state), (entry, update)

    local = [x.astype(dtype) for x in (chunk.k_enter, chunk.k_leave, chunk.inverse)]
    slots = None if slot_BN is None else slot_BN.T
    final_BSHKV, (entries, updates) = jax.lax.scan(
        step, table_BSHKV, (*local, chunk.decay.across, v, beta, slots), length=v.shape[0]
    )
    o = mm("...ck,...kv->...cv", chunk.q_enter, entries) + mm("...ij,...jv->...iv", chunk.qk, updates)
    o = o + (q * k).sum(-1, keepdims=True) * updates
    o_BTHV = _token_rows(o, T).astype(inputs[2].dtype)
    return (o_BTHV, final_BSHKV), (inputs, entries, segment_ids, slot_BN)


def _backward(static, saved, cotangents):
    inputs, entries, segment_ids, slot_BN = saved
    d_o_BTHV, d_final_BSHKV = cotangents
    dtype, T = inputs[0].dtype, inputs[0].shape[1]
    accumulate = d_final_BSHKV.dtype
    mm = _Products(dtype, accumulate)
    (q, k, v, beta), chunk = _prepare(static, inputs, segment_ids, accumulate, mm)
    decay, beta = chunk.decay, beta[..., None]
    d_o = _chunk_rows(d_o_BTHV, static.config.chunk)

    predicted = mm("...ck,...kv->...cv", chunk.k_enter, entries)
    update = mm("...ij,...jv->...iv", chunk.inverse, beta * (v - predicted)).astype(dtype)

    # The reverse state pass: d_state leaves a chunk towards its past.
    def step(d_table_BSHKV, x):
        k_enter, k_leave, inverse, across, beta, d_update, d_entry, slot_B = x
        d_exit = _read(d_table_BSHKV, slot_B)
        d_exit_rounded = d_exit.astype(dtype)
        d_update = d_update + mm("bhck,bhkv->bhcv", k_leave, d_exit_rounded)
        d_residual = mm("bhij,bhiv->bhjv", inverse, d_update)
        d_entry = across[..., None] * d_exit + d_entry - mm("bhck,bhcv->bhkv", k_enter, beta * d_residual)
        return _write(d_table_BSHKV, slot_B, d_entry), (d_exit_rounded, d_residual)

    local = [x.astype(dtype) for x in (chunk.k_enter, chunk.k_leave, chunk.inverse)]
    d_update_from_o = mm("...ij,...iv->...jv", chunk.qk, d_o) + (q * k).sum(-1, keepdims=True) * d_o
    d_entry_from_o = mm("...ck,...cv->...kv", chunk.q_enter, d_o)
    slots = None if slot_BN is None else slot_BN.T
    d_initial_BSHKV, (d_exits, d_residual) = jax.lax.scan(
        step,
        d_final_BSHKV,
        (*local, decay.across, beta, d_update_from_o, d_entry_from_o, slots),
        length=v.shape[0],
        reverse=True,
    )

    # d_kk = -stril(dR U^T), since U = T R: no T^T dT T^T.
    d_v = beta * d_residual
    earlier = chunk.see.causal & ~np.eye(chunk.qk.shape[-1], dtype=bool)
    d_qk = jnp.where(earlier, mm("...iv,...jv->...ij", d_o, update), 0)
    d_a = jnp.where(earlier, -mm("...iv,...jv->...ij", d_residual, update), 0)
    d_own = (d_o * update).sum(-1, keepdims=True)
    d_beta = (d_residual * (v - predicted)).sum(-1) + (d_a * chunk.kk).sum(-1)
    d_q_enter = mm("...cv,...kv->...ck", d_o, entries)
    d_k_enter = -mm("...cv,...kv->...ck", d_v, entries)
    d_k_leave = mm("...cv,...kv->...ck", update, d_exits)
    d_q, d_k, d_sum = _scores_adjoint(d_qk, beta * d_a, q, k, chunk.tiles, decay, static, mm)

    d_q = static.scale * (d_q + decay.enter * d_q_enter + d_own * k)
    d_k = d_k + decay.enter * d_k_enter + decay.leave * d_k_leave + d_own * q
    # A gate acts on what leaves from earlier tokens, on what later tokens see, and on what crosses the chunk.
    causal = chunk.see.causal.astype(accumulate)
    strict = causal * (1 - np.eye(causal.shape[-1], dtype=causal.dtype))
    sum_gates = functools.partial(jnp.einsum, precision=_HIGHEST, preferred_element_type=accumulate)
    seen_later = d_sum + chunk.q_enter * d_q_enter + chunk.k_enter * d_k_enter
    crossing = decay.across * (entries.astype(accumulate) * d_exits).sum(-1)
    d_g = (
        sum_gates("...it,...ik->...tk", causal, seen_later)
        + sum_gates("...tj,...jk->...tk", strict, chunk.k_leave * d_k_leave)
        + crossing[..., None, :]
    )
    d_inputs = tuple(
        _token_rows(d, T).astype(x.dtype) for d, x in zip((d_q, d_k, d_v, d_g, d_beta), inputs)
    )
    return d_inputs, d_initial_BSHKV, None, None


_chunked.defvjp(_forward, _backward)

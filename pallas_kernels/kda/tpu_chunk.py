"""The part of a KDA chunk that needs no state, inside a Mosaic TPU kernel, for the H heads of a program at once.

The three rules of `chunk.py` hold here too: a sum of gates adds exactly the gates between its ends, scores are masked
by select, and a factor is zero where its token may not meet the state. What differs is the shape of the work:

  * Gate sums are one product of 0/1 weights with the gates of all heads side by side, [2C, C] x [C, H K]. The gates
    enter in three bfloat16 parts, which hold every bit of them.
  * Tile a of the queries sits above tile a of the keys, against the columns scaled for tile a: [2R, K] x [K, C]. The
    diagonal tile is no special case. The pair of a token with itself comes out of the same product: e^x e^-x is one.
  * The triangular inverse works on two heads side by side, [X1 | X2] diag(Y1, Y2) = [X1 Y1 | X2 Y2], so that 64-token
    chunks fill 128 columns of the matrix unit.

Axes: C tokens of a chunk, A tiles of a chunk, R rows of a tile (C = A R).
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.kda.config import ChunkConfig

CONFIG = ChunkConfig(chunk=64, tile=16)
C, R = CONFIG.chunk, CONFIG.tile
A = C // R

f32, bf16 = jnp.float32, jnp.bfloat16
HIGHEST = jax.lax.Precision.HIGHEST  # six passes of bfloat16

# Which axes of two [H, ..] operands are summed over.
NN, NT, TN = ((2,), (1,)), ((2,), (2,)), ((1,), (1,))


def dot(axes, a, b):
    """A product for every head, accumulated in float32. float32 operands take all their bits."""
    precision = HIGHEST if a.dtype == f32 else None
    return jax.lax.dot_general(a, b, (axes, ((0,), (0,))), precision=precision, preferred_element_type=f32)


def parts(x, n: int):
    """n bfloat16 arrays whose sum is x to 8 n bits: its upper bits, those of the rest, and so on; the last is rounded.

    Bits are masked, not rounded: that is one operation on the vector unit, and one that no compiler leaves out.
    """
    found = []
    for _ in range(n - 1):
        upper = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-65536)
        part = jax.lax.bitcast_convert_type(upper, f32)
        found.append(part.astype(bf16))
        x = x - part
    return [*found, x.astype(bf16)]


def dot_x3(a, b):
    """a @ b for every head to 16 bits, of float32 operands, in three bfloat16 products.

    A third of the passes of a float32 product at HIGH precision: weights are loaded as bfloat16, the high ones once.
    """
    (a_high, a_low), (b_high, b_low) = parts(a, 2), parts(b, 2)
    high, mixed = jnp.split(dot(NN, jnp.concatenate([a_high, a_low], axis=1), b_high), 2, axis=1)
    return high + (mixed + dot(NN, a_high, b_low))


def split_heads(x_CX, H: int):
    """[C, H K] -> [H, C, K]."""
    K = x_CX.shape[1] // H
    return jnp.stack([x_CX[:, h * K : (h + 1) * K] for h in range(H)])


def join_heads(x_HCK):
    """[H, C, K] -> [C, H K]."""
    return jnp.concatenate([x_HCK[h] for h in range(x_HCK.shape[0])], axis=1)


def tile(x_HCK, a: int):
    return x_HCK[:, a * R : (a + 1) * R]


class Visibility(NamedTuple):
    """Which tokens of a chunk may meet, as boolean masks. Without packed documents the last three are None: all may."""

    earlier: jax.Array  # [C, C]: j is before i and of the same document
    upto: jax.Array  # [C, C]: the same, and j = i
    fall: jax.Array  # [C, C]: gate l lies after the first row of i's tile and of i's document, not after row i
    after: jax.Array  # [C, C]: gate l lies after row j in j's tile
    enter: jax.Array | None  # [C, 1]: the token is of the document that ran at chunk entry
    leave: jax.Array | None  # [C, 1]: the token is of the document that runs at chunk exit
    across: jax.Array | None  # [1, 1]: one document runs from entry to exit


def visibility(docs_2C) -> Visibility:
    """From `pallas_tpu.documents`: float32 ordinals of the documents of a chunk's tokens and of those before them."""
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    same_tile = i // R == j // R
    earlier, upto = j < i, j <= i
    fall = same_tile & upto & (j % R > 0)
    after = same_tile & (j > i)
    if docs_2C is None:
        return Visibility(earlier, upto, fall, after, None, None, None)
    ordinal_1C, before_1C = docs_2C[0:1], docs_2C[1:2]
    ordinal_C1 = jnp.sum(jnp.where(i == j, ordinal_1C, 0.0), axis=1, keepdims=True)
    last_11 = ordinal_C1[C - 1 :]
    same = ordinal_C1 == ordinal_1C
    return Visibility(
        earlier=earlier & same,
        upto=upto & same,
        fall=fall & (ordinal_C1 == before_1C),
        after=after,
        enter=ordinal_C1 == 0.0,
        leave=ordinal_C1 == last_11,
        across=last_11 == 0.0,
    )


def keep(mask, x):
    """x where the mask holds, else zero. None masks nothing."""
    return x if mask is None else jnp.where(mask, x, 0.0)


def sum_gates(weights, g_CX):
    """Sums of gates [C, H K] that rows of a 0/1 matrix [.., C] pick, exact to float32 accumulation."""
    high, middle, low = (jax.lax.dot(weights.astype(bf16), g, preferred_element_type=f32) for g in parts(g_CX, 3))
    return high + (middle + low)


class Chunk(NamedTuple):
    """What follows from q, k, g and beta alone. Lists have one entry per tile a of the rows."""

    row_factor: list  # [H, R, K]: e^{G_i - r}, with r = G of the tile's first row less the plan's shift
    col_factor: list  # [H, C, K]: e^{r - G_j}; zero right of the diagonal tile
    rows: list  # [H, 2R, K]: scaled queries above scaled keys, rounded to the operand dtype
    cols: list  # [H, C, K]: scaled keys, rounded likewise
    qk: jax.Array  # [H, C, C]: sum_c q_ic k_jc e^{G_ic - G_jc} for j <= i, else zero
    kk: jax.Array  # [H, C, C]: the same of k with k for j < i
    inverse: jax.Array  # [H, C, C]: (I + beta kk)^-1
    enter: jax.Array  # [H, C, K]: e^{G_i}, from chunk entry
    leave: jax.Array  # [H, C, K]: e^{G_C - G_j}, to chunk exit
    across: jax.Array  # [H, 1, K]: e^{G_C}


def local(q, k, g_CX, beta, see: Visibility, shift: float, operand) -> Chunk:
    """q, k [H, C, K] and beta [H, C, 1] in float32, gates [C, H K] in nats."""
    H = q.shape[0]
    sums = sum_gates(jnp.concatenate([see.fall.astype(f32), see.after.astype(f32)]), g_CX)
    row, col = (split_heads(jnp.exp(x), H) for x in (sums[:C], sums[C:]))
    g = split_heads(g_CX, H)
    first = [g[:, a * R : a * R + 1] for a in range(A)]
    total = [jnp.sum(tile(g, a), axis=1, keepdims=True) for a in range(A)]
    none = jnp.zeros_like(first[0])
    lift = math.exp(shift)

    row_factor, col_factor, rows, cols, scores = [], [], [], [], []
    for a in range(A):
        factor = tile(row, a) * lift
        left = [tile(col, b) * (jnp.exp(sum(total[b + 1 : a], first[a])) / lift) for b in range(a)]
        # The own tile's factor must not come from `col`, which knows the gates of later rows.
        right = [jnp.zeros_like(factor)] * (A - 1 - a)
        row_factor.append(factor)
        col_factor.append(jnp.concatenate([*left, 1 / factor, *right], axis=1))
        rows.append(jnp.concatenate([tile(q, a) * factor, tile(k, a) * factor], axis=1).astype(operand))
        cols.append((k * col_factor[a]).astype(operand))
        scores.append(dot(NT, rows[a], cols[a]))
    qk = keep(see.upto, jnp.concatenate([s[:, :R] for s in scores], axis=1))
    kk = keep(see.earlier, jnp.concatenate([s[:, R:] for s in scores], axis=1))

    to_first = [jnp.exp(sum(total[:a], first[a])) for a in range(A)]
    from_last = [jnp.exp(sum(total[b + 1 :], none)) for b in range(A)]
    enter = jnp.concatenate([tile(row, a) * to_first[a] for a in range(A)], axis=1)
    leave = jnp.concatenate([tile(col, b) * from_last[b] for b in range(A)], axis=1)
    return Chunk(
        row_factor=row_factor,
        col_factor=col_factor,
        rows=rows,
        cols=cols,
        qk=qk,
        kk=kk,
        inverse=unit_lower_inverse(beta * kk, functools.partial(dot, NN) if operand == f32 else dot_x3),
        enter=keep(see.enter, enter),
        leave=keep(see.leave, leave),
        across=keep(see.across, jnp.exp(sum(total, none))),
    )


def scores_adjoint(d_qk, d_kk, x: Chunk):
    """Gradients [H, C, K] of q, k and the gate sums G from those of the masked scores.

    Both sides of dG come from the very operands that entered the products, so that what a pair gives to G_i and takes
    from G_j cancels in the sums over G (`chunk.scores_adjoint`).
    """
    operand = x.rows[0].dtype
    d_q, d_k_row, d_sum_row, d_k_col, d_sum_col = [], [], [], [], []
    for a in range(A):
        d_scores = jnp.concatenate([tile(d_qk, a), tile(d_kk, a)], axis=1).astype(operand)
        d_rows, d_cols = dot(NN, d_scores, x.cols[a]), dot(TN, d_scores, x.rows[a])
        scaled = x.rows[a].astype(f32) * d_rows
        d_q.append(x.row_factor[a] * d_rows[:, :R])
        d_k_row.append(x.row_factor[a] * d_rows[:, R:])
        d_sum_row.append(scaled[:, :R] + scaled[:, R:])
        d_k_col.append(x.col_factor[a] * d_cols)
        d_sum_col.append(x.cols[a].astype(f32) * d_cols)
    d_q, d_k, d_sum = (jnp.concatenate(parts, axis=1) for parts in (d_q, d_k_row, d_sum_row))
    return d_q, d_k + sum(d_k_col), d_sum - sum(d_sum_col)


def unit_lower_inverse(a_HCC, product):
    """(I + a)^-1 for strictly lower triangular a, by doubling: X <- X - X (a's blocks of width w below X's) X.

    Every X is the inverse of a's diagonal blocks of width w, with entries in [-1, 1] for unit keys and beta <= 1. Power
    series of a are out: with repeated keys their terms grow like binomials (FlashKDA#34, tt-metal#54813).
    """
    H = a_HCC.shape[0]
    P = 2 if H % 2 == 0 else 1  # heads side by side
    a = jnp.stack([jnp.concatenate([a_HCC[h + p] for p in range(P)], axis=1) for h in range(0, H, P)])
    i, j = (jax.lax.broadcasted_iota(jnp.int32, (C, P * C), axis) for axis in (0, 1))
    head, j = j // C, j % C

    def times(x, y):
        return product(x, jnp.concatenate([jnp.where(head == p, y, 0.0) for p in range(P)], axis=1))

    below = lambda w: jnp.where((i // (2 * w) == j // (2 * w)) & (i // w != j // w), a, 0.0)
    x = jnp.where(i == j, 1.0, 0.0) - below(1)
    for w in (2**level for level in range(1, int(math.log2(C)))):
        x = x - times(times(x, below(w)), x)
    return jnp.stack([x[h // P, :, h % P * C : (h % P + 1) * C] for h in range(H)])

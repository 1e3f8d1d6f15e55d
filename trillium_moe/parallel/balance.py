"""Exactly balanced expert parallelism: which rank computes which row, so that every rank computes the same number.

Each of R ranks sends out A rows and is to compute A, whatever the router says (Kimi K3, MoonEP). A rank has its E / R
home experts and room for as many replicas. The plan is the alias method (Walker 1974, Vose 1991) on ranks: a rank with
too few rows of its own is filled up from one rank with too many, and a rank that has thereby given too much is in turn
filled up from the next. So every rank computes rows of its own experts and of those of one other rank, its donor: E / R
replicas always suffice. Closed forms over running sums replace the method's loop.
"""

from __future__ import annotations

import jax.numpy as jnp

from trillium_moe.model.permute import index_within
from trillium_moe.shapes import Array, Int


def share_out(load_R: Int[Array, " R"], rows: int) -> tuple[Int[Array, "R R"], Int[Array, " R"]]:
    """How many rows of each rank's experts every rank computes.

    Args:
      load_R: rows of the home experts of each rank; R * rows in all.
      rows: what each rank is to compute.

    Returns:
      x [home, computing]: every column sums to `rows`, row q to load_R[q].
      donor_R: the one other rank whose experts a rank also computes; itself if there is none.
    """
    R = load_R.shape[0]
    ranks = jnp.arange(R)
    lacks = jnp.maximum(rows - load_R, 0)
    # with the ranks in order, the first to lack rows take the excess of the first to have too many
    lacked, excess = jnp.cumsum(lacks), jnp.cumsum(jnp.maximum(load_R - rows, 0))
    first_above = lambda sums, x: jnp.searchsorted(sums, x, side="right")
    from_excess = first_above(excess, lacked - lacks)
    # the last rank filled from h took more than the excess of h and those before it: h lacks the difference now
    overdrawn = lacked[jnp.minimum(jnp.searchsorted(lacked, excess), R - 1)] - excess
    full = load_R >= rows
    takes = jnp.where(full, jnp.where(load_R > rows, overdrawn, 0), lacks)
    donor = jnp.where(full, first_above(excess, excess), from_excess)
    donor = jnp.where(takes > 0, donor, ranks).astype(jnp.int32)
    x = jnp.zeros((R, R), jnp.int32).at[donor, ranks].add(takes)
    return x.at[ranks, ranks].add(rows - takes), donor


def replicate(
    count_SE: Int[Array, "S E"], expert_A: Int[Array, " A"], me: Int[Array, ""]
) -> tuple[Int[Array, " A"], Int[Array, " S"]]:
    """Where the rows of rank `me` are computed: at a home expert or at a replica.

    Args:
      count_SE: rows that each rank sends to each expert.
      expert_A: expert of each row of `me`.

    Returns:
      place_A: p * 2 n + j for expert j of rank p's n home experts, p * 2 n + n + j for expert j of its donor.
      donor_S: see `share_out`.
    """
    R, E = count_SE.shape
    A, n = expert_A.shape[0], E // R
    load_E = count_SE.sum(0)
    x, donor = share_out(load_E.reshape(R, n).sum(1), A)
    # a rank's rows lie in order of expert, sender, place at the sender; it keeps the first, the others take the rest
    steps = (jnp.arange(R)[:, None] + jnp.arange(R)) % R
    ends = jnp.cumsum(jnp.take_along_axis(x, steps, axis=1), axis=1)
    by_rank = load_E.reshape(R, n)
    begin_E = (jnp.cumsum(by_rank, axis=1) - by_rank).reshape(E) + jnp.where(
        jnp.arange(R)[:, None] < me, count_SE, 0
    ).sum(0)
    home = expert_A // n
    row = begin_E[expert_A] + index_within(expert_A, E)
    computes = (home + (row[:, None] >= ends[home]).sum(1)) % R
    return computes * 2 * n + jnp.where(computes == home, 0, n) + expert_A % n, donor

"""Replicas of experts: weights to the devices that compute with them, gradients home. Inside a shard.

Every device computes its own experts and those of one donor (`balance`), so it receives the weights of at most one
other device, whatever the number of devices; a busy donor sends to several. On the way back they take turns: in every
round each donor gets the gradients of one device that computes for it, so no more than one copy lies anywhere.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from trillium_moe.parallel.transport import AXIS, pieces
from trillium_moe.shapes import Array, Int


def with_replicas(w_EL: Array, donor_R: Int[Array, " R"], updates: int | None) -> Array:
    """The home experts' weights [n, ..] and those of the donor, [2 n, ..]; zeros where a device is its own donor.

    In the backward the gradients of replicas add up at home.

    Args:
      w_EL: weights of the home experts of this device.
      donor_R: see `balance.share_out`.
      updates: pieces that a matrix stack travels in, by ragged all-to-all (see `transport`). None gathers all weights
        of all devices by a dense collective: runs everywhere, and holds R copies.
    """
    if updates is not None:
        return jnp.concatenate([w_EL, _fetch(updates, w_EL, donor_R)])
    me = jax.lax.axis_index(AXIS)
    replica = jax.lax.all_gather(w_EL, AXIS)[donor_R[me]]
    return jnp.concatenate([w_EL, jnp.where(donor_R[me] == me, jnp.zeros_like(w_EL), replica)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fetch(updates, w, donor_R):
    me, ranks = jax.lax.axis_index(AXIS), jnp.arange(donor_R.shape[0])
    to = (donor_R == me) & (ranks != me)
    of = (ranks == donor_R[me]) & (ranks != me)
    return _send(updates, w, to, of)


def _send(updates, w, to_R, of_R):
    """All of w to each device of to_R; what comes from the one device of of_R, if any, else zeros."""
    rows = w.reshape(-1, w.shape[-1])
    part = functools.partial(pieces, updates, jnp.zeros(to_R.shape[0], jnp.int32))
    begin, mine = part(jnp.where(to_R, rows.shape[0], 0))
    there, theirs = part(jnp.where(of_R, rows.shape[0], 0))
    # a piece begins at the same row here and there
    got = jax.lax.ragged_all_to_all(rows, jnp.zeros_like(rows), begin, mine, begin, theirs, axis_name=AXIS)
    return got.reshape(w.shape)


def _fetch_fwd(updates, w, donor_R):
    return _fetch(updates, w, donor_R), donor_R


def _fetch_bwd(updates, donor_R, d):
    me, ranks = jax.lax.axis_index(AXIS), jnp.arange(donor_R.shape[0])
    away = donor_R != ranks
    same = (donor_R[:, None] == donor_R) & away
    turn = (same & (ranks < ranks[:, None])).sum(1)  # of each device, among those of its donor

    def round(i, total):
        now = away & (turn == i)
        return total + _send(updates, d, (ranks == donor_R[me]) & now[me], now & (donor_R == me)).astype(total.dtype)

    total = jax.lax.fori_loop(0, jnp.where(away, turn + 1, 0).max(), round, jnp.zeros(d.shape, jnp.float32))
    return total.astype(d.dtype), None


_fetch.defvjp(_fetch_fwd, _fetch_bwd)

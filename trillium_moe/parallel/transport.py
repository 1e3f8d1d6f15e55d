"""Rows to the devices that compute them and back. Every class is made inside a shard, from the experts of its rows.

  padded   one dense all-to-all of blocks of `room` rows per pair of devices. Static, runs everywhere.
  ragged   only the rows there are, by `jax.lax.ragged_all_to_all` (TPU, GPU; XLA has none for CPU). On a GPU one update
           runs on one thread block, so every slice is sent in UPDATES pieces: 85 times as fast on two H200s.
  two_hop  two dense all-to-alls, for rows of which every device gets as many as it sends: a device deals its rows out
           to all in turn, and those pass them on, at most A / R + R - 1 per pair whatever the routing. So 2 A rows
           travel where blocks for the worst case would hold R A.

All have: slot_A, row of each assignment in the send buffer, past its end if there was no room; source_R, assignment of
each of its rows, A if none; expert_Q, local expert of each row received, past the last if none; place_Q, its place
among the rows of that expert, if known; `dropped`, assignments without room; `send` and its inverse `receive`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from trillium_moe.model.permute import dispatch, in_order, index_within
from trillium_moe.shapes import Array

AXIS = "expert"
UPDATES = {"gpu": 512}  # pieces of a slice that travel at the same time; elsewhere 1


def worst_case(m: int, k: int, n_local: int) -> int:
    """Rows that m tokens can send to one device: a token has k experts, a device n_local."""
    return m * min(k, n_local)


def _exchange(x_R: Array) -> Array:
    """Blocks of neighbouring rows to their devices: block p of the result is what device p has for this one."""
    blocks = x_R.reshape(jax.lax.axis_size(AXIS), -1, *x_R.shape[1:])
    return jax.lax.all_to_all(blocks, AXIS, 0, 0).reshape(x_R.shape)


def _inverse(slot_A: Array, n: int) -> Array:
    """For each of n rows, the element whose slot it is, or their number."""
    return jnp.full(n, slot_A.shape[0]).at[slot_A].set(jnp.arange(slot_A.shape[0]), mode="drop")


class Padded:
    """Blocks of `room` rows for every pair of devices."""

    place_Q = None

    def __init__(self, expert_A: Array, n_experts: int, room: int):
        R = jax.lax.axis_size(AXIS)
        n_local = n_experts // R
        peer_A = expert_A // n_local
        place_A = index_within(peer_A, R)
        self.slot_A = jnp.where(place_A < room, peer_A * room + place_A, R * room)
        self.source_R = _inverse(self.slot_A, R * room)
        self.dropped = (place_A >= room).sum().astype(jnp.int32)
        self.expert_Q = self.send(jnp.take(expert_A % n_local, self.source_R, mode="fill", fill_value=n_local))

    def send(self, x_R: Array) -> Array:
        return _exchange(x_R)

    receive = send  # its own inverse


class TwoHop:
    """For rows of which every device is to get as many as it sends."""

    place_Q = None

    def __init__(self, expert_A: Array, n_experts: int):
        A, R = expert_A.shape[0], jax.lax.axis_size(AXIS)
        n_local = n_experts // R
        first, second = -(-A // R), two_hop_room(A, R)
        order = in_order(expert_A, n_experts)
        turn = jnp.arange(A)
        self.slot_A = jnp.zeros_like(order).at[order].set(turn % R * first + turn // R)
        self.source_R = _inverse(self.slot_A, R * first)
        expert_M = _exchange(jnp.take(expert_A, self.source_R, mode="fill", fill_value=n_experts))
        peer_M = expert_M // n_local  # R where there is no row
        place_M = index_within(peer_M, R)
        self._slot_M = jnp.where((peer_M < R) & (place_M < second), peer_M * second + place_M, R * second)
        self._source_N = _inverse(self._slot_M, R * second)
        self.dropped = ((peer_M < R) & (place_M >= second)).sum().astype(jnp.int32)  # none, if the rows are balanced
        sent_on = jnp.take(expert_M % n_local, self._source_N, mode="fill", fill_value=n_local)
        self.expert_Q = _exchange(sent_on)

    def send(self, x_R: Array) -> Array:
        return _exchange(dispatch(_exchange(x_R), self._slot_M, self._source_N, 1))

    def receive(self, y_Q: Array) -> Array:
        return _exchange(dispatch(_exchange(y_Q), self._source_N, self._slot_M, 1))


def two_hop_room(A: int, R: int) -> int:
    """Rows that one of R devices may have to pass on to another, if each sends and gets A: sum of ceil(c_r / R)."""
    return -(-A // R) + R - 1


class Ragged:
    """Slices of the sizes there are, into `room` rows; rows are sorted by expert, so also by device."""

    def __init__(self, updates: int, expert_A: Array, n_experts: int, room: int):
        A, R, me = expert_A.shape[0], jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
        n_local = n_experts // R
        self.rows, self.room = A, room
        order = in_order(expert_A, n_experts)
        self.source_R = order
        self.slot_A = jnp.zeros_like(order).at[order].set(jnp.arange(A))

        count_E = jnp.zeros(n_experts, jnp.int32).at[expert_A].add(1)
        count_SPE = jax.lax.all_gather(count_E, AXIS).reshape(R, R, n_local)  # from S to P, by P's expert
        wanted_SP = count_SPE.sum(-1)
        begin = lambda x, axis: jnp.cumsum(x, axis) - x
        at_sender_SP, at_receiver_SP = begin(wanted_SP, 1), begin(wanted_SP, 0)
        sizes_SP = jnp.clip(self.room - at_receiver_SP, 0, wanted_SP)
        self.dropped = (wanted_SP - sizes_SP)[me].sum().astype(jnp.int32)

        # rows arrive by sender, then by expert: runs of one expert each
        count_SE = count_SPE[:, me]
        ends, row = jnp.cumsum(count_SE.reshape(-1)), jnp.arange(self.room)
        run = jnp.searchsorted(ends, row, side="right")
        self.expert_Q = jnp.where(run < ends.shape[0], run % n_local, n_local).astype(jnp.int32)
        before = begin(count_SE, 0).reshape(-1) - begin(count_SE.reshape(-1), 0)
        self.place_Q = (jnp.take(before, run, mode="clip") + row).astype(jnp.int32)

        # per peer, in pieces: where my rows for it begin, here and there, and how many they are; and so for its rows
        cut = functools.partial(pieces, updates)
        mine_here, mine = cut(at_sender_SP[me], sizes_SP[me])
        mine_there, _ = cut(at_receiver_SP[me], sizes_SP[me])
        theirs_here, theirs = cut(at_receiver_SP[:, me], sizes_SP[:, me])
        theirs_there, _ = cut(at_sender_SP[:, me], sizes_SP[:, me])
        self.there = (mine_here, mine, mine_there, theirs)
        self.back = (theirs_here, theirs, theirs_there, mine)

    def send(self, x_R: Array) -> Array:
        return _move(self.room, x_R, self.there, self.back)

    def receive(self, y_Q: Array) -> Array:
        return _move(self.rows, y_Q, self.back, self.there)


def pieces(n: int, begin_P: Array, size_P: Array) -> tuple[Array, Array]:
    """Every slice as n neighbouring ones whose sizes differ by at most 1: begins and sizes, [P n]."""
    part, rest = jnp.divmod(size_P[:, None], n)
    u = jnp.arange(n)
    begin = begin_P[:, None] + u * part + jnp.minimum(u, rest)
    size = part + (u < rest)
    return begin.reshape(-1).astype(jnp.int32), size.reshape(-1).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(n_rows, x, there, back):
    """Slices of x to their devices, into n_rows rows that are zero where nothing arrives; `back` undoes `there`."""
    out = jnp.zeros((n_rows, *x.shape[1:]), x.dtype)
    return jax.lax.ragged_all_to_all(x, out, *there, axis_name=AXIS)


def _move_fwd(n_rows, x, there, back):
    return _move(n_rows, x, there, back), (jnp.zeros((x.shape[0], 0)), there, back)


def _move_bwd(n_rows, saved, d):
    like, there, back = saved
    return _move(like.shape[0], d, back, there), None, None


_move.defvjp(_move_fwd, _move_bwd)

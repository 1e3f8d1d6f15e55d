"""Rows by expert: where every (token, choice) pair goes, and the gathers that take it there and back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from trillium_moe.model.params import wide
from trillium_moe.shapes import Array, Int


def in_order(group_A: Int[Array, " A"], n: int) -> Int[Array, " A"]:
    """Elements sorted by group, 0 to n, in their order within a group.

    One unsigned number holds group and element where both fit: a TPU's compiler takes a third of the time over it that
    it takes over a stable sort of pairs, and a GPU sorts it by radix.
    """
    A = group_A.shape[0]
    if (n + 1) * A > 1 << 32:
        return jnp.argsort(group_A, stable=True).astype(jnp.int32)
    keys = group_A.astype(jnp.uint32) * A + jnp.arange(A, dtype=jnp.uint32)
    return (jnp.sort(keys, stable=False) % A).astype(jnp.int32)


def index_within(group_A: Int[Array, " A"], n: int) -> Int[Array, " A"]:
    """Index of each element among those of its group, in order; groups are 0 to n."""
    order = in_order(group_A, n)
    count = jnp.zeros(n + 1, jnp.int32).at[group_A].add(1)
    start = jnp.cumsum(count) - count
    return jnp.zeros_like(order).at[order].set(jnp.arange(group_A.shape[0]) - start[group_A[order]])


def plan(
    expert_A: Int[Array, " A"], n_experts: int, align: int, place_A: Int[Array, " A"] | None = None
) -> tuple[Array, Array, Array]:
    """Where each assignment goes when rows are sorted by expert and every expert starts at a multiple of `align`.

    Args:
      expert_A: expert of every (token, choice) pair; n_experts for an assignment that is dropped.
      place_A: row of each assignment among those of its expert, if that is known; else in order of assignment.

    Returns:
      slot_A: row of each assignment; dropped ones get the number of rows.
      source_R: assignment of each row; empty rows get A.
      sizes_E: rows per expert, multiples of `align`.
    """
    A = expert_A.shape[0]
    rows = -(-A // align) * align + n_experts * align
    count = jnp.zeros(n_experts, jnp.int32).at[expert_A].add(1, mode="drop")
    sizes = -(-count // align) * align
    start = jnp.cumsum(sizes) - sizes
    place_A = index_within(expert_A, n_experts) if place_A is None else place_A
    slot_A = jnp.where(expert_A < n_experts, jnp.take(start, expert_A, mode="clip") + place_A, rows)
    source_R = jnp.full(rows, A).at[slot_A].set(jnp.arange(A), mode="drop")
    return slot_A, source_R, sizes


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dispatch(x_ML, slot_A, source_R, k):
    """Rows of x by expert: row r holds the token of assignment source_R[r], empty rows zero. Gathers both ways."""
    return jnp.take(x_ML, source_R // k, axis=0, mode="fill", fill_value=0)


def _dispatch_bwd(k, slot_A, d_RL):
    d = jnp.take(d_RL, slot_A, axis=0, mode="fill", fill_value=0)
    return wide(d).reshape(-1, k, d.shape[-1]).sum(1).astype(d.dtype), None, None


dispatch.defvjp(lambda x, slot, source, k: (dispatch(x, slot, source, k), slot), _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def gather_sum(y_RL, slot_A, source_R, k):
    """sum_j y[slot_j] of every token, in at least float32; no scatter in either direction."""
    y = jnp.take(y_RL, slot_A, axis=0, mode="fill", fill_value=0)
    return wide(y).reshape(-1, k, y.shape[-1]).sum(1)


def _gather_sum_fwd(y_RL, slot_A, source_R, k):
    return gather_sum(y_RL, slot_A, source_R, k), (jnp.zeros(0, y_RL.dtype), source_R)


def _gather_sum_bwd(k, saved, d_ML):
    like, source_R = saved
    return jnp.take(d_ML.astype(like.dtype), source_R // k, axis=0, mode="fill", fill_value=0), None, None


gather_sum.defvjp(_gather_sum_fwd, _gather_sum_bwd)

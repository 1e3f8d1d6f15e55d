"""Rows by expert: where every (token, choice) pair goes, and the gathers that take it there and back."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from trillium_moe.model.params import wide
from trillium_moe.shapes import Array, Int


def plan(expert_A: Int[Array, " A"], n_experts: int, align: int) -> tuple[Array, Array, Array]:
    """Where each assignment goes when rows are sorted by expert and every expert starts at a multiple of `align`.

    Args:
      expert_A: expert of every (token, choice) pair; n_experts for an assignment that is dropped.

    Returns:
      slot_A: row of each assignment; dropped ones get the number of rows.
      source_R: assignment of each row; empty rows get A.
      sizes_E: rows per expert, multiples of `align`.
    """
    A = expert_A.shape[0]
    rows = -(-A // align) * align + n_experts * align
    count = jnp.zeros(n_experts, jnp.int32).at[expert_A].add(1, mode="drop")
    sizes = -(-count // align) * align
    order = jnp.argsort(expert_A, stable=True)
    shift = (jnp.cumsum(sizes) - sizes) - (jnp.cumsum(count) - count)  # padding before each expert's first row
    slot = jnp.arange(A) + jnp.take(shift, expert_A[order], mode="fill", fill_value=rows)
    slot_A = jnp.full(A, rows).at[order].set(jnp.minimum(slot, rows))
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


@jax.custom_vjp
def combine(y_RL, weight_MK, slot_A, source_R):
    """sum_j weight_j y[slot_j], as `gather_sum`, where y comes from elsewhere: y is kept for the weights' gradient."""
    M, K = weight_MK.shape
    y = jnp.take(y_RL, slot_A, axis=0, mode="fill", fill_value=0).reshape(M, K, -1)
    return jnp.einsum("mkl,mk->ml", wide(y), wide(weight_MK))


def _combine_bwd(saved, d_ML):
    y_RL, weight_MK, slot_A, source_R = saved
    M, K = weight_MK.shape
    y = jnp.take(y_RL, slot_A, axis=0, mode="fill", fill_value=0).reshape(M, K, -1)
    d_weight = jnp.einsum("mkl,ml->mk", wide(y), d_ML)
    weight_R = jnp.take(wide(weight_MK).reshape(-1), source_R, mode="fill", fill_value=0)
    d_y = weight_R[:, None] * jnp.take(d_ML, source_R // K, axis=0, mode="fill", fill_value=0)
    return d_y.astype(y_RL.dtype), d_weight.astype(weight_MK.dtype), None, None


combine.defvjp(lambda *args: (combine(*args), args), _combine_bwd)

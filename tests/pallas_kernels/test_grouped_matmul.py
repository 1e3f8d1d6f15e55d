"""Grouped matmul: every implementation against numpy, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.api import IMPLEMENTATIONS


def example(sizes, align, K=5, N=3, spare=1):
    rng = np.random.default_rng(0)
    M = sum(sizes) + spare * align
    lhs, rhs = rng.normal(size=(M, K)).astype(np.float32), rng.normal(size=(len(sizes), K, N)).astype(np.float32)
    return lhs, rhs, np.array(sizes, np.int32)


def by_hand(lhs, rhs, sizes):
    out, start = np.zeros((len(lhs), rhs.shape[2])), 0
    for g, size in enumerate(sizes):
        out[start : start + size] = lhs[start : start + size].astype(np.float64) @ rhs[g]
        start += size
    return out, start


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(blocks=st.lists(st.integers(0, 3), min_size=1, max_size=5), align=st.sampled_from([1, 4, 8]))
@settings(max_examples=8, deadline=None)
def test_values_and_gradients(implementation, blocks, align):
    lhs, rhs, sizes = example([b * align for b in blocks], align)
    expected, used = by_hand(lhs, rhs, sizes)
    weight = np.random.default_rng(1).normal(size=expected.shape).astype(np.float32)
    weight[used:] = 0

    def f(lhs, rhs):
        out = grouped_matmul(lhs, rhs, jnp.asarray(sizes), align=align, implementation=implementation)
        return (out * weight).sum(), out

    (_, out), (d_lhs, d_rhs) = jax.value_and_grad(f, (0, 1), has_aux=True)(jnp.asarray(lhs), jnp.asarray(rhs))
    np.testing.assert_allclose(out[:used], expected[:used], rtol=1e-4, atol=1e-5)
    start = 0
    for g, size in enumerate(sizes):
        rows = slice(start, start + size)
        np.testing.assert_allclose(d_lhs[rows], weight[rows] @ rhs[g].T, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(d_rhs[g], lhs[rows].T @ weight[rows], rtol=1e-4, atol=1e-5)
        if size == 0:
            np.testing.assert_array_equal(d_rhs[g], 0)  # exactly, not nearly (tokamax#1016)
        start += size


def test_rows_that_do_not_fit_the_alignment_are_refused():
    with pytest.raises(ValueError, match="align=4 must divide the 6 rows"):
        grouped_matmul(jnp.ones((6, 2)), jnp.ones((1, 2, 2)), jnp.array([4]), align=4)

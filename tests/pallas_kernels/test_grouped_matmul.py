"""Grouped matmul: every implementation against numpy, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.gpu_kernel import Tiles
from pallas_kernels.grouped_matmul.row_tiles import row_tiles

ANYWHERE = ("reference", "xla")


def example(sizes, align, K=5, N=3, spare=1):
    """lhs, rhs, sizes, with NaN in the rows that no group owns."""
    rng = np.random.default_rng(0)
    M = sum(sizes) + spare * align
    lhs, rhs = rng.normal(size=(M, K)).astype(np.float32), rng.normal(size=(len(sizes), K, N)).astype(np.float32)
    lhs[sum(sizes) :] = np.nan
    return lhs, rhs, np.array(sizes, np.int32)


def by_hand(lhs, rhs, weight, sizes):
    """out, d_lhs, d_rhs of sum(out * weight), float64."""
    out, d_lhs, d_rhs, start = np.zeros(weight.shape), np.zeros(lhs.shape), np.zeros(rhs.shape), 0
    for g, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows] = lhs[rows].astype(np.float64) @ rhs[g]
        d_lhs[rows] = weight[rows].astype(np.float64) @ rhs[g].T
        d_rhs[g] = lhs[rows].astype(np.float64).T @ weight[rows]
        start += size
    return out, d_lhs, d_rhs


def evaluate(lhs, rhs, weight, sizes, align, implementation):
    op = lambda x, y: grouped_matmul(x, y, jnp.asarray(sizes), align=align, implementation=implementation)
    out, vjp = jax.vjp(op, jnp.asarray(lhs), jnp.asarray(rhs))
    return out, *vjp(jnp.asarray(weight))


@pytest.mark.parametrize("implementation", ANYWHERE)
@given(blocks=st.lists(st.integers(0, 3), min_size=1, max_size=5), align=st.sampled_from([1, 4, 8]))
@settings(max_examples=8, deadline=None)
def test_values_and_gradients(implementation, blocks, align):
    lhs, rhs, sizes = example([b * align for b in blocks], align)
    weight = np.random.default_rng(1).normal(size=(len(lhs), rhs.shape[2])).astype(np.float32)
    if implementation == "reference":  # autodiff multiplies what it masks
        lhs, weight = np.nan_to_num(lhs), np.where(np.isnan(lhs[:, :1]), 0, weight)
    expected = by_hand(lhs, rhs, weight, sizes)
    for got, want in zip(evaluate(lhs, rhs, weight, sizes, align, implementation), expected):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(got)[want == 0], 0)  # exactly, not nearly (tokamax#1016)


@pytest.mark.parametrize("implementation", ANYWHERE)
def test_wide_results_of_narrow_rows(implementation):
    """dtype is that of the result alone: products of bfloat16 rows and matrices, not rounded to bfloat16."""
    lhs, rhs, sizes = example([8, 16], 8, spare=0)
    lhs, rhs = jnp.asarray(lhs, jnp.bfloat16), jnp.asarray(rhs, jnp.bfloat16)
    weight = np.ones((len(lhs), rhs.shape[2]), np.float32)
    want, d_lhs, _ = by_hand(np.asarray(lhs, np.float32), np.asarray(rhs, np.float32), weight, sizes)
    how = {"align": 8, "dtype": jnp.float32, "implementation": implementation}
    op = lambda x: grouped_matmul(x, rhs, jnp.asarray(sizes), **how)
    out, vjp = jax.vjp(op, lhs)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vjp(jnp.asarray(weight))[0].astype(jnp.float32), d_lhs, rtol=1e-2)


def test_cost_of_xla_does_not_grow_with_the_number_of_groups():
    """jax.lax.ragged_dot on CPU multiplies every row by every group's matrix."""

    def flops(G):
        f = lambda x, y, s, d: evaluate(x, y, d, s, 8, "xla")
        shapes = ((512, 16), jnp.float32), ((G, 16, 24), jnp.float32), ((G,), jnp.int32), ((512, 24), jnp.float32)
        cost = jax.jit(f).lower(*(jax.ShapeDtypeStruct(*x) for x in shapes)).compile().cost_analysis()
        return cost["flops"]

    products = 3 * 2 * 512 * 16 * 24
    assert products <= flops(8) < 1.2 * products
    assert flops(512) < 1.2 * products + 64 * 512  # finding the group of every block compares it with all


def test_gradient_of_rhs_has_its_dtype():
    lhs, rhs, sizes = example([8, 16], 8, spare=0)
    op = lambda y: grouped_matmul(jnp.asarray(lhs, jnp.bfloat16), y, jnp.asarray(sizes), align=8)
    d_rhs = jax.grad(lambda y: op(y).astype(jnp.float32).sum())(jnp.asarray(rhs))
    assert d_rhs.dtype == jnp.float32
    want = np.stack([np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64).sum(0) for x in (lhs[:8], lhs[8:])])
    np.testing.assert_allclose(d_rhs, np.broadcast_to(want[:, :, None], d_rhs.shape), rtol=1e-6)


def test_rows_that_do_not_fit_the_alignment_are_refused():
    with pytest.raises(ValueError, match="align=4 must divide the 6 rows"):
        grouped_matmul(jnp.ones((6, 2)), jnp.ones((1, 2, 2)), jnp.array([4]), align=4)


@given(
    sizes=st.lists(st.integers(0, 24), min_size=5, max_size=5), panel=st.sampled_from([1, 3]), light_last=st.booleans()
)
@settings(max_examples=30, deadline=None)
def test_work_list_covers_every_row_and_column_once(sizes, panel, light_last):
    sizes, M, columns, workers = np.array(sizes, np.int32) * 8, 1000, 3, 4
    tiles = Tiles(64, 64, panel=panel, light_last=light_last)
    count, table = jax.jit(row_tiles, static_argnums=(1, 2, 3, 4))(sizes, M, columns, tiles, workers)
    covered, owner = np.zeros((M, columns), int), np.repeat(np.arange(6), [*sizes, M - sizes.sum()])
    assert count[0] <= len(table)
    for group, row, rows, column in np.asarray(table[: count[0]]):
        assert 0 < rows <= tiles.rows and row % 8 == 0
        covered[row : row + rows, column] += 1
        assert (owner[row : row + rows] == group).all()
    assert (covered == 1).all()
    if not light_last:
        return
    light = (table[: count[0], 2] <= tiles.block // 2) | (table[: count[0], 0] == 5)
    heavy = [int((~light[w::workers]).sum()) for w in range(workers)]
    assert max(heavy) - min(heavy) <= 1

"""The numerics planner against tiles worked out number by number."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.kda import numerics
from pallas_kernels.kda.numerics import REFERENCES, lowest_gate, lowest_kernel_gate, tile_range
from trillium_moe.config import ConfigError, KDAConfig

DTYPES = [ml_dtypes.bfloat16, np.float32, np.float16]
CASES = [(dtype, tile, rule) for dtype in DTYPES for tile in (4, 16, 32) for rule in REFERENCES]


def factors(tile, rule, g):
    """e^{G_i - r} of the rows and e^{r - G_j} of the columns of gates g [R, n], in float64."""
    G = np.cumsum(g, axis=0)
    shift = (tile - 1) * -g.min() / 2
    r = {"before": 0 * G[0], "first": G[0], "middle": G[tile // 2], "shifted": G[0] - shift}[rule]
    return np.exp(G - r), np.exp(r - G)


def extreme_gates(tile, g_min):
    """Columns of gates: all at the bound, none but one row's, and random mixtures of both."""
    rng = np.random.default_rng(0)
    columns = [np.full(tile, g_min), *(g_min * (rng.uniform(size=(20, tile)) < 0.7)), *(g_min * np.eye(tile))]
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("dtype, tile, rule", CASES)
def test_ranges_are_reached_and_never_left(dtype, tile, rule):
    g_min = 0.99 * lowest_gate(dtype, tile, rule)
    plan = tile_range(dtype, tile, rule, g_min)
    found = [np.log(x) for x in factors(tile, rule, extreme_gates(tile, g_min))]
    for (low, high), exponents in zip((plan.row, plan.col), found):
        # the gate of the first row itself counts for `before` only; no row but the first has no gate
        np.testing.assert_allclose(exponents.min(), low, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(exponents.max(), high, rtol=1e-9, atol=1e-9)
    assert plan.largest == pytest.approx(np.exp(max(x.max() for x in found)))


@pytest.mark.parametrize("dtype, tile, rule", CASES)
def test_bounds_are_safe_and_tight(dtype, tile, rule):
    """At the bound every factor is a normal number of the dtype; half a row's gate past the range, some are not."""
    info = ml_dtypes.finfo(dtype)

    def normal(g_min):
        rounded = [x.astype(dtype).astype(np.float64) for x in factors(tile, rule, extreme_gates(tile, g_min))]
        return all((x >= float(info.smallest_normal)).all() and np.isfinite(x).all() for x in rounded)

    bound = lowest_gate(dtype, tile, rule)
    assert tile_range(dtype, tile, rule, bound).safe and normal(bound)
    # the range is in whole nats, of 87.3 and 9.7
    past = bound * (1 + 1.5 / numerics.exponent_range(dtype))
    assert not tile_range(dtype, tile, rule, past).safe and not normal(past)


@pytest.mark.parametrize(
    "rule, bound, largest, smallest",
    [("first", -5.8, 3.7e32, 4.4e-6), ("before", -5.4375, 5.5e34, 6.5e-4), ("shifted", -11.6, 1.9e16, 2.3e-22)],
)
def test_figures_of_sixteen_rows_at_five_nats(rule, bound, largest, smallest):
    """The table of kernels.md, by hand: 75, 80 and 37.5 nats."""
    plan = tile_range("bfloat16", 16, rule, -5.0)
    assert lowest_gate("bfloat16", 16, rule) == pytest.approx(bound)
    assert plan.largest == pytest.approx(largest, rel=0.02)
    assert plan.smallest_entry == pytest.approx(smallest, rel=0.02)
    assert plan.safe and plan.causal


@pytest.mark.parametrize("entry, lost", [(1e-3, ()), (1e-4, ("before",)), (1e-6, ("before", "first"))])
def test_small_entries_are_flushed(entry, lost):
    """What `smallest_entry` means: the score of the last row with itself, which does not decay, with gates at -5."""
    g = np.full((16, 1), -5.0)
    flush = lambda x: np.where(np.abs(x) < np.finfo(np.float32).tiny, 0, x).astype(np.float64)
    for rule in ("before", "first", "shifted"):
        row, col = (x[-1, 0] for x in factors(16, rule, g))
        score = flush(np.float32(entry * row)) * flush(np.float32(col))
        assert (score < entry / 2) == (rule in lost), rule
        assert (entry < tile_range("float32", 16, rule, -5.0).smallest_entry) == (rule in lost), rule


def test_what_the_kernels_take():
    assert lowest_kernel_gate(16) == pytest.approx(-5.8)
    assert lowest_kernel_gate(32) == pytest.approx(-87 / 31)
    assert lowest_kernel_gate(1) == -np.inf


def test_configs_stay_inside():
    for g_min in (-5.0, lowest_kernel_gate(16)):
        assert KDAConfig(g_min=g_min).g_min == g_min
    with pytest.raises(ConfigError, match=r"config model\.kda\.g_min=-6\.0: must be at least -5\.80.*; use -5\.0, or"):
        KDAConfig(g_min=-6.0)
    with pytest.raises(ConfigError, match=r"config model\.kda\.g_min=0\.0: must be negative"):
        KDAConfig(g_min=0.0)
    assert KDAConfig(g_min=-6.0, decay="softplus")  # not read


def test_configs_do_not_import_jax():
    """A wrong flag is answered at once, and ahead-of-time compilation prepares the environment before JAX is there."""
    code = "import sys, trillium_moe.config as c; c.Config(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_bad_arguments():
    for call, message in (
        (lambda: lowest_gate("float32", 16, "last"), "reference='last' does not exist; use one of: before, first"),
        (lambda: lowest_gate("float32", 0, "first"), "tile=0 has no rows"),
        (lambda: tile_range("float32", 16, "first", 5.0), "g_min=5.0 is positive"),
    ):
        with pytest.raises(ValueError, match=message):
            call()

import jax
import pytest

from trillium_moe.config import OptimConfig
from trillium_moe.train.schedule import make_schedule


def rates(steps, *at, **fields):
    schedule = make_schedule(OptimConfig(lr=2e-3, final_lr=0.1, **fields), steps)
    return [float(schedule(i)) for i in at]


def close(*values):
    return pytest.approx(values, rel=1e-6)


def test_cosine():
    # 4 warm-up steps, then 196 of half a cosine; a third of it is step 4 + 196 / 3, not whole, so quarters
    got = rates(200, 0, 3, 4, 4 + 49, 4 + 98, 200, 300, warmup=0.02)
    quarter = 0.1 + 0.9 * 0.5 * (1 + 2**-0.5)
    assert got == close(2e-3 / 5, 2e-3 * 4 / 5, 2e-3, 2e-3 * quarter, 2e-3 * 0.55, 2e-4, 2e-4)


def test_wsd():
    got = rates(100, 0, 9, 10, 79, 80, 90, 99, 100, 101, schedule="wsd", warmup=0.1, decay=0.2)
    assert got == close(2e-3 / 11, 2e-2 / 11, 2e-3, 2e-3, 2e-3, 1.1e-3, 2.9e-4, 2e-4, 2e-4)


def test_wsd_without_decay_stays_at_the_peak():
    assert rates(10, 1, 5, 9, schedule="wsd", warmup=0.0, decay=0.0) == close(2e-3, 2e-3, 2e-3)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("fields", [{}, {"warmup": 1.0, "decay": 1.0}, {"warmup": 0.0, "decay": 0.0}])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_every_step_of_a_short_run_has_a_rate(schedule, fields, steps):
    got = rates(steps, *range(steps), schedule=schedule, **fields)
    assert all(0 < rate <= 2e-3 * (1 + 1e-6) for rate in got)


def test_traced_step_gives_the_same_rate():
    schedule = make_schedule(OptimConfig(), 100)
    assert float(jax.jit(schedule)(37)) == pytest.approx(float(schedule(37)), rel=1e-6)

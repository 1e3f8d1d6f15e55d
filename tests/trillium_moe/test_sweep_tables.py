"""What a sweep's results are worth: differences, seeds' noise, measures, and the laws of a ladder of sizes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillium_moe.config import Config, TrainConfig
from trillium_moe.sweep import figures
from trillium_moe.sweep.gather import Result, seed_noise, summarise
from trillium_moe.sweep.ladder import compute_of, fit_power_law, ladder_table
from trillium_moe.sweep.measures import MEASURES
from trillium_moe.sweep.plan import Sweep, chain, load_sweep, named, over, product

BASE = Config(train=TrainConfig(steps=12))


def made(sweep: Sweep, losses: dict[str, list[float | None]], rate: float = 100.0) -> list[Result]:
    """Results with given losses by arm name; None: diverged."""
    out = []
    for run in sweep.runs:
        loss = losses[run.arm.name][sweep.seeds.index(run.seed)]
        steps = run.config.train.steps
        lines = [{"step": s, "train/loss": 5 - s / steps, "perf/tokens_per_second": rate} for s in range(1, steps + 1)]
        lines[-1]["heldout/loss"] = loss
        out.append(Result(run, "finished" if loss is not None else "diverged", "", lines, {}, 1 << 30))
    return out


def test_differences_inside_two_seed_deviations_are_none():
    others = (("near", 1.0), ("far", 2.0), ("gone", 3.0))
    arms = chain(named("base"), *(named(name, **{"optim.lr": lr}) for name, lr in others))
    sweep = Sweep("q", BASE, arms, "base", seeds=(0, 1, 2))
    losses = {"base": [2.00, 2.01, 2.02], "near": [1.985, 1.995, 2.005], "far": [1.97, 1.98, 1.99],
              "gone": [2.0, None, 2.0]}
    rows = {row.name: row for row in summarise(sweep, made(sweep, losses))}
    base = rows["base"]
    assert base.verdict == "baseline" and base.mean == pytest.approx(2.01) and base.deviation == pytest.approx(0.01)
    assert base.interval == pytest.approx(4.302653 * 0.01 / 3**0.5, rel=1e-6)  # t of 2 degrees of freedom, 97.5%
    assert rows["near"].difference == pytest.approx(-0.015) and rows["near"].verdict == "no difference"
    assert rows["far"].difference == pytest.approx(-0.03) and rows["far"].verdict == "better"
    assert rows["far"].pooled == pytest.approx(0.01)
    assert rows["far"].paired == pytest.approx((-0.03, 0.0), abs=1e-9)  # the same in every seed
    assert rows["gone"].verdict == "diverged (1 of 3)"
    (line,) = seed_noise(list(rows.values()))  # of the three arms that did not diverge; all deviate by 0.01, in step
    assert "deviates by 0.0100 (all arms, 6 degrees of freedom)" in line
    assert f"± {2.446912 * 0.01 * (2 / 3) ** 0.5:.4f} (95%), taken seed by seed to ± 0.0000" in line
    assert seed_noise([rows["base"], rows["far"], rows["gone"]]) == []  # two arms: the verdict says as much


def test_one_seed_is_not_judged_and_a_tuned_choice_is_made():
    arms = product(chain(named("a"), named("b", **{"optim.momentum": 0.5})), over("optim.lr", (0.1, 0.2), "tuned"))
    sweep = Sweep("q", BASE, arms, "a", seeds=(0,))
    losses = {"a, lr=0.1": [2.0], "a, lr=0.2": [1.9], "b, lr=0.1": [None], "b, lr=0.2": [1.5]}
    a, b = summarise(sweep, made(sweep, losses))
    assert (a.name, a.tuned, a.mean) == ("a", "lr=0.2", 1.9)
    assert (b.tuned, b.difference, b.verdict) == ("lr=0.2", pytest.approx(-0.4), "one seed: cannot be judged")


def test_measures_of_balance():
    curve = [0.1, 3.0, 1.0, 0.15, 0.5, 0.1, 0.1]  # balanced before it has learnt anything
    lines = [{"step": s + 1, "router/max_violation": v, "router/floor": 0.1} for s, v in enumerate(curve)]
    read = lambda name, lines=lines: MEASURES[name].read(lines)
    assert read("steps_to_balance") == 4 and read("steps_to_half") == 4
    assert read("steps_to_half", [{**line, "router/floor": 0.01} for line in lines]) == 4  # whatever the floor is
    assert read("violation_area") == pytest.approx(sum((a + b) / 2 for a, b in zip(curve, curve[1:])) / 6)
    assert read("violation_tail") == pytest.approx(0.1)
    assert read("steps_to_balance", lines[:3]) is None and read("violation_area", []) is None
    assert read("dead_experts") is None


def test_an_arm_that_never_balances_says_so():
    sweep = Sweep("q", BASE, chain(named("a"), named("b", **{"optim.momentum": 0.5})), "a", seeds=(0, 1),
                  measures=("steps_to_balance", "violation_floor"))
    line = lambda step, value: {"step": step, "router/max_violation": value, "router/floor": 0.1, "heldout/loss": 1.0}
    curves = {("a", 0): (3.0, 0.1), ("a", 1): (3.0, 0.1), ("b", 0): (3.0, 3.0), ("b", 1): (3.0, 0.1)}
    lines = lambda run: [line(step, value) for step, value in enumerate(curves[run.arm.name, run.seed], 1)]
    results = [Result(run, "finished", "", lines(run), {}, 0) for run in sweep.runs]
    a, b = summarise(sweep, results)
    assert (a.text("steps_to_balance"), b.text("steps_to_balance")) == ("2", "never in 1 of 2")
    (axes,) = figures.bars([a, b], "steps_to_balance").axes
    assert [text.get_text() for text in axes.texts] == ["2", "never in 1 of 2"]
    assert figures.bars([a, b], "violation_floor") is None  # the same for all: no picture
    assert figures.bars([a, b], "churn") is None


@settings(max_examples=50, deadline=None)
@given(st.floats(0.0, 1.5), st.floats(0.05, 0.5), st.floats(0.5, 3.0))
def test_power_law_is_found_again(floor, exponent, at_one):
    compute = np.geomspace(1e12, 1e16, 6)
    loss = floor + at_one * (compute / 1e12) ** -exponent
    fixed = fit_power_law(compute, loss, floor)
    np.testing.assert_allclose(fixed.loss(compute), loss, rtol=1e-9)
    assert fixed.exponent == pytest.approx(exponent, rel=1e-6)
    assert fixed.compute(loss[2]) == pytest.approx(compute[2], rel=1e-6)
    np.testing.assert_allclose(fit_power_law(compute, loss).loss(compute), loss, rtol=2e-3)


def test_power_law_refuses_what_it_cannot_fit():
    with pytest.raises(ValueError, match="3 points; a power law needs 4"):
        fit_power_law(np.ones(3), np.ones(3))
    with pytest.raises(ValueError, match="floor 1.0 is not below every loss"):
        fit_power_law(np.ones(3), np.ones(3), 1.0)


def test_speed_up_on_the_ladder():
    """An arm whose law has half the baseline's compute at every loss is worth 2 at equal speed, 1 at half the speed."""
    sweep = load_sweep("configs/ablations/ladder.py:seeds=2,widths=1+2")
    sweep = dataclasses.replace(sweep, arms=tuple(a for a in sweep.arms if a.family in ("none", "full")))
    compute = {r.arm.rung: None for r in sweep.runs}
    results = made(sweep, {r.arm.name: [1.0, 1.0] for r in sweep.runs})
    for row in summarise(sweep, results):
        compute[row.rung] = compute_of(row)
    assert list(compute.values()) == sorted(compute.values())
    law = lambda c, factor: 30 * (factor * c) ** -0.1
    losses = {arm.name: [law(compute[arm.rung], 2.0 if arm.family == "full" else 1.0)] * 2 for arm in sweep.arms}
    results = [dataclasses.replace(r, lines=[{**line, "perf/tokens_per_second": 50.0} for line in r.lines])
               if r.run.arm.family == "full" else r for r in made(sweep, losses)]
    found = ladder_table(sweep, summarise(sweep, results))
    full = [i for i, name in enumerate(found["arm"]) if name == "full"]
    assert [float(found["speed-up"][i]) for i in full] == pytest.approx([2] * 2, abs=0.02)  # depth reads cost a little
    assert [float(found["speed-up in time"][i]) for i in full] == pytest.approx([1] * 2, abs=0.02)
    assert {found["law"][i].split("^")[1] for i in full} == {"-0.1000"}

"""A sweep's pictures: pure functions from its rows to matplotlib figures, in the style of a run's report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from trillium_moe.sweep.gather import Result, Row
from trillium_moe.sweep.measures import MEASURES
from trillium_moe.train.figures import AMBER, GRID, HALO, INK, MUTED, SIZE, WIDE, series, styled

COLOURS = ("#12306b", "#d9822b", "#0f9b8e", "#8a5fc0", "#b4540a", "#2f6fde", "#c2417c", "#5a8f29", "#697586", "#17a2c4",
           "#a58b00", "#1c2733")
TINTS = {"better": "#0f9b8e", "worse": "#b4540a"}


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


@styled
def differences(rows: Sequence[Row]) -> Figure | None:
    """Held-out loss of every run as its distance from the baseline's mean; the band is what seeds alone do."""
    base = next((row for row in rows if row.verdict == "baseline"), None)
    shown = [row for row in rows if len(row.losses)]
    if base is None or base.mean is None or not shown:
        return None
    figure = Figure(figsize=(WIDE[0], 1.2 + 0.42 * len(shown)))
    axes = figure.subplots()
    _title(axes, "Difference from the baseline", "held-out loss, nats per token; left is better")
    spread = max([row.pooled for row in shown if row.pooled] + [base.deviation or 0.0])
    if spread:
        axes.axvspan(-2 * spread, 2 * spread, color=GRID, zorder=0)
        axes.annotate("two seed deviations", (2 * spread, 1), xycoords=("data", "axes fraction"), xytext=(-4, -3),
                      textcoords="offset points", ha="right", va="top", fontsize=8, color=MUTED)
    axes.axvline(0, color=MUTED, lw=1)
    for y, row in enumerate(shown):
        at = row.losses - base.mean
        tint = TINTS.get(row.verdict, INK)
        axes.plot(at, np.full(len(at), y), "o", color=tint, ms=5, alpha=0.45, mew=0)
        axes.plot([at.mean()] * 2, [y - 0.28, y + 0.28], color=tint, lw=2.4)
        axes.annotate(f"{at.mean():+.4f}  {row.verdict}" if row is not base else "baseline", (1.01, y),
                      xycoords=("axes fraction", "data"), va="center", fontsize=8.5, color=tint, annotation_clip=False)
    axes.set_yticks(range(len(shown)), [row.name for row in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", labelcolor=INK)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:+.3g}" if v else "0"))
    return figure


@styled
def loss_curves(rows: Sequence[Row]) -> Figure | None:
    """Training loss against tokens and against time, mean over seeds."""
    shown = [row for row in rows if any(r.lines for r in row.results)]
    if not shown:
        return None
    figure = Figure(figsize=(WIDE[0], 4.6))
    left, right = figure.subplots(1, 2, sharey=True)
    _title(left, "Loss against tokens", "training, nats per token")
    _title(right, "Loss against time", "seconds of training, without compilation")
    for i, row in enumerate(shown):
        curve = mean_curve(row.results, "train/loss")
        if curve is None:
            continue
        steps, loss = curve
        loss = _smooth(loss, len(loss) // 20)
        left.plot(steps * row.results[0].tokens_per_step, loss, color=colour(i), label=row.name)
        rates = [r.rate for r in row.results if np.isfinite(r.rate)]
        if rates:
            right.plot(steps * row.results[0].tokens_per_step / np.mean(rates), loss, color=colour(i))
    for axes in (left, right):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        axes.grid(axis="x", visible=False)
    left.set_xlabel("tokens")
    right.set_xlabel("seconds")
    left.legend(fontsize=8.5)
    return figure


@styled
def balance(rows: Sequence[Row]) -> Figure | None:
    """MaxVio over the steps, mean over layers and seeds, with the sampling floor."""
    curves = [(row, mean_curve(row.results, "router/max_violation")) for row in rows]
    curves = [(row, curve) for row, curve in curves if curve is not None]
    if not curves:
        return None
    figure = Figure(figsize=WIDE)
    axes = figure.subplots()
    _title(axes, "Load violation", "largest expert load / mean − 1; mean over layers and seeds")
    for i, (row, (steps, values)) in enumerate(curves):
        axes.plot(steps, values, color=colour(i), alpha=0.3, lw=0.8)
        # on a log axis: over a tenth of the steps so far on both sides
        axes.plot(steps, _smooth(values, np.arange(len(values)) // 10), color=colour(i), label=row.name)
    floor = series(curves[0][0].results[0].lines, "router/floor")[1]
    if len(floor):
        for times, text in ((1, "sampling floor"), (2, "twice the floor: balanced")):
            axes.axhline(times * floor[-1], color=AMBER, lw=1.2, ls=(0, (4, 3)), zorder=1.5)
            axes.annotate(f"{text} {times * floor[-1]:.2f}", (1, times * floor[-1]), xycoords=("axes fraction", "data"),
                          xytext=(-4, -3), textcoords="offset points", ha="right", va="top", color=AMBER, fontsize=8.5,
                          path_effects=HALO)
        axes.set_ylim(bottom=0.7 * min(floor[-1], *(values.min() for _, (_, values) in curves)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("step")
    axes.legend(fontsize=8.5, loc="upper left", bbox_to_anchor=(1, 1))  # beside: sweeps may have many arms
    return figure


@styled
def bars(rows: Sequence[Row], name: str) -> Figure | None:
    """One measure of every arm. None if it is the same in all arms, or none has it: that needs no picture."""
    shown = [row for row in rows if row.count("finished")]
    values = [row.average(name) for row in shown]
    if len(set(values)) < 2:
        return None
    figure = Figure(figsize=(SIZE[0], 1.1 + 0.34 * len(shown)))
    axes = figure.subplots()
    title = MEASURES[name].title
    axes.set_title(title[0].upper() + title[1:])
    drawn = axes.barh(range(len(shown)), [v or 0.0 for v in values], color="#9cc2f5", height=0.62)
    axes.bar_label(drawn, [row.text(name) for row in shown], padding=4, fontsize=8.5, color=INK)
    axes.set_yticks(range(len(shown)), [row.name for row in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.margins(x=0.15)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", labelcolor=INK)
    return figure


def mean_curve(results: Sequence[Result], name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """(steps, mean over runs) of a metric, at the steps that all runs that logged it have."""
    found = [series(r.lines, name) for r in results]
    found = [(steps, values) for steps, values in found if len(steps)]
    if not found:
        return None
    common = found[0][0]
    for steps, _ in found[1:]:
        common = np.intersect1d(common, steps)
    if not len(common):
        return None
    return common, np.mean([values[np.isin(steps, common)] for steps, values in found], axis=0)


def _smooth(values: np.ndarray, reach: int | np.ndarray) -> np.ndarray:
    """Mean over up to `reach` neighbours on both sides: no more than lie before a value, so that the steep beginning is
    not moved, and those that are left after it, so that the last batch alone does not make the end."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    i = np.arange(len(values))
    before = np.minimum(reach, i)
    after = np.minimum(before, len(values) - 1 - i)
    return (total[i + after + 1] - total[i - before]) / (before + after + 1)


def _title(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.annotate(unit, (1, 1), xycoords="axes fraction", xytext=(0, 10), textcoords="offset points", ha="right",
                  va="bottom", color=MUTED, fontsize=8.5, annotation_clip=False)

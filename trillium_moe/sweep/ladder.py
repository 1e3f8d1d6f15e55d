"""Sizes of a sweep: power laws of loss over compute, and what a change is worth in compute.

    L(C) = L0 + A C^-alpha        C: FLOPs of training, forward and backward (`trillium_moe.train.flops`)

An arm that reaches loss L with compute C would have cost the baseline (A / (L - L0))^(1 / alpha) by its own law; that
over C is the effective speed-up at equal speed. At equal time both are divided by the FLOPs per second they ran at.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from scipy.optimize import least_squares

from trillium_moe.config import Config
from trillium_moe.shapes import Float
from trillium_moe.sweep.gather import Row
from trillium_moe.sweep.plan import Sweep
from trillium_moe.train.figures import MUTED, WIDE, styled
from trillium_moe.train.flops import step_flops


@dataclass(frozen=True)
class PowerLaw:
    """loss = floor + scale * compute^-exponent."""

    floor: float
    scale: float
    exponent: float

    def loss(self, compute: float | np.ndarray) -> float | np.ndarray:
        return self.floor + self.scale * compute**-self.exponent

    def compute(self, loss: float) -> float:
        """Compute that the law asks for; nan for a loss at or below its floor."""
        return (self.scale / (loss - self.floor)) ** (1 / self.exponent) if loss > self.floor else float("nan")


def fit_power_law(
    compute: Float[np.ndarray, "n"], loss: Float[np.ndarray, "n"], floor: float | None = None
) -> PowerLaw:
    """Least squares in log(loss - floor) for a given floor, in log loss if the floor is fitted too.

    Args:
      floor: loss of unlimited compute. None fits it, which takes at least four points.
    Raises:
      ValueError: for fewer than two points (four without a floor), or losses at or below the floor.
    """
    compute, loss = np.asarray(compute, float), np.asarray(loss, float)
    needed = 4 if floor is None else 2
    if len(compute) < needed:
        raise ValueError(f"{len(compute)} points; a power law needs {needed}")
    if floor is not None:
        if (loss <= floor).any():
            raise ValueError(f"floor {floor} is not below every loss ({loss.min():.4f})")
        slope, offset = np.polyfit(np.log(compute), np.log(loss - floor), 1)
        return PowerLaw(float(floor), float(np.exp(offset)), float(-slope))
    start = fit_power_law(compute, loss, 0.0)
    middle = np.exp(np.log(compute).mean())  # parameters of order one: floor, loss above it at the middle, exponent

    def error(p):
        return np.log(p[0] + p[1] * (compute / middle) ** -p[2]) - np.log(loss)

    first = [0.5 * loss.min(), start.loss(middle) - 0.5 * loss.min(), start.exponent]
    found = least_squares(error, first, bounds=([0, 1e-9, 1e-6], [loss.min(), np.inf, 10]), x_scale=np.abs(first))
    low, scale, exponent = found.x
    return PowerLaw(float(low), float(scale * middle**exponent), float(exponent))


def compute_of(row: Row) -> float:
    """FLOPs of one run of an arm."""
    config = row.results[0].run.config
    return _flops_per_step(config) * config.train.steps


@functools.lru_cache(maxsize=256)  # counting a model's parameters takes a tenth of a second, and rows come back often
def _flops_per_step(config: Config) -> float:
    return step_flops(config).model


def speed_up(law: PowerLaw, row: Row, base: Row) -> tuple[float, float]:
    """How many times row's compute, and row's time at the measured speeds, the baseline would need for its loss."""
    gain = law.compute(row.mean) / compute_of(row)
    speed = lambda r: np.mean([x.rate for x in r.results if x.status == "finished"])
    rate = lambda r: speed(r) * compute_of(r) / r.results[0].tokens
    return float(gain), float(gain * rate(row) / rate(base))


def laws(sweep: Sweep, rows: Sequence[Row]) -> dict[str, PowerLaw]:
    """The law of every arm that at least two sizes have a loss for, with a floor of 0."""
    out = {}
    for name in dict.fromkeys(row.name for row in rows if row.rung):
        points = [(compute_of(row), row.mean) for row in rows if row.name == name and row.mean is not None]
        if len(points) > 1:
            out[name] = fit_power_law(*map(np.array, zip(*points)), floor=0.0)
    return out


def ladder_table(sweep: Sweep, rows: Sequence[Row]) -> dict[str, list[str]]:
    """One line for every arm and size: law, and speed-up over the baseline's law; {} without sizes."""
    fitted = laws(sweep, rows)
    if sweep.baseline not in fitted:
        return {}
    bases = {row.rung: row for row in rows if row.name == sweep.baseline}
    table: dict[str, list[str]] = {"arm": [], "law": [], "size": [], "speed-up": [], "speed-up in time": []}
    for name, law in fitted.items():
        for row in (r for r in rows if r.name == name and r.mean is not None):
            equal, timed = speed_up(fitted[sweep.baseline], row, bases[row.rung])
            cells = (name, f"{law.scale:.3f} C^-{law.exponent:.4f}", row.rung, f"{equal:.2f}", f"{timed:.2f}")
            for column, cell in zip(table.values(), cells):
                column.append(cell)
    return table


@styled
def ladder_figure(sweep: Sweep, rows: Sequence[Row]) -> Figure | None:
    """Loss against compute, a point for each size, with the fitted laws."""
    from trillium_moe.sweep.figures import colour

    fitted = laws(sweep, rows)
    if not fitted:
        return None
    figure = Figure(figsize=WIDE)
    axes = figure.subplots()
    axes.set_title("Loss against compute")
    for i, (name, law) in enumerate(fitted.items()):
        own = [row for row in rows if row.name == name and row.mean is not None]
        at = np.array([compute_of(row) for row in own])
        axes.errorbar(at, [row.mean for row in own], [row.interval or 0 for row in own], fmt="o", color=colour(i), ms=5,
                      label=f"{name}: {law.scale:.2f} C^-{law.exponent:.3f}")
        grid = np.geomspace(at.min(), at.max())
        axes.plot(grid, law.loss(grid), color=colour(i), lw=1.2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("FLOPs of training", color=MUTED)
    axes.set_ylabel("held-out loss, nats per token", color=MUTED)
    axes.legend(fontsize=8.5)
    return figure

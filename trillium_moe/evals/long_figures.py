"""Pictures of `evals.long`: needle maps, accuracy by length, loss by position; one panel or line per stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from trillium_moe.train.figures import INK, MUTED, SIZE, WIDE, styled

Results = Mapping[str, Mapping[str, Any]]  # stage -> {"window": tokens, "cells": [...], "text": [...]}
FOUND = LinearSegmentedColormap.from_list("found", ["#b4540a", "#f2b27a", "#eef4fd", "#2f6fde", "#12306b"])
LINES = ("#9cc2f5", "#2f6fde", "#12306b", "#d9822b", "#0f9b8e", "#697586")


def short(n: int) -> str:
    """1024 -> 1K, 1048576 -> 1M."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if n >= unit:
            return f"{n / unit:g}{name}"
    return str(n)


@styled
def needle_maps(results: Results) -> Figure | None:
    """Needles found by depth and length, a panel per stage."""
    maps = {name: [c for c in r["cells"] if c["task"] == "needle" and c["depths"]] for name, r in results.items()}
    maps = {name: cells for name, cells in maps.items() if cells}
    if not maps:
        return None
    depths = sorted({d for cells in maps.values() for c in cells for d in c["depths"]})
    lengths = sorted({c["length"] for cells in maps.values() for c in cells})
    figure = Figure(figsize=(WIDE[0], 3.4))
    panels = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
    for axes, (name, cells) in zip(panels, maps.items()):
        grid = np.full((len(depths), len(lengths)), np.nan)
        for c in cells:
            for d, (n, right) in c["depths"].items():
                grid[depths.index(d), lengths.index(c["length"])] = right / n
        image = axes.imshow(grid, cmap=FOUND, vmin=0, vmax=1, aspect="auto")
        axes.set_title(f"after {name}")
        axes.grid(False)
        axes.set_xticks(range(len(lengths)), [short(n) for n in lengths])
        axes.set_yticks(range(len(depths)), depths)
        axes.set_xlabel("tokens")
        for (i, j), value in np.ndenumerate(grid):
            if not np.isnan(value):
                axes.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=7.5,
                          color="white" if value > 0.75 or value < 0.15 else INK)
    panels[0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=list(panels), label="found", shrink=0.9)
    return figure


@styled
def lifts(results: Results) -> Figure | None:
    """Accuracy by length, a panel per task, a line per stage."""
    tasks = list(dict.fromkeys(c["task"] for r in results.values() for c in r["cells"]))
    if not tasks:
        return None
    figure = Figure(figsize=(WIDE[0], 3.7 * -(-len(tasks) // 4)))
    panels = figure.subplots(-(-len(tasks) // 4), min(4, len(tasks)), sharey=True, squeeze=False).reshape(-1)
    for axes, task in zip(panels, tasks):
        for (name, r), color in zip(results.items(), LINES):
            cells = sorted((c for c in r["cells"] if c["task"] == task), key=lambda c: c["length"])
            if not cells:
                continue
            x, y, low, high, chance = np.array([[c["length"], c["accuracy"], c["low"], c["high"], c["chance"]]
                                                for c in cells]).T
            axes.fill_between(x, low, high, color=color, alpha=0.12, lw=0)
            axes.plot(x, y, color=color, marker="o", ms=4, label=f"after {name}")
            axes.plot(x, chance, color=MUTED, ls=":", lw=1)
        axes.set_title(task)
        _lengths(axes, [c["length"] for r in results.values() for c in r["cells"] if c["task"] == task])
        axes.set_ylim(-0.03, 1.03)
    panels[0].set_ylabel("answers right")
    panels[0].legend(loc="lower left")
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    return figure


@styled
def text_losses(results: Results) -> Figure | None:
    """Loss of held-out text by position, the longest text of every stage."""
    longest = {name: max(r["text"], key=lambda t: t["length"]) for name, r in results.items() if r["text"]}
    if not longest:
        return None
    figure = Figure(figsize=SIZE)
    axes = figure.subplots()
    for (name, text), color in zip(longest.items(), LINES):
        axes.plot(text["positions"], text["nll"], color=color, marker="o", ms=3.5, label=f"after {name}")
    _lengths(axes, [p for t in longest.values() for p in t["positions"]])
    axes.set(xlabel="position", ylabel="nats per token")
    axes.legend()
    return figure


def _lengths(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted(set(lengths))
    ticks = ticks[:: max(1, len(ticks) // 6)]
    axes.set_xticks(ticks, [short(n) for n in ticks])
    axes.minorticks_off()

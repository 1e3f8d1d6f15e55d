"""The report's pictures: pure functions from metrics to matplotlib figures, in one style.

Each takes what was logged so far and returns None where its metrics are missing, so partial runs get a partial report.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trillium_moe.config import Config

INK, MUTED, GRID, EMPTY = "#1c2733", "#697586", "#e6eaf0", "#f2f4f7"
BLUE, TEAL, AMBER = "#2f6fde", "#0f9b8e", "#d9822b"  # training, held-out, references
SEQUENTIAL = LinearSegmentedColormap.from_list("depth", ["#eef4fd", "#9cc2f5", "#2f6fde", "#12306b"])
DIVERGING = LinearSegmentedColormap.from_list("load", ["#1d4fa8", "#8fb7f0", "#fbfbfb", "#f2b27a", "#b4540a"])

STYLE = {
    "font.size": 9.5, "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": GRID, "axes.linewidth": 1.0,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.axisbelow": True, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.major.size": 0, "ytick.major.size": 0,
    "xtick.minor.size": 0, "ytick.minor.size": 0, "axes.titlelocation": "left", "axes.titlesize": 10.5,
    "axes.titleweight": "bold", "axes.titlepad": 10, "legend.frameon": False, "lines.linewidth": 1.8,
    "figure.facecolor": "white", "axes.facecolor": "white", "figure.constrained_layout.use": True,
}
HALO = [withStroke(linewidth=3, foreground="white")]  # keeps a label readable on a curve
SIZE, WIDE = (6.2, 3.7), (12.6, 3.9)  # inches: half and full width of the page
SHOWN = 5  # steps that a history shows side by side

Lines = Sequence[dict[str, Any]]


def styled(draw: Callable[..., Figure | None]) -> Callable[..., Figure | None]:
    """Draws in the report's style, whatever the process's rcParams."""
    @functools.wraps(draw)
    def wrapped(*args, **kw):
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "agg"} | STYLE):
            return draw(*args, **kw)
    return wrapped


@styled
def losses(lines: Lines, order0: float | None) -> Figure | None:
    """Training loss, and held-out bits per byte above the line that no model should stay above."""
    steps, loss = series(lines, "train/loss")
    if not len(steps):
        return None
    figure = Figure(figsize=WIDE)
    left, right = figure.subplots(1, 2, gridspec_kw={"wspace": 0.08})
    _title(left, "Training loss", "nats per token")
    many = len(steps) > 40
    left.plot(steps, loss, color=BLUE, alpha=0.3 if many else 1, lw=1 if many else 1.8)
    if many:
        left.plot(steps, _smooth(loss), color=BLUE)
    _end_label(left, steps[-1], (_smooth(loss) if many else loss)[-1], BLUE)
    _step_axis(left)
    # the first steps would squeeze the rest of the curve flat
    low, high = loss.min(), loss.max()
    left.set_ylim(low - 0.06 * (high - low or 1), high + 0.06 * (high - low or 1))

    _title(right, "Held-out loss", "bits per byte")
    steps, bits = series(lines, "heldout/bits_per_byte")
    if len(steps):
        right.plot(steps, bits, color=TEAL, marker="o", ms=4.5, mec="white", mew=0.8)
        _end_label(right, steps[-1], bits[-1], TEAL)
    else:
        _note(right, "no evaluation yet")
    top = max([*bits, order0 or 0.0, 1e-3])
    bottom = min([*bits, top]) * 0.92 if len(bits) else 0.0
    right.set_ylim(max(0.0, bottom), top * 1.06)
    if order0:
        _reference(right, order0, f"order-0 entropy {order0:.2f}")
    right.set_xlim(left.get_xlim())
    _step_axis(right)
    return figure


@styled
def expert_load(load_LE: np.ndarray | None, config: Config) -> Figure | None:
    """Tokens of each expert over the mean of its layer, at one step."""
    if load_LE is None:
        return None
    relative = load_LE / np.maximum(load_LE.mean(1, keepdims=True), 1e-9)
    figure = Figure(figsize=SIZE)
    axes = figure.subplots()
    _title(axes, "Expert load", "tokens of an expert / mean of its layer")
    norm = TwoSlopeNorm(1.0, 0.0, max(2.0, float(np.quantile(relative, 0.995))))
    image = axes.imshow(relative, cmap=DIVERGING, norm=norm, aspect="auto", interpolation="nearest")
    _heat_axes(axes, figure, image, relative.shape, fmt="{:.2g}×")
    _layer_ticks(axes, [i for i, kind in enumerate(config.model.ffns) if kind == "moe"])
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set(xlabel="expert", ylabel="layer")
    return figure


@styled
def load_history(loads: Sequence[tuple[int, np.ndarray]], config: Config) -> Figure | None:
    """Tokens of each expert over the mean of its layer, at up to SHOWN steps of those given as (step, load_LE)."""
    if len(loads) < 2:
        return None
    picked = [loads[i] for i in np.unique(np.linspace(0, len(loads) - 1, min(SHOWN, len(loads))).round().astype(int))]
    relative = [load / np.maximum(load.mean(1, keepdims=True), 1e-9) for _, load in picked]
    figure = Figure(figsize=WIDE)
    panels = figure.subplots(1, len(picked), sharey=True, squeeze=False)[0]
    norm = TwoSlopeNorm(1.0, 0.0, max(2.0, float(np.quantile(np.concatenate(relative), 0.995))))
    for axes, (step, _), load in zip(panels, picked, relative):
        axes.set_title(f"step {step:,}")
        image = axes.imshow(load, cmap=DIVERGING, norm=norm, aspect="auto", interpolation="nearest")
        axes.grid(False)
        axes.spines[:].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.set_xlabel("expert")
    _layer_ticks(panels[0], [i for i, kind in enumerate(config.model.ffns) if kind == "moe"])
    panels[0].set_ylabel("layer")
    bar = figure.colorbar(image, ax=panels, pad=0.01, fraction=0.03, aspect=24)
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(5)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.2g}×"))
    return figure


@styled
def routing(lines: Lines) -> Figure | None:
    """What a mean load cannot show: idle experts, how many are effectively in use, and how fast choices change."""
    if not len(series(lines, "router/min_violation")[0]):
        return None
    figure = Figure(figsize=WIDE)
    left, middle, right = figure.subplots(1, 3)
    for axes, title, unit, names in (
        (left, "Idle experts", "share of the mean load that is missing", ("router/min_violation",)),
        (middle, "Evenness and spread", "entropy / ln n; bias", ("router/entropy", "router/bias_spread")),
        (right, "Routing churn", "choices changed since the last evaluation", ("router/churn", "router/churn_worst")),
    ):
        _title(axes, title, unit)
        for name, color in zip(names, (BLUE, TEAL)):
            steps, values = series(lines, name)
            if len(steps):
                axes.plot(steps, values, color=color, label=name.removeprefix("router/").replace("_", " "))
                _end_label(axes, steps[-1], values[-1], color)
        if axes.lines:
            axes.legend(loc="best", fontsize=8.5)
        else:
            _note(axes, "no second evaluation yet")
        axes.set_ylim(bottom=0)
        _step_axis(axes)
    return figure


@styled
def balance(lines: Lines) -> Figure | None:
    """MaxVio over steps, its worst layer, and the floor that sampling sets."""
    steps, mean = series(lines, "router/max_violation")
    if not len(steps):
        return None
    figure = Figure(figsize=SIZE)
    axes = figure.subplots()
    _title(axes, "Load violation", "largest expert load / mean − 1")
    worst_steps, worst = series(lines, "router/max_violation_worst")
    if len(worst_steps):
        axes.fill_between(worst_steps, np.interp(worst_steps, steps, mean), worst, color=BLUE, alpha=0.13, lw=0)
    axes.plot(steps, mean, color=BLUE, label="mean over layers")
    floor = series(lines, "router/floor")[1]
    positive = [v for v in (*mean, *worst, *floor[-1:]) if v > 0]
    if positive:
        axes.set_yscale("log")
        axes.set_ylim(min(positive) * 0.7, max(positive) * 1.4)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axes.yaxis.set_minor_formatter(FuncFormatter(_sparse_minor(axes)))
    _end_label(axes, steps[-1], mean[-1], BLUE)
    if len(floor):
        _reference(axes, floor[-1], f"sampling floor {floor[-1]:.2f}")
    _step_axis(axes)
    return figure


@styled
def depth_attention(weights_SN: np.ndarray | None) -> Figure | None:
    """Mean softmax weight that every read of the depth gives to every candidate."""
    if weights_SN is None:
        return None
    reads, n = weights_SN.shape
    figure = Figure(figsize=SIZE)
    axes = figure.subplots()
    _title(axes, "Depth attention", "mean weight of each candidate")
    shown = np.ma.masked_less_equal(weights_SN, 0)
    axes.set_facecolor(EMPTY)
    image = axes.imshow(shown, cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    _heat_axes(axes, figure, image, shown.shape, fmt="{:.1f}")
    names = ["embedding", *(f"block {i}" for i in range(1, n - 1)), "live sum"] if n > 1 else ["live sum"]
    every = -(-n // 7)
    at = sorted({*range(0, n - 1, every), n - 1} - ({n - 2} if every > 1 else set()))
    axes.set_xticks(at, [names[i] for i in at])
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylabel("read (two per layer, in order of depth)")
    return figure


@styled
def half_lives(log_decay_LHK: np.ndarray | None, config: Config) -> Figure | None:
    """Half-life ln 2 / -g of the KDA channels, in tokens: median, quartiles and 5 to 95 percent of each layer."""
    if log_decay_LHK is None or not log_decay_LHK.size:
        return None
    tokens = np.log(2) / np.maximum(-log_decay_LHK.reshape(len(log_decay_LHK), -1), 1e-9)
    at = np.arange(len(tokens))
    figure = Figure(figsize=SIZE)
    axes = figure.subplots()
    _title(axes, "Memory of the KDA layers", "half-life of a channel, tokens")
    if tokens.size <= 4000:  # every channel, while one can still see them
        spread = np.random.default_rng(0).uniform(-0.22, 0.22, tokens.shape)
        axes.plot((at[:, None] + spread).ravel(), tokens.ravel(), ".", color=BLUE, alpha=0.22, ms=3.2, mew=0)
    for quantiles, width in (((0.05, 0.95), 1.4), ((0.25, 0.75), 6)):
        axes.vlines(at, *np.quantile(tokens, quantiles, axis=1), color=BLUE, lw=width, alpha=0.9 if width < 2 else 0.55)
    axes.plot(at, np.median(tokens, axis=1), "o", color="white", mec=INK, mew=1.4, ms=5.5)
    axes.set_yscale("log")
    axes.set_xlim(-0.6, len(tokens) - 0.4)
    low, high = tokens.min() / 1.6, max(tokens.max() * 1.6, config.data.seq_len * 1.8)
    if config.model.kda.decay == "bounded":
        shortest = np.log(2) / -config.model.kda.g_min
        low = min(low, shortest / 1.8)
        _reference(axes, shortest, f"shortest possible {shortest:.2g}", above=False)
    _reference(axes, config.data.seq_len, f"context {config.data.seq_len:,}")
    axes.set_ylim(low, high)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
    layers = [i for i, kind in enumerate(config.model.mixers) if kind == "kda"][: len(tokens)]
    every = -(-len(tokens) // 12)
    axes.set_xticks(at[::every], [str(layer) for layer in layers[::every]])
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("layer")
    return figure


@styled
def optimizer(lines: Lines, config: Config) -> Figure | None:
    """Gradient norm with the clipping threshold, above the learning rate."""
    steps, norm = series(lines, "train/grad_norm")
    if not len(steps):
        return None
    figure = Figure(figsize=SIZE)
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [2, 1]})
    _title(upper, "Gradient norm and learning rate", "before clipping")
    upper.plot(steps, norm, color=BLUE)
    _end_label(upper, steps[-1], norm[-1], BLUE)
    if config.optim.clip_norm and (norm > config.optim.clip_norm / 4).any():
        _reference(upper, config.optim.clip_norm, f"clipped above {config.optim.clip_norm:g}")
    if (norm > 0).all():
        upper.set_yscale("log")
        upper.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        upper.yaxis.set_minor_formatter(FuncFormatter(_sparse_minor(upper)))
    steps, rate = series(lines, "optim/lr")
    lower.fill_between(steps, 0, rate, color=TEAL, alpha=0.1, lw=0)
    lower.plot(steps, rate, color=TEAL)
    lower.set_ylim(0, max([*rate, 1e-9]) * 1.15)
    lower.yaxis.set_major_locator(MaxNLocator(2))
    lower.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    upper.grid(axis="x", visible=False)
    _step_axis(lower)
    return figure


@styled
def throughput(lines: Lines) -> Figure | None:
    """Training tokens per second."""
    steps, rate = series(lines, "perf/tokens_per_second")
    if not len(steps):
        return None
    figure = Figure(figsize=SIZE)
    axes = figure.subplots()
    _title(axes, "Throughput", "training tokens per second")
    axes.fill_between(steps, 0, rate, color=BLUE, alpha=0.1, lw=0)
    axes.plot(steps, rate, color=BLUE)
    _reference(axes, float(np.median(rate)), f"median {np.median(rate):,.0f}", above=False)
    axes.set_ylim(0, rate.max() * 1.18)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    _step_axis(axes)
    return figure


def series(lines: Lines, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of the lines that hold a metric."""
    pairs = [(line["step"], line[name]) for line in lines if name in line]
    return np.array([s for s, _ in pairs], float), np.array([v for _, v in pairs], float)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a triangle of neighbours on both sides, cut off at the ends: smooth, and never late."""
    half = 1 + min(10, len(values) // 25)
    weights = half - np.abs(np.arange(1 - half, half))
    return np.convolve(values, weights, "same") / np.convolve(np.ones(len(values)), weights, "same")


def _title(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title)
    axes.annotate(unit, (1, 1), xycoords="axes fraction", xytext=(0, 10), textcoords="offset points", ha="right",
                  va="bottom", color=MUTED, fontsize=8.5, annotation_clip=False)


def _step_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axes.set_xlabel("step")
    axes.grid(axis="x", visible=False)
    axes.margins(x=0.02)


def _end_label(axes: Axes, x: int | float, y: float, color: str) -> None:
    """The last value, at the end of its curve."""
    axes.plot([x], [y], "o", color=color, ms=5, mec="white", mew=1, zorder=5, clip_on=False)
    axes.annotate(f"{y:.3g}" if y < 1 else f"{y:.2f}", (x, y), xytext=(0, 7), textcoords="offset points", ha="right",
                  color=color, weight="bold", fontsize=9.5, annotation_clip=False, path_effects=HALO, zorder=6)


def _reference(axes: Axes, y: int | float, text: str, above: bool = True) -> None:
    """A dashed line with its name on it."""
    axes.axhline(y, color=AMBER, lw=1.2, ls=(0, (4, 3)), zorder=1.5)
    axes.annotate(text, (0.015, y), xycoords=("axes fraction", "data"), xytext=(0, 3 if above else -3),
                  textcoords="offset points", va="bottom" if above else "top", color=AMBER, fontsize=8.5,
                  path_effects=HALO)


def _note(axes: Axes, text: str) -> None:
    axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", color=MUTED)


def _heat_axes(axes: Axes, figure: Figure, image: Any, shape: tuple[int, int], fmt: str) -> None:
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if max(shape) <= 40:  # hairlines between the cells
        axes.set_xticks(np.arange(-0.5, shape[1]), minor=True)
        axes.set_yticks(np.arange(-0.5, shape[0]), minor=True)
        axes.grid(which="minor", color="white", lw=1.2)
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=24)
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(5)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: fmt.format(v)))


def _layer_ticks(axes: Axes, layers: Sequence[int]) -> None:
    every = -(-len(layers) // 12) if layers else 1
    axes.set_yticks(range(0, len(layers), every), [str(layer) for layer in layers[::every]])


def _sparse_minor(axes: Axes) -> Callable[[float, Any], str]:
    """Labels 2 and 5 between the decades of an axis that spans less than two."""
    def label(value, _):
        low, high = axes.get_ylim()
        first = round(value / 10 ** np.floor(np.log10(value)))
        return f"{value:g}" if high / low < 100 and first in (2, 5) else ""
    return label

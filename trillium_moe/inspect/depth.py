"""Depth: what attention residuals read, how large each sublayer's output is, and where the gradient goes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from trillium_moe.infer.generate import LoadedModel
from trillium_moe.inspect.walk import sublayers
from trillium_moe.model.stack import Schedule
from trillium_moe.train import figures
from trillium_moe.train.step import value_and_grad


class Depth(NamedTuple):
    """Of every sublayer, in order."""

    kinds: tuple[str, ...]
    read_SN: np.ndarray  # mean weight of every candidate: embedding, sealed blocks, live sum last; zeros without reads
    output_S: np.ndarray  # root mean square of its output


def depth(model: LoadedModel, tokens_BT: np.ndarray, segment_ids_BT: np.ndarray | None = None) -> Depth:
    """Reads and output norms on some text."""
    found = list(sublayers(model, tokens_BT, segment_ids_BT))
    rms = [float(jnp.sqrt(jnp.mean(jnp.square(sub.y_BTD.astype(jnp.float32))))) for sub in found]
    return Depth(tuple(sub.kind for sub in found), np.array([sub.read_N for sub in found]), np.array(rms))


def gradient_norms(model: LoadedModel, batch: dict[str, np.ndarray]) -> tuple[tuple[str, ...], np.ndarray]:
    """(kinds, norm of the loss gradient over all parameters) of every sublayer, for one batch of the pipeline."""
    run = jax.jit(value_and_grad(model.config.model, 1))
    gradients = run(model.params, model.router_bias, jax.tree.map(jnp.asarray, batch))[1]
    schedule = Schedule.of(model.config.model)
    kinds = tuple(schedule.kinds[k] for k in schedule.kind)
    squares = {kind: sum(np.square(np.asarray(g, np.float64)).reshape(len(g), -1).sum(1)
                         for g in jax.tree.leaves(gradients[kind])) for kind in schedule.kinds}
    return kinds, np.sqrt([squares[kind][i] for kind, i in zip(kinds, schedule.index)])


def plot_reads(data: Depth) -> Figure:
    """Heat map of the weights."""
    return figures.depth_attention(data.read_SN)


@figures.styled
def plot_by_depth(kinds: tuple[str, ...], values_S: np.ndarray, title: str) -> Figure:
    """One number per sublayer, coloured by kind."""
    figure = Figure(figsize=figures.WIDE)
    axes = figure.subplots()
    axes.set_title(title)
    colours = dict(zip(dict.fromkeys(kinds), (figures.BLUE, figures.TEAL, figures.AMBER, figures.MUTED)))
    axes.plot(values_S, color=figures.GRID, zorder=1)
    for kind, colour in colours.items():
        at = [s for s, k in enumerate(kinds) if k == kind]
        axes.plot(at, values_S[at], "o", color=colour, label=kind)
    axes.set_xlabel("sublayer (two a layer)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8.5, ncol=len(colours))
    return figure

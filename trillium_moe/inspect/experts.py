"""What the router does: loads, which experts go together, which go with a domain, and how fast that changes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pallas_kernels.router import router as route
from trillium_moe.evals.churn import overlap
from trillium_moe.infer.generate import LoadedModel
from trillium_moe.inspect.walk import of_kind
from trillium_moe.shapes import Float, Int
from trillium_moe.train import figures


def choices(
    model: LoadedModel, tokens_BT: np.ndarray, segment_ids_BT: np.ndarray | None = None
) -> Int[np.ndarray, "L M k"]:
    """Experts of every token (rows one after the other) in every MoE layer, best first."""
    c, out = model.config.model.moe, []
    for sub in of_kind(model, "moe", tokens_BT, segment_ids_BT):
        scores = sub.module.scores(sub.x_BTD).reshape(-1, c.n_experts)
        out.append(np.asarray(route(jnp.asarray(scores), sub.module.bias[...], k=c.k).experts_MK))
    return np.array(out)


def load(experts_LMK: Int[np.ndarray, "L M k"], n_experts: int) -> Float[np.ndarray, "L E"]:
    """Tokens of an expert over the mean of its layer."""
    counts = np.array([np.bincount(layer.ravel(), minlength=n_experts) for layer in experts_LMK], float)
    return counts / counts.mean(1, keepdims=True)


def co_activation(experts_LMK: Int[np.ndarray, "L M k"], n_experts: int) -> Float[np.ndarray, "L E E"]:
    """P(i and j) / (P(i) P(j)) of two experts for one token; 1: independent. nan on the diagonal and for idle ones."""
    out = []
    for layer in experts_LMK:
        chosen = np.zeros((len(layer), n_experts))
        np.put_along_axis(chosen, layer, 1, axis=1)
        share = chosen.mean(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            lift = (chosen.T @ chosen / len(layer)) / np.outer(share, share)
        np.fill_diagonal(lift, np.nan)
        out.append(lift)
    return np.array(out)


def mutual_information(
    experts_LMK: Int[np.ndarray, "L M k"], domain_M: Int[np.ndarray, " M"], n_experts: int
) -> Float[np.ndarray, " L"]:
    """I(expert; domain) in bits for every layer, of one of a token's k experts drawn at random.

    The plug-in estimate, less its bias for independent variables: (E-1)(D-1) / (2 N ln 2) for N choices (Miller, 1955).
    """
    D, k = int(domain_M.max()) + 1, experts_LMK.shape[2]
    out = []
    for layer in experts_LMK:
        joint = np.bincount(layer.ravel() * D + np.repeat(domain_M, k), minlength=n_experts * D).reshape(n_experts, D)
        p = joint / joint.sum()
        independent = p.sum(1, keepdims=True) * p.sum(0, keepdims=True)
        seen = p > 0
        bits = np.sum(p[seen] * np.log2(p[seen] / independent[seen]))
        bias = ((p.sum(1) > 0).sum() - 1) * ((p.sum(0) > 0).sum() - 1) / (2 * joint.sum() * np.log(2))
        out.append(bits - bias)
    return np.array(out)


def churn(before_LMK: Int[np.ndarray, "L M k"], after_LMK: Int[np.ndarray, "L M k"]) -> Float[np.ndarray, " L"]:
    """Share of choices for the same tokens that differ, say between two checkpoints."""
    return 1 - overlap(before_LMK, after_LMK)


def plot_load(model: LoadedModel, load_LE: Float[np.ndarray, "L E"]) -> Figure:
    """Heat map, a row per MoE layer."""
    return figures.expert_load(load_LE, model.config)


@figures.styled
def plot_co_activation(lift_LEE: Float[np.ndarray, "L E E"], layer: int) -> Figure:
    """Which experts of one layer go together (orange) and avoid one another (blue)."""
    figure = Figure(figsize=(5.2, 4.3))
    axes = figure.subplots()
    axes.set_title(f"Co-activation, MoE layer {layer}")
    with np.errstate(divide="ignore"):
        shown = np.ma.masked_invalid(np.log2(lift_LEE[layer]))
    image = axes.imshow(shown, cmap=figures.DIVERGING, vmin=-3, vmax=3, interpolation="nearest")
    axes.grid(False)
    bar = figure.colorbar(image, ax=axes, ticks=(-3, 0, 3))
    bar.ax.set_yticklabels(["8 times less", "as by chance", "8 times more"])
    axes.set(xlabel="expert", ylabel="expert")
    return figure


@figures.styled
def plot_by_layer(values_L: Float[np.ndarray, " L"], title: str) -> Figure:
    """One number per MoE layer: mutual information in bits, or churn."""
    figure = Figure(figsize=figures.SIZE)
    axes = figure.subplots()
    axes.set_title(title)
    axes.bar(range(len(values_L)), values_L, color=figures.BLUE, width=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("MoE layer")
    axes.axhline(0, color=figures.MUTED, lw=1)
    axes.grid(axis="x", visible=False)
    return figure

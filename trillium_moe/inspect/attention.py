"""MLA: how wide each head looks, and how much of what it takes comes from a given span."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from trillium_moe.infer.generate import LoadedModel
from trillium_moe.inspect.walk import of_kind
from trillium_moe.model.mla import MLA, positions
from trillium_moe.model.params import wide
from trillium_moe.shapes import Array, Float
from trillium_moe.train import figures


def probabilities(module: MLA, x_BTD: Array, segment_ids_BT: Array | None = None) -> Float[Array, "B H T S"]:
    """Softmax weights of every query over keys, all T^2 of them: for short texts."""
    c, (B, T, _) = module.config.mla, x_BTD.shape
    ids = jnp.zeros((B, T), jnp.int32) if segment_ids_BT is None else segment_ids_BT
    at = positions(ids) if c.position == "rope" else None
    latent, shared = module.latents(x_BTD, at)
    q = module.queries(x_BTD, at)
    k = jnp.einsum("bsr,rhk->bshk", latent, module.k_up.astype(latent.dtype))
    k = jnp.concatenate([k, jnp.broadcast_to(shared[:, :, None], (*k.shape[:3], c.rope_dim))], -1)
    scores = jnp.einsum("bthk,bshk->bhts", wide(q), wide(k)) * module.scale
    visible = jnp.tril(jnp.ones((T, T), bool)) & (ids[:, :, None] == ids[:, None, :])
    return jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)


def entropy(
    model: LoadedModel, tokens_BT: np.ndarray, segment_ids_BT: np.ndarray | None = None
) -> Float[np.ndarray, "L H T"]:
    """Entropy in bits of each head's weights at every position, mean over rows. 2^entropy tokens are looked at."""
    out, ids = [], None if segment_ids_BT is None else jnp.asarray(segment_ids_BT)
    for sub in of_kind(model, "mla", tokens_BT, segment_ids_BT):
        p = probabilities(sub.module, sub.x_BTD, ids)
        out.append(np.asarray(-jnp.sum(p * jnp.log2(jnp.where(p > 0, p, 1)), -1).mean(0)))
    return np.array(out)


def attribution(
    model: LoadedModel, tokens_BT: np.ndarray, queries: slice, span: slice, segment_ids_BT: np.ndarray | None = None
) -> Float[np.ndarray, "L H"]:
    """Share of the attention of the `queries` (positions) that goes to `span` (of a needle, say), mean over rows."""
    out, ids = [], None if segment_ids_BT is None else jnp.asarray(segment_ids_BT)
    for sub in of_kind(model, "mla", tokens_BT, segment_ids_BT):
        p = probabilities(sub.module, sub.x_BTD, ids)
        out.append(np.asarray(p[:, :, queries, span].sum(-1).mean((0, 2))))
    return np.array(out)


@figures.styled
def plot_entropy(bits_LHT: Float[np.ndarray, "L H T"]) -> Figure:
    """Tokens looked at, 2^entropy, by position; the line is attention to everything so far."""
    figure = Figure(figsize=figures.SIZE)
    axes = figure.subplots()
    axes.set_title("Attention of the MLA heads")
    at = np.arange(1, bits_LHT.shape[2] + 1)
    axes.plot(at, at, color=figures.AMBER, ls=(0, (4, 3)), lw=1.2, zorder=3,
              label="all that can be seen")
    for i, heads in enumerate(bits_LHT):
        shade = figures.SEQUENTIAL(0.3 + 0.7 * i / max(1, len(bits_LHT) - 1))
        for h, row in enumerate(heads):
            axes.plot(at, 2**row, color=shade, lw=1.2, label=f"MLA layer {i}" if h == 0 else None)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="position", ylabel="tokens looked at, 2^entropy")
    axes.legend(fontsize=8.5)
    return figure


@figures.styled
def plot_attribution(share_LH: Float[np.ndarray, "L H"], title: str = "Attention to the span") -> Figure:
    """Heat map, a row per MLA layer."""
    figure = Figure(figsize=(4.6, 3.4))
    axes = figure.subplots()
    axes.set_title(title)
    image = axes.imshow(share_LH, cmap=figures.SEQUENTIAL, vmin=0, vmax=max(0.05, float(share_LH.max())), aspect="auto")
    axes.set_xticks(range(share_LH.shape[1]))
    axes.set_yticks(range(share_LH.shape[0]))
    axes.grid(False)
    axes.set(xlabel="head", ylabel="MLA layer")
    figure.colorbar(image, ax=axes, format="{x:.2f}")
    return figure

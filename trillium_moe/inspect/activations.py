"""How large activations get: the gate and the linear part before the activation, and their product after it."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pallas_kernels.router import router as route
from trillium_moe.infer.generate import LoadedModel
from trillium_moe.inspect.walk import Sublayer, sublayers
from trillium_moe.model.ffn import DenseFFN, activate
from trillium_moe.model.params import linear
from trillium_moe.train import figures


class Maxima(NamedTuple):
    """Largest absolute value of every FFN, by layer: of the dense FFN, or of shared and routed experts together."""

    gate_L: np.ndarray
    up_L: np.ndarray
    after_L: np.ndarray  # act(gate) * up: with SiTU at most beta * linear_beta


def maxima(model: LoadedModel, tokens_BT: np.ndarray, segment_ids_BT: np.ndarray | None = None) -> Maxima:
    """On some text. Routed experts are computed for all tokens and counted for their own: for short texts."""
    rows = [_ffn(model, sub) for sub in sublayers(model, tokens_BT, segment_ids_BT) if sub.kind in ("dense", "moe")]
    return Maxima(*np.array(rows, float).T)


def _ffn(model: LoadedModel, sub: Sublayer) -> tuple[float, ...]:
    config = model.config.model
    if sub.kind == "dense":
        return _largest(config, *_dense(sub.module, sub.x_BTD))
    c, module = config.moe, sub.module
    x_MD = sub.x_BTD.reshape(-1, config.d_model)
    z_MR = linear(x_MD, module.down) if c.latent_dim else x_MD
    experts_MK = route(module.scores(x_MD), module.bias[...], k=c.k).experts_MK
    chosen_ME = jnp.zeros((len(x_MD), c.n_experts), bool).at[jnp.arange(len(x_MD))[:, None], experts_MK].set(True)
    own = lambda w: jnp.where(chosen_ME[..., None], jnp.einsum("mr,erf->mef", z_MR, w.astype(z_MR.dtype)), 0)
    routed = _largest(config, own(module.w_gate), own(module.w_up))
    shared = _largest(config, *_dense(module.shared, x_MD)) if c.n_shared else (0.0,) * 3
    return tuple(max(pair) for pair in zip(routed, shared))


def _dense(module: DenseFFN, x):
    return linear(x, module.gate), linear(x, module.up)


def _largest(config, gate, up) -> tuple[float, ...]:
    return tuple(float(jnp.abs(x).max()) for x in (gate, up, activate(config, gate, up)))


@figures.styled
def plot_maxima(data: Maxima, bound: float | None = None) -> Figure:
    """By layer, on a log axis; `bound` is drawn: SiTU's cap, beta * linear_beta."""
    figure = Figure(figsize=figures.SIZE)
    axes = figure.subplots()
    axes.set_title("Largest activations")
    for values, name, colour in ((data.gate_L, "gate", figures.BLUE), (data.up_L, "linear part", figures.TEAL),
                                 (data.after_L, "after the activation", figures.INK)):
        axes.plot(values, "o-", color=colour, ms=4, label=name)
    if bound is not None:
        axes.axhline(bound, color=figures.AMBER, ls=(0, (4, 3)), lw=1.2, label=f"bound {bound:g}")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer")
    axes.legend(fontsize=8.5)
    return figure

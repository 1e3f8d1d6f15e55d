"""What KDA remembers: how long each channel keeps it, how strongly it writes, how full its state gets."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from pallas_kernels.kda import unit
from pallas_kernels.kda_decode.step import advance
from trillium_moe.infer.generate import LoadedModel
from trillium_moe.inspect.walk import of_kind
from trillium_moe.model.conv import short_conv
from trillium_moe.model.kda import KDA
from trillium_moe.model.params import linear, wide
from trillium_moe.shapes import Array
from trillium_moe.train import figures


class Memory(NamedTuple):
    """Of every KDA layer, means over the tokens given."""

    log_decay_LHK: np.ndarray  # nats per token
    write_LH: np.ndarray  # beta, the share of the old value that a write replaces, in (0, 1)

    @property
    def half_life_LHK(self) -> np.ndarray:
        """Tokens after which half of what was written is left."""
        return np.log(2) / np.maximum(-self.log_decay_LHK, 1e-9)


class StateCurve(NamedTuple):
    """KDA's states along a document, mean over rows."""

    position_N: np.ndarray  # tokens read
    norm_LHN: np.ndarray  # Frobenius norm
    rank_LHN: np.ndarray  # e^entropy of the singular values as shares: how many directions are in use, at most K


def memory(model: LoadedModel, tokens_BT: np.ndarray, segment_ids_BT: np.ndarray | None = None) -> Memory:
    """Half-lives and write strength on some text."""
    decay, write = [], []
    for sub in of_kind(model, "kda", tokens_BT, segment_ids_BT):
        decay.append(sub.module.log_decay(sub.module.decay_logits(sub.x_BTD)).mean((0, 1)))
        write.append(jax.nn.sigmoid(wide(linear(sub.x_BTD, sub.module.beta))).mean((0, 1)))
    return Memory(np.array(decay), np.array(write))


def inputs(module: KDA, x_BTD: Array, segment_ids_BT: Array | None = None) -> tuple[Array, ...]:
    """q, k, v, g, beta as the layer gives them to the recurrence."""
    c = module.config.kda

    def qkv(name):
        y = jnp.einsum("btd,dhk->bthk", x_BTD, getattr(module, name).astype(x_BTD.dtype))
        return jax.nn.silu(short_conv(y, getattr(module, f"{name}_conv")[...], segment_ids_BT) if c.conv_size else y)

    beta = jax.nn.sigmoid(wide(linear(x_BTD, module.beta)))
    return unit(qkv("q")), unit(qkv("k")), qkv("v"), module.log_decay(module.decay_logits(x_BTD)), beta


@jax.jit
def states(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH) -> tuple[Array, Array]:
    """The recurrence token by token: outputs [B, T, H, V], and the state after every token [T, B, H, K, V]."""
    B, _, H, K = q_BTHK.shape

    def step(state, token):
        q, k, v, g, beta = map(wide, token)
        o, state = advance(state, K**-0.5 * q, k, v, jnp.exp(g), beta[..., None])
        return state, (o.astype(v_BTHV.dtype), state)

    over_time = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH))
    _, (o, all_states) = jax.lax.scan(step, jnp.zeros((B, H, K, v_BTHV.shape[-1])), over_time)
    return jnp.moveaxis(o, 0, 1), all_states


def state_curve(model: LoadedModel, tokens_BT: np.ndarray, every: int = 16) -> StateCurve:
    """Norm and effective rank of the states after each `every` tokens; every row is one document."""
    norms, ranks = [], []
    at = np.arange(every - 1, tokens_BT.shape[1], every)
    for sub in of_kind(model, "kda", tokens_BT):
        states_NBHKV = np.asarray(states(*inputs(sub.module, sub.x_BTD))[1][at])
        values = np.linalg.svd(states_NBHKV, compute_uv=False)
        share = values / np.maximum(values.sum(-1, keepdims=True), 1e-30)
        entropy = -np.sum(share * np.log(np.where(share > 0, share, 1)), -1)
        norms.append(np.sqrt((values**2).sum(-1)).mean(1).T)
        ranks.append(np.exp(entropy).mean(1).T)
    return StateCurve(at + 1, np.array(norms), np.array(ranks))


def plot_memory(model: LoadedModel, data: Memory) -> Figure:
    """Half-lives of all channels, layer by layer."""
    return figures.half_lives(data.log_decay_LHK, model.config)


@figures.styled
def plot_states(data: StateCurve) -> Figure:
    """State norm and effective rank along the document, mean over heads; deep layers dark."""
    figure = Figure(figsize=figures.WIDE)
    left, right = figure.subplots(1, 2)
    for axes, values, title in ((left, data.norm_LHN, "Norm of the state"), (right, data.rank_LHN, "Effective rank")):
        axes.set_title(title)
        for i, row in enumerate(values.mean(1)):
            shade = figures.SEQUENTIAL(0.25 + 0.75 * i / max(1, len(values) - 1))
            axes.plot(data.position_N, row, color=shade, label=f"KDA layer {i}" if i in (0, len(values) - 1) else None)
        axes.set_xlabel("tokens read")
        axes.set_ylim(bottom=0)
    right.legend(fontsize=8.5)
    return figure

"""The model run one sublayer at a time, outside of any jit: what goes in, what comes out, and the layer's own weights.

The same functions as in training, one compiled body per kind of layer; a test holds the result to the model's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trillium_moe.config import ModelConfig
from trillium_moe.infer.generate import LoadedModel
from trillium_moe.model.context import Context
from trillium_moe.model.params import RouterBias, layer, wide
from trillium_moe.model.stack import Schedule, Stack
from trillium_moe.model.trillium import Trillium
from trillium_moe.shapes import Array
from trillium_moe.train.state import model_def


class Sublayer(NamedTuple):
    """Sublayer `index` (two a layer: mixer, FFN) and what passed through it."""

    index: int
    kind: str  # kda, mla, dense, moe
    module: nnx.Module
    x_BTD: Array  # its normed input
    y_BTD: Array  # its output, added to the live sum
    aux: dict  # its statistics
    read_N: np.ndarray  # mean weight of every depth candidate in what it reads, the live sum last; zeros without reads


def trained(model: LoadedModel) -> Trillium:
    """The module itself, with its weights in place."""
    return nnx.merge(model_def(model.config.model)[0], model.params, model.router_bias)


def sublayers(
    model: LoadedModel, tokens_BT: np.ndarray, segment_ids_BT: np.ndarray | None = None
) -> Iterator[Sublayer]:
    """Runs the model on rows of tokens, yielding every sublayer in order."""
    config, whole = model.config.model, trained(model)
    schedule = Schedule.of(config)
    stack, U = Stack(schedule, [], config.norm_eps), schedule.block
    ids = None if segment_ids_BT is None else jnp.asarray(segment_ids_BT)
    states = {kind: nnx.split(getattr(whole, kind), nnx.Param, RouterBias) for kind in schedule.kinds}
    query = wide(whole.read_norm[...]) * wide(whole.read_query[...]) if schedule.reads else whole.sublayer_norm[...]
    live, sealed = whole.embedding(jnp.asarray(tokens_BT)), []
    for s in range(schedule.n_sublayers):
        if s % U == 0:
            sealed.append(live)
            live = jnp.zeros_like(live) if schedule.reads else live
        x, read = stack.input_of(whole.sublayer_norm[s], query[s], jnp.stack(sealed), s // U, live, s % U > 0)
        kind, i = schedule.kinds[schedule.kind[s]], schedule.index[s]
        graphdef, params, bias = states[kind]
        params, bias = layer(params, i), layer(bias, i)
        y, aux = _run(config, kind)(params, bias, x, ids)
        weights = np.zeros(schedule.n_blocks + 1, np.float32)
        if schedule.reads:
            weights[: len(sealed)], weights[-1] = read[:-1], read[-1]
        yield Sublayer(s, kind, nnx.merge(graphdef, params, bias), x, y, aux, weights)
        live = live + y


@functools.lru_cache(maxsize=16)
def _run(config: ModelConfig, kind: str):
    """A layer of a kind, compiled once for all its layers."""
    graphdef = None

    @jax.jit
    def run(params, bias, x_BTD, ids_BT):
        return nnx.merge(graphdef, params, bias)(x_BTD, Context(ids_BT))

    whole = nnx.merge(*model_def(config))
    graphdef = nnx.split(getattr(whole, kind), nnx.Param, RouterBias)[0]
    return run


def of_kind(model: LoadedModel, kind: str, tokens_BT: np.ndarray, segment_ids_BT: np.ndarray | None = None
            ) -> Iterator[Sublayer]:
    """The sublayers of one kind."""
    return (sub for sub in sublayers(model, tokens_BT, segment_ids_BT) if sub.kind == kind)

"""Everything a train step carries, described before any of it is allocated."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from trillium_moe.config import Config, ModelConfig, check
from trillium_moe.model.params import RouterBias
from trillium_moe.model.trillium import Trillium
from trillium_moe.optim import make_optimizer
from trillium_moe.shapes import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """A pytree, of arrays or of whatever stands for them (shapes, shardings), so its fields carry no array types.

    step: int32 scalar, optimizer steps done.
    params: the `nnx.Param`s of the model.
    router_bias: the balancing bias the next step routes with.
    opt_state: see `trillium_moe.optim.make_optimizer`.
    """

    step: Any
    params: Any
    router_bias: Any
    opt_state: Any


def new_model(config: ModelConfig, key: Array) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """A freshly initialised model as (graphdef, parameters, router bias)."""
    return nnx.split(Trillium(config, rngs=nnx.Rngs(params=key)), nnx.Param, RouterBias)


@functools.cache
def model_def(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """Graphdef, and parameters and router bias as shapes with metadata; nothing is allocated."""
    graphdef = None

    def init():
        nonlocal graphdef
        graphdef, params, bias = new_model(config, jax.random.key(0))
        return params, bias

    params, bias = jax.eval_shape(init)
    return graphdef, params, bias


@functools.cache
def abstract_state(config: Config) -> TrainState:
    """`init_state` as shapes with metadata."""
    return jax.eval_shape(lambda: init_state(config))


def optimizer(config: Config) -> optax.GradientTransformation:
    """The optimizer of the run. Raises ConfigError for weights that no optimizer can change."""
    check(config.model.moe.experts_format == "dense", "model.moe.experts_format", config.model.moe.experts_format,
          "packed experts cannot be trained; train dense ones, with model.moe.quantise='mxfp4'")
    return make_optimizer(config.optim, config.train.steps, model_def(config.model)[1])


def init_state(config: Config, key: Array | None = None) -> TrainState:
    """The state before the first step, a pure function of config.seed. Call it under `jax.jit` or `jax.eval_shape`.

    Args:
      key: `jax.random.key(config.seed)`, as an argument of the program that is then compiled for every seed.
    """
    key = jax.random.key(config.seed) if key is None else key
    _, params, bias = new_model(config.model, jax.random.fold_in(key, 0))
    return TrainState(jnp.zeros((), jnp.int32), params, bias, optimizer(config).init(params))

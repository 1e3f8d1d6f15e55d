"""Small models for tests, with parameters from numpy: compiling jax.random for every shape takes longer than a test."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trillium_moe.config import Config, ModelConfig
from trillium_moe.train.state import TrainState, model_def, optimizer


def random_variables(config: ModelConfig, *, seed: int = 0, std: float = 0.02, noise: float = 0.0):
    """(graphdef, params, router bias): norms one, queries and biases zero, the rest N(0, std^2); noise on top."""
    graphdef, params, bias = model_def(config)
    rng = np.random.default_rng(seed)

    def fill(path, variable):
        name, shape = path[-1], variable.shape
        value = rng.normal(size=shape) * std
        if name.endswith("norm"):
            value = np.ones(shape)
        elif name in ("read_query", "a_log", "bias"):
            value = np.zeros(shape)
        elif name == "dt_bias":
            value = np.full(shape, -4.6)
        return variable.replace(jnp.asarray(value + noise * rng.normal(size=shape), variable.dtype))

    filled = [nnx.from_flat_state([(p, fill(p, v)) for p, v in nnx.to_flat_state(s)]) for s in (params, bias)]
    return graphdef, *filled


def random_state(config: Config, **kw) -> TrainState:
    """The state before the first step, from `random_variables`."""
    _, params, bias = random_variables(config.model, **kw)
    return TrainState(jnp.zeros((), jnp.int32), params, bias, optimizer(config).init(params))


def abstract_zeros(tree):
    """Zeros for the shapes of a tree."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)

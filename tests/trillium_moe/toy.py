"""A linear regression for `fit`: a whole train state, a step and resumable data in forty lines."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trillium_moe.train.loop import Task


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ToyState:
    step: jax.Array
    params: nnx.State
    opt_state: optax.OptState


class ToyBatches:
    """Batch i is a pure function of i; 'poison' makes that batch's loss nan."""

    def __init__(self, poison: int | None = None):
        self.i, self.poison = 0, poison

    def __iter__(self):
        return self

    def __next__(self):
        x = np.random.default_rng(self.i).normal(size=(8, 4)).astype(np.float32)
        if self.i == self.poison:
            x[0, 0] = np.nan
        self.i += 1
        return {"x": x, "y": x.sum(-1, keepdims=True)}

    def get_state(self):
        return {"i": self.i}

    def set_state(self, state):
        self.i = state["i"]


def toy_task(poison: int | None = None, on_step=lambda i: None) -> Task:
    tx = optax.adam(1e-2)
    graphdef = None

    def init():
        nonlocal graphdef
        graphdef, params = nnx.split(nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
        return ToyState(jnp.int32(0), params, tx.init(params))

    def loss_fn(params, batch):
        return jnp.mean((nnx.merge(graphdef, params)(batch["x"]) - batch["y"]) ** 2)

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        metrics = {"train/loss": loss, "train/grad_norm": optax.global_norm(grads),
                   "router/load_LE": jnp.arange(6).reshape(2, 3)}
        return ToyState(state.step + 1, optax.apply_updates(state.params, updates), opt_state), metrics

    jitted = jax.jit(step, donate_argnums=0)

    def observed_step(state, batch):
        on_step(int(state.step))
        return jitted(state, batch)

    held = next(ToyBatches())
    evaluate = lambda state: {"heldout/bits_per_byte": float(loss_fn(state.params, held))}
    return Task(init, observed_step, ToyBatches(poison), evaluate, tokens_per_step=8)

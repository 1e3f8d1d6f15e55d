"""The optimizer: per-head Muon for matrices, AdamW for the rest, with one learning rate and weight decay."""

import optax
from flax import nnx
from jax.typing import DTypeLike

from trillium_moe.config import OptimConfig
from trillium_moe.optim.muon import scale_by_muon
from trillium_moe.optim.partition import decay_mask, labels
from trillium_moe.train.schedule import make_schedule


def make_optimizer(config: OptimConfig, steps: int, params: nnx.State) -> optax.GradientTransformation:
    """The optimizer of a run of `steps` steps.

    Each step clips gradients to a global norm, makes Muon or Adam updates u and W = W (1 - lr wd) - lr u.

    The state is a pytree of arrays only, all moments with the shape and dtype of their parameter:
      state["direction"].inner_states["muon"].inner_state.momentum         State of the Muon parameters
      state["direction"].inner_states["adamw"].inner_state.{count,mu,nu}   step count, States of the others
      state["learning_rate"].count                                         step count of the schedule
    In those States an `optax.MaskedNode()` without leaves stands for each parameter of the other group; the
    variables keep the metadata of their parameters, so that sharding rules read the same axes.

    Args:
      params: `nnx.Param` variables made by `trillium_moe.model.params.param`. Only metadata is read, so those
        of `jax.eval_shape` will do. `update` takes gradients and parameters as States of the same structure.
    """
    return muon_adamw(config, make_schedule(config, steps), params)


def muon_adamw(
    config: OptimConfig,
    learning_rate: optax.ScalarOrSchedule,
    params: nnx.State,
    ns_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
    """`make_optimizer` with a learning rate or schedule of its own.

    Args:
      ns_dtype: dtype of the Newton-Schulz iteration, see `trillium_moe.optim.muon.newton_schulz`.
    """
    directions = {
        "muon": scale_by_muon(config.momentum, config.nesterov, config.ns_steps, config.update_rms,
                              config.per_head, ns_dtype),
        "adamw": optax.scale_by_adam(config.beta1, config.beta2, config.eps),
    }
    return optax.named_chain(
        ("clip", optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()),
        ("direction", optax.partition(directions, labels(params, config))),
        ("decay", optax.add_decayed_weights(config.weight_decay, decay_mask(params))),
        ("learning_rate", optax.scale_by_learning_rate(learning_rate)),
    )

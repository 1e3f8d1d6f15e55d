"""A policy-gradient update: gradients of any number of micro-batches of one shape, then the optimizer, once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from trillium_moe.config import Config, ModelConfig
from trillium_moe.model.context import Context
from trillium_moe.model.params import wide
from trillium_moe.parallel.expert import reduce_stats
from trillium_moe.rl.batch import PER_ROW
from trillium_moe.rl.config import ObjectiveConfig
from trillium_moe.rl.objectives import Tokens, divergence, loss
from trillium_moe.shapes import Array, Float, PyTree
from trillium_moe.train.state import TrainState, model_def, optimizer
from trillium_moe.train.step import REDUCE, balance, by_name, clip_logits, summarise

Batch = dict[str, Array]


def token_logprobs(
    model: nnx.Module, batch: Batch
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], dict]:
    """Log-probability of every target, the entropy of the distribution it was drawn from (nats), and aux."""
    h, aux = model.hidden(batch["tokens"], Context(batch["segment_ids"]))

    @jax.checkpoint  # logits [B,T,V] are formed again in the backward
    def head(h):
        logp = jax.nn.log_softmax(wide(model.logits(h)), -1)
        return jnp.take_along_axis(logp, batch["targets"][..., None], -1)[..., 0], -jnp.sum(jnp.exp(logp) * logp, -1)

    return *head(h), aux


@functools.partial(jax.jit, static_argnums=0)
def logprobs(model: ModelConfig, params: PyTree, router_bias: PyTree, batch: Batch) -> Float[Array, "B T"]:
    """Log-probability of every target: of a teacher, or of the policy that RL began with."""
    return token_logprobs(nnx.merge(model_def(model)[0], params, router_bias), batch)[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def gradient(
    model: ModelConfig, c: ObjectiveConfig, distill: float, params: PyTree, router_bias: PyTree, batch: Batch,
    imitate: bool | Array = False,
) -> tuple[PyTree, tuple[dict, dict]]:
    """Gradients of the loss of a micro-batch, sums for the metrics, and aux.

    Args:
      distill: with batch["teacher"]: advantages are clip(teacher - policy, -distill, distill), log-probabilities of
        the sampled token (K3, Eq. 15). 0: batch["advantage"].
      batch: with c.kl also "reference" [B,T], log-probabilities, and "kl", the weight of the divergence from them.
      imitate: supervised training; not static, so that SFT and RL are one program.
    """
    graphdef = model_def(model)[0]

    def objective(params):
        logp, entropy, aux = token_logprobs(nnx.merge(graphdef, params, router_bias), batch)
        flat = lambda x: x.reshape(-1)
        rows = jnp.arange(logp.shape[0])[:, None] * (PER_ROW + 1)
        sampler, mask = batch["sampler"], batch["mask"]
        own = jax.lax.stop_gradient(logp)
        advantage = batch["advantage"]
        if distill:
            advantage = jnp.clip(batch["teacher"] - own, -distill, distill)
        old = sampler if c.old == "sampler" else own
        parts = map(flat, (logp, old, sampler, advantage, mask, batch["weight"], rows + batch["segment_ids"]))
        total, stats = loss(Tokens(*parts, n=logp.shape[0] * (PER_ROW + 1)), c, imitate)
        stats["entropy"] = jnp.sum(entropy * mask)
        if distill:
            stats["teacher_gap"] = jnp.sum((batch["teacher"] - own) * mask)
        if c.kl:
            kl = divergence(flat(logp), flat(batch["reference"]))
            total = total + batch["kl"] * jnp.sum(jnp.where(flat(mask) > 0, flat(batch["weight"]) * kl, 0.0))
            stats["kl"] = jnp.sum(kl * flat(mask))
        return total, (stats | {"loss": total}, reduce_stats(aux))

    grads, out = jax.grad(objective, has_aux=True)(params)
    return grads, jax.lax.stop_gradient(out)


@functools.partial(jax.jit, donate_argnums=0)
def _add(a, b):
    """Sum of two (gradients, (sums, aux)); of aux as `train.step` combines micro-batches, means left as sums."""
    (grads, (stats, aux)), (grads2, (stats2, aux2)) = a, b
    combine = lambda name, x, y: (jnp.maximum if name.endswith("_max") else REDUCE.get(name, jnp.add))(x, y)
    return jax.tree.map(jnp.add, grads, grads2), (by_name(combine, stats, stats2), by_name(combine, aux, aux2))


def make_update(config: Config) -> Callable:
    """f(state, gradients, aux, n) -> (state, metrics): optimizer, QK-Clip, next router bias; the state is donated."""
    tx = optimizer(config)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: TrainState, grads: PyTree, aux: dict, n_tokens: Array):
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = clip_logits(config, optax.apply_updates(state.params, updates), aux)
        metrics = {"rl/grad_norm": optax.global_norm(grads)}
        metrics |= summarise(config.model, aux, state.router_bias, n_tokens)
        metrics.pop("attn_res/weights_SN", None)  # summed over micro-batches, not a mean
        metrics.pop("kda/log_decay_LHK", None)
        bias = balance(config.model, state.router_bias, aux)
        return replace(state, step=state.step + 1, params=params, router_bias=bias, opt_state=opt_state), metrics

    return update


def policy_step(
    config: Config, c: ObjectiveConfig, update: Callable, state: TrainState, batches: Iterable[dict],
    distill: float = 0.0, imitate: bool = False,
) -> tuple[TrainState, dict[str, Any]]:
    """One update from all micro-batches (numpy or JAX arrays), and its metrics."""
    total, n_tokens, n_batches = None, 0, 0
    for batch in batches:
        new = gradient(config.model, c, distill, state.params, state.router_bias, batch, imitate)
        total = new if total is None else _add(total, new)
        n_tokens += int((batch["segment_ids"] > 0).sum())
        n_batches += 1
    grads, (sums, aux) = total
    state, metrics = update(state, grads, aux, jnp.asarray(n_tokens))
    sums = jax.device_get(sums)
    tokens = max(1.0, float(sums["tokens"]))
    mean = {name: float(sums[name]) / tokens for name in sums if name not in ("tokens", "loss", "log_ratio_max")}
    return state, {
        "rl/loss": float(sums["loss"]), "rl/trained_tokens": tokens, "rl/micro_batches": n_batches,
        "rl/masked": mean.pop("cut"), "rl/log_ratio": mean.pop("log_ratio"),
        "rl/log_ratio_max": float(sums["log_ratio_max"]), "rl/squared_log_ratio": mean.pop("squared"),
        **{f"rl/{name}": value for name, value in mean.items()}, **metrics,
    }  # fmt: skip

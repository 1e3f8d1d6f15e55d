"""The train step: micro-batches, one compilation, balancing, QK-Clip, gradients untouched by the router bias."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import random_state
from tests.trillium_moe.test_stack import small
from trillium_moe.config import (
    BALANCING,
    Config,
    DataConfig,
    DtypeConfig,
    MoEConfig,
    OptimConfig,
    TrainConfig,
)
from trillium_moe.train.step import balance, make_eval_step, make_train_step, value_and_grad

B, T = 4, 32


def config_of(*, micro_batches=1, dtype="float32", **model):
    """One MLA + MoE layer, unrolled: the step is the subject, not the stack."""
    dtypes = DtypeConfig(dtype, dtype, dtype)
    fields = {"vocab_size": 272, "n_layers": 1, "n_dense_layers": 0, "residual": "none", "scan_layers": False,
              "remat": "none", "dtypes": dtypes, **model}
    return Config(model=small(**fields), data=DataConfig(seq_len=T, batch_size=B), optim=OptimConfig(lr=1e-2),
                  train=TrainConfig(steps=20, micro_batches=micro_batches))


WHOLE = {"n_layers": 3, "n_dense_layers": 1, "block_size": 1, "residual": "block", "scan_layers": True,
         "remat": "layer"}


def batch_of(seed=0):
    tokens = jax.random.randint(jax.random.key(seed), (B, T + 1), 0, 272)
    ids = jnp.repeat(jnp.asarray([[1] * 12 + [2] * 20]), B, 0)
    weights = jnp.asarray(np.random.default_rng(seed).uniform(size=(B, T)) < 0.8, jnp.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ids, "weights": weights}


def test_micro_batches_change_rounding_only():
    with jax.enable_x64(True):
        one, four = (config_of(micro_batches=n, dtype="float64", **WHOLE) for n in (1, 4))
        state = random_state(one, std=0.2)
        results = []
        for config in (one, four):
            run = jax.jit(value_and_grad(config.model, config.train.micro_batches))
            results.append(run(state.params, state.router_bias, batch_of()))
        (out1, grads1), (out4, grads4) = results
        np.testing.assert_allclose(out4[0], out1[0], rtol=1e-12)
        for a, b in zip(jax.tree.leaves(grads4), jax.tree.leaves(grads1), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-12)
        np.testing.assert_array_equal(out4[1]["moe"]["histogram"], out1[1]["moe"]["histogram"])
        np.testing.assert_allclose(out4[1]["mla"]["max_logit"], out1[1]["mla"]["max_logit"], rtol=1e-12)


def test_step_compiles_once_learns_and_returns_the_next_bias():
    config = config_of(**WHOLE)
    step, evaluate = make_train_step(config), make_eval_step(config)
    state = random_state(config, std=0.2)
    before = evaluate(state.params, state.router_bias, batch_of())
    losses = []
    for _ in range(5):
        state, metrics = step(state, batch_of())
        losses.append(float(metrics["train/loss"]))
    assert step._cache_size() == 1
    assert int(state.step) == 5 and losses[-1] < losses[0] - 0.5
    np.testing.assert_allclose(before["nll"] / before["weight"], losses[0], rtol=1e-5)
    bias = state.router_bias["moe"]["bias"][...]
    assert float(jnp.abs(bias).max()) > 0
    np.testing.assert_allclose(bias.mean(-1), 0, atol=1e-6)
    assert metrics["router/load_LE"].sum(-1).tolist() == [B * T * 2] * 2


def test_the_bias_update_never_touches_a_gradient():
    """Same parameters, same bias: the gradient is identical whether or not the step also balances."""
    grads = {}
    for rule in ("quantile", "none"):
        config = config_of(moe=MoEConfig(n_experts=6, k=2, expert_dim=8, latent_dim=8, balancing=rule))
        state = random_state(config, std=0.2)
        (_, aux), grads[rule] = jax.jit(value_and_grad(config.model, 1))(state.params, state.router_bias, batch_of())
        moved = balance(config.model, state.router_bias, aux)["moe"]["bias"][...] != 0
        assert bool(moved.any()) == (rule == "quantile")
    for a, b in zip(*map(jax.tree.leaves, grads.values()), strict=True):
        np.testing.assert_array_equal(a, b)


QUICK = ("quantile", "sign", "aux_loss")


@pytest.mark.parametrize(
    "rule", [rule if rule in QUICK else pytest.param(rule, marks=pytest.mark.slow) for rule in BALANCING]
)
def test_every_balancing_rule_trains(rule):
    moe = MoEConfig(n_experts=6, k=2, expert_dim=8, latent_dim=8, balancing=rule)
    config = config_of(moe=moe, micro_batches=2)
    step, state = make_train_step(config), random_state(config, std=0.2)
    for _ in range(2):
        state, metrics = step(state, batch_of())
    assert np.isfinite(float(metrics["train/loss"])) and np.isfinite(float(metrics["router/max_violation"]))
    if rule == "batch_threshold":
        np.testing.assert_allclose(metrics["router/max_violation"], 0, atol=1e-6)
    assert ("router/aux_loss" in metrics) == (rule == "aux_loss")


def test_qk_clip_bounds_the_logits_of_the_next_forward():
    config = dataclasses.replace(config_of(), optim=OptimConfig(lr=1e-6, qk_clip=0.5))
    state = random_state(config, std=0.6)
    step = make_train_step(config)
    state, first = step(state, batch_of())
    _, second = step(state, batch_of())
    assert float(first["mla/max_logit"]) > 0.6
    assert float(second["mla/max_logit"]) < 0.5 * 1.05

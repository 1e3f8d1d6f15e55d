"""Quantile balancing on the tiny model: a deliberately skewed router is balanced within ten steps, without it never."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import scales
from trillium_moe.config import Config, DataConfig, OptimConfig, TrainConfig
from trillium_moe.train.state import init_state
from trillium_moe.train.step import make_train_step

B, T = 8, 256


@pytest.mark.parametrize("rule", ["quantile", "none"])
def test_skewed_router(rule):
    model = scales.tiny()
    model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, balancing=rule))
    config = Config(model=model, data=DataConfig(seq_len=T, batch_size=B), optim=OptimConfig(lr=1e-4),
                    train=TrainConfig(steps=100))
    state = jax.jit(init_state, static_argnums=0)(config)
    rng = np.random.default_rng(0)

    # Skew the routers themselves: all tokens share a direction, and each router's weights lean along it by expert.
    direction = rng.normal(size=model.d_model).astype(np.float32)
    direction /= np.linalg.norm(direction)
    lean = np.linspace(-0.3, 0.3, model.moe.n_experts).astype(np.float32)
    params = state.params
    params["embed"] = params["embed"].replace(params["embed"][...] + 0.5 * direction)
    router = params["moe"]["router"]
    params["moe"]["router"] = router.replace(router[...] + direction[:, None] * lean)
    step, seen = make_train_step(config), []
    for _ in range(10):
        tokens = rng.integers(0, 256, (B, T + 1)).astype(np.int32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": np.ones((B, T), np.int32),
                 "weights": np.ones((B, T), np.float32)}
        state, metrics = step(state, batch)
        seen.append((float(metrics["router/max_violation_worst"]), float(metrics["router/floor"])))
    violation, floor = seen[-1]
    assert seen[0][0] > 1
    if rule == "quantile":
        assert violation < 2 * floor, seen
    else:
        assert min(v for v, _ in seen) > 1, seen

"""Quantile balancing on the tiny model: a deliberately skewed router is balanced within ten steps, without it never."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import scales
from tests.models import random_variables
from trillium_moe.model.context import Context
from trillium_moe.train.step import balance, summarise

B, T = 8, 256


@pytest.mark.parametrize("rule", ["quantile", "none"])
def test_skewed_router(rule):
    model = scales.tiny()
    model = dataclasses.replace(model, moe=dataclasses.replace(model.moe, balancing=rule))
    graphdef, params, bias = random_variables(model)
    rng = np.random.default_rng(0)

    # all tokens share a direction, and each router's weights lean along it by expert
    direction = rng.normal(size=model.d_model)
    direction /= np.linalg.norm(direction)
    lean = np.linspace(-0.15, 0.15, model.moe.n_experts)
    params["embed"] = params["embed"].replace((params["embed"][...] + 0.1 * direction).astype(np.float32))
    router = params["moe"]["router"]
    params["moe"]["router"] = router.replace((router[...] + direction[:, None] * lean).astype(np.float32))

    forward = jax.jit(lambda bias, tokens: nnx.merge(graphdef, params, bias).hidden(tokens, Context())[1])
    seen = []
    for _ in range(11):
        tokens = rng.integers(0, 256, (B, T)).astype(np.int32)
        aux = forward(bias, tokens)
        metrics = summarise(model, aux, bias, jnp.int32(B * T))
        seen.append(float(metrics["router/max_violation"]))
        bias = balance(model, bias, aux)
    floor = float(metrics["router/floor"])
    np.testing.assert_allclose(floor, np.sqrt(2 * np.log(16) / (B * T * 4 / 16)), rtol=1e-6)
    assert seen[0] > 1
    if rule == "quantile":
        assert max(seen[5:]) < 2 * floor, seen  # step 2 is there already; ten are allowed
    else:
        assert min(seen) > 1, seen

"""Load telemetry against plain numpy, its alarms, and churn on a fixed probe."""

import jax.numpy as jnp
import numpy as np
import pytest

from trillium_moe.config import ConfigError, TrainConfig
from trillium_moe.evals.churn import churn, overlap
from trillium_moe.train.load import alarms, load_metrics

LOAD = np.array([[10, 10, 10, 10], [40, 0, 0, 0], [30, 9, 1, 0]])
BIAS = np.array([[0.0, 0.1, -0.1, 0.0], [1.0, -np.inf, 0.5, 0.0], [0, 0, 0, 0]])


def metrics():
    found = load_metrics(jnp.asarray(LOAD), jnp.asarray(BIAS, jnp.float32), 2, jnp.float32(0.5))
    return {name: np.asarray(value) for name, value in found.items()} | {"router/load_LE": LOAD}


def test_load_metrics():
    found = metrics()
    entropy = [np.log(4), 0.0, -sum(p * np.log(p) for p in (0.75, 0.225, 0.025))]
    expected = {
        "max_violation": [0, 3, 2],
        "min_violation": [0, 1, 1],
        "dead": [0, 3, 1],  # under 1 token; the third layer has one expert with exactly a tenth of the mean
        "entropy": np.array(entropy) / np.log(4),
        "effective_experts": np.exp(entropy),
        "rank_imbalance": [0, 1, 0.95],  # 20 + 20, 40 + 0, 39 + 1 tokens
        "bias_spread": [0.2, 1.0, 0.0],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(found[f"router/{name}_L"], values, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(found[f"router/{name}"], np.mean(values), rtol=1e-5, atol=1e-6, err_msg=name)
    assert found["router/max_violation_worst"] == 3 and found["router/dead_total"] == 4
    assert found["router/floor"] == 0.5


def test_alarms_name_the_worst_layer_and_the_key():
    both = alarms(TrainConfig(alarm_violation=1.5, alarm_dead=0.5), metrics())
    assert len(both) == 2
    assert "MoE layer 1: MaxVio 3.00" in both[0] and "train.alarm_violation=1.5" in both[0] and "above: 2)" in both[0]
    assert "MoE layer 1: 3 of 4 experts" in both[1] and "train.alarm_dead=0.5" in both[1]
    assert alarms(TrainConfig(alarm_violation=3.5, alarm_dead=0.9), metrics()) == []
    assert alarms(TrainConfig(alarm_violation=0.0, alarm_dead=0.0), metrics()) == []
    assert alarms(TrainConfig(), {"train/loss": 1.0}) == []
    with pytest.raises(ConfigError, match="train.alarm_dead=-1.0"):
        TrainConfig(alarm_dead=-1.0)


def test_churn_compares_with_the_evaluation_before(tmp_path):
    first = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    second = first.copy()
    second[0] = first[0, :, ::-1]  # the order does not matter
    second[1, 0] = 5, 9  # one of four choices of the layer
    np.testing.assert_allclose(overlap(first, second), [1, 0.75])
    assert churn(tmp_path, 10, first) == {}
    assert churn(tmp_path, 20, second) == {"router/churn": 0.125, "router/churn_worst": 0.25}
    # resumed after step 10: step 20 is compared with 10 again, and later files are not looked at
    assert churn(tmp_path, 20, second) == {"router/churn": 0.125, "router/churn_worst": 0.25}
    assert churn(tmp_path, 30, second) == {"router/churn": 0.0, "router/churn_worst": 0.0}

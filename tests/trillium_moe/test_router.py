"""Routing and its balancing rules against golden order statistics and independent computations."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import goldens
from trillium_moe.config import MoEConfig
from trillium_moe.model import router

CASES = {c["case"]: c for c in goldens.meta("quantile_balancing", "config.json")}


def scores_of(case, data):
    if "scores" in data:
        return data["scores"]
    m, n, seed = case["m"], case["n"], case["score_seed"]
    with np.errstate(over="ignore"):
        t = np.arange(m * n, dtype=np.uint64)
        golden = np.uint64(0x9E3779B97F4A7C15)
        x = (t + np.uint64(seed) * golden + np.uint64(1)) * golden
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        u = (x ^ (x >> np.uint64(31))) >> np.uint64(44)
    s = (u.astype(np.float64) * (8 + np.tile(np.arange(n) % 8, m)) / 2**24).astype(np.float32).reshape(m, n)
    assert hashlib.sha256(s.tobytes()).hexdigest() == case["sha256_scores"]
    return s


@pytest.mark.parametrize("name", CASES)
def test_golden_exact_update(name):
    case, data = CASES[name], goldens.arrays("quantile_balancing", f"{name}.safetensors")
    scores, bias = jnp.asarray(scores_of(case, data)), jnp.asarray(data["bias0"])
    k, n = case["k"], case["n"]
    experts, alpha = router.select(scores, bias, k)
    known = data.get("alpha", data.get("alpha_head"))
    np.testing.assert_array_equal(alpha[: len(known)], known)
    np.testing.assert_array_equal(router.loads(experts, n, jnp.ones(len(scores), bool)), data["loads_before"])
    np.testing.assert_array_equal(router.exact_bhat(scores, alpha, k), data["bhat"])
    np.testing.assert_allclose(router.quantile_bias(scores, bias, k), data["next_bias"], atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_golden_histogram_update(name):
    case, data = CASES[name], goldens.arrays("quantile_balancing", f"{name}.safetensors")
    k, width = case["k"], case["bin_width"]
    scores, bias = scores_of(case, data), data["bias0"]
    ours = router.histogram_bias(jnp.asarray(scores), jnp.asarray(bias), k)
    np.testing.assert_allclose(ours, data["hist_next_bias"], atol=2 * width)
    with jax.enable_x64(True):
        # the cutoffs are float32 sums; everything after them is float64
        alpha = np.asarray(router.select(jnp.asarray(scores), jnp.asarray(bias), k)[1], np.float64)
        s, b = jnp.asarray(scores, jnp.float64), jnp.asarray(bias, jnp.float64)
        histogram = router.margin_histogram(s, jnp.asarray(alpha), b, 1000)
        if "hist_counts" in data:
            np.testing.assert_array_equal(histogram, data["hist_counts"])
        np.testing.assert_allclose(router.histogram_bhat(histogram, b, k), data["hist_bhat"], atol=1e-6)


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(("m512", "m1000"))])
def test_golden_trajectory(name):
    case, data = CASES[name], goldens.arrays("quantile_balancing", f"{name}.safetensors")
    scores, bias = jnp.asarray(scores_of(case, data)), jnp.asarray(data["bias0"])
    for step in range(1, 11):
        bias = router.quantile_bias(scores, bias, case["k"])
        np.testing.assert_allclose(bias, data["traj_bias"][step], atol=1e-5)


def test_padding_does_not_count():
    rng = np.random.default_rng(0)
    scores, bias, k = rng.uniform(size=(96, 12)).astype(np.float32), rng.normal(size=12).astype(np.float32) * 0.1, 3
    real = jnp.asarray(rng.uniform(size=96) < 0.7)
    scores, bias = jnp.asarray(scores), jnp.asarray(bias)
    _, alpha = router.select(scores, bias, k)
    few, few_alpha = scores[real], alpha[real]
    np.testing.assert_array_equal(router.exact_bhat(scores, alpha, k, real), router.exact_bhat(few, few_alpha, k))
    both = [router.margin_histogram(s, a, bias, 50, r) for s, a, r in ((scores, alpha, real), (few, few_alpha, None))]
    np.testing.assert_array_equal(*both)


def test_histogram_adds_over_micro_batches():
    rng = np.random.default_rng(1)
    scores, bias = jnp.asarray(rng.uniform(size=(64, 8)), jnp.float32), jnp.asarray(rng.normal(size=8), jnp.float32)
    _, alpha = router.select(scores, bias, 2)
    whole = router.margin_histogram(scores, alpha, bias, 100)
    halves = sum(router.margin_histogram(scores[i : i + 32], alpha[i : i + 32], bias, 100) for i in (0, 32))
    np.testing.assert_array_equal(whole, halves)


def test_target_load_is_exact_where_floats_and_int32_are_not():
    whole, rest = router.target_load(jnp.int32(2**30 + 7), 16, 896)
    q, r = divmod((2**30 + 7) * 16, 896)
    assert (int(whole), int(rest)) == (q, r)


def test_ties_go_to_the_lower_expert():
    experts, _ = router.select(jnp.full((5, 8), 0.25), jnp.zeros(8), 3)
    np.testing.assert_array_equal(experts, np.tile([0, 1, 2], (5, 1)))


def test_weights_ignore_the_bias_and_sum_to_the_scale():
    scores = jnp.asarray([[0.2, 0.6, 0.4, 0.9]])
    weights = router.weights_of(scores, jnp.asarray([[0, 3]]), 2.446)
    np.testing.assert_allclose(weights, 2.446 * np.array([[0.2, 0.9]]) / 1.1, rtol=1e-6)


def test_batch_threshold_takes_the_quantile():
    scores = np.random.default_rng(2).uniform(size=(64, 8)).astype(np.float32)
    _, taken = router.batch_threshold(jnp.asarray(scores), 2)
    threshold = np.sort(scores, axis=0)[-16]  # q = 64 * 2 / 8
    np.testing.assert_array_equal(taken, scores >= threshold)


@pytest.mark.parametrize("rule", ["sign", "load_quantile", "none"])
def test_load_rules(rule):
    config = MoEConfig(n_experts=4, k=1, balancing=rule, load_p=0.5)
    bias = jnp.asarray([[0.1, 0.0, -0.1, 0.0]])
    load = np.array([[8, 4, 2, 2]])  # mean 4: relative 2, 1, 0.5, 0.5; median 0.75
    step = {"sign": 1e-3 * np.array([[-1, 0, 1, 1]]), "load_quantile": 0.01 * (0.75 - load / 4), "none": 0.0}[rule]
    got = router.next_bias(config, bias, {"load": jnp.asarray(load)})
    np.testing.assert_allclose(got, np.asarray(bias) + step, atol=1e-7)


def test_aux_loss_changes_the_gradient_by_its_own_gradient_only():
    scores = jnp.asarray(np.random.default_rng(3).uniform(size=(16, 4)), jnp.float32)
    load, real = jnp.asarray([10, 2, 2, 2]), jnp.ones(16, bool)
    f = lambda s: (s**2).sum()
    with_loss = lambda s: f(router.add_loss(s, 0.3 * router.aux_loss(s, load, real)))
    assert with_loss(scores) == f(scores)
    expected = jax.grad(f)(scores) + 0.3 * jax.grad(lambda s: router.aux_loss(s, load, real))(scores)
    np.testing.assert_allclose(jax.grad(with_loss)(scores), expected, rtol=1e-6)
    # balanced loads and equal scores give the minimum, 1
    np.testing.assert_allclose(router.aux_loss(jnp.ones((16, 4)), jnp.full(4, 4), real), 1.0, rtol=1e-6)

"""Routing and its balancing rules against golden order statistics and independent computations."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import quantile_bias
from pallas_kernels.router import router as op
from pallas_kernels.router.bias import bin_range, centred, histogram_quantile, target_load
from pallas_kernels.router.reference import bin_of
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
    k = case["k"]
    found = op(scores, bias, k=k)
    known = data.get("alpha", data.get("alpha_head"))
    np.testing.assert_array_equal(found.cutoff_M[: len(known)], known)
    np.testing.assert_array_equal(found.load_E, data["loads_before"])
    bhat = router.exact_bhat(scores, found.cutoff_M, k)
    np.testing.assert_array_equal(bhat, data["bhat"])
    np.testing.assert_allclose(centred(bhat), data["next_bias"], atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_golden_histogram_update(name):
    case, data = CASES[name], goldens.arrays("quantile_balancing", f"{name}.safetensors")
    k, width = case["k"], case["bin_width"]
    scores, bias = scores_of(case, data), data["bias0"]
    found = op(jnp.asarray(scores), jnp.asarray(bias), k=k, bins=1000)
    ours = quantile_bias(found.histogram, jnp.asarray(bias), k)
    np.testing.assert_allclose(ours, data["hist_next_bias"], atol=2 * width)
    with jax.enable_x64(True):
        # the cutoffs are float32 sums; everything after them is float64
        alpha = jnp.asarray(found.cutoff_M, jnp.float64)
        s, b = jnp.asarray(scores, jnp.float64), jnp.asarray(bias, jnp.float64)
        index = np.asarray(bin_of(alpha[:, None] - s, *bin_range(b, 1000), 1000))
        histogram = np.stack([np.bincount(column, minlength=1000) for column in index.T])
        if "hist_counts" in data:
            np.testing.assert_array_equal(histogram, data["hist_counts"])
        bhat = histogram_quantile(jnp.asarray(histogram), b, k)
        np.testing.assert_allclose(bhat, data["hist_bhat"], atol=1e-6)


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(("m512", "m1000"))])
def test_golden_trajectory(name):
    case, data = CASES[name], goldens.arrays("quantile_balancing", f"{name}.safetensors")
    scores, bias, k = jnp.asarray(scores_of(case, data)), jnp.asarray(data["bias0"]), case["k"]
    for step in range(1, 11):
        bias = centred(router.exact_bhat(scores, op(scores, bias, k=k).cutoff_M, k))
        np.testing.assert_allclose(bias, data["traj_bias"][step], atol=1e-5)


def test_padding_does_not_count():
    rng = np.random.default_rng(0)
    scores, bias, k = rng.uniform(size=(96, 12)).astype(np.float32), rng.normal(size=12).astype(np.float32) * 0.1, 3
    real = jnp.asarray(rng.uniform(size=96) < 0.7)
    scores, bias = jnp.asarray(scores), jnp.asarray(bias)
    all_, few = op(scores, bias, k=k, bins=50, real_M=real), op(scores[real], bias, k=k, bins=50)
    np.testing.assert_array_equal(router.exact_bhat(scores, all_.cutoff_M, k, real),
                                  router.exact_bhat(scores[real], few.cutoff_M, k))
    np.testing.assert_array_equal(all_.histogram, few.histogram)
    np.testing.assert_array_equal(all_.load_E, few.load_E)


def test_histogram_adds_over_micro_batches():
    rng = np.random.default_rng(1)
    scores, bias = jnp.asarray(rng.uniform(size=(64, 8)), jnp.float32), jnp.asarray(rng.normal(size=8), jnp.float32)
    whole = op(scores, bias, k=2, bins=100).histogram
    np.testing.assert_array_equal(whole, sum(op(half, bias, k=2, bins=100).histogram for half in jnp.split(scores, 2)))


def test_target_load_is_exact_where_floats_and_int32_are_not():
    whole, rest = target_load(jnp.int32(2**30 + 7), 16, 896)
    q, r = divmod((2**30 + 7) * 16, 896)
    assert (int(whole), int(rest)) == (q, r)


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

"""The router op: every implementation against an independent numpy routing, its gradient, and the balancing rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import api, quantile_bias, router
from pallas_kernels.router.gpu_select import from_key, to_key, top
from pallas_kernels.router.pallas_tpu import select_pallas_tpu
from tests.pallas_kernels.numpy_warp import NumpyWarp
from tests.pallas_kernels.test_kda_gpu import h200  # noqa: F401

on_gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a Hopper GPU")
EVERYWHERE = ["reference", "xla", "pallas_tpu", pytest.param("pallas_gpu", marks=on_gpu)]


@pytest.fixture(autouse=True)
def tpu_kernels_without_a_tpu(monkeypatch):
    interpreted = functools.partial(select_pallas_tpu, interpret=True)
    monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas_tpu", interpreted)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def draw(M, E, kind="random", seed=0):
    rng = np.random.default_rng(seed)
    s, b = sigmoid(rng.normal(size=(M, E))), 0.2 * rng.normal(size=E)
    if kind == "ties":  # few distinct values, in bfloat16's resolution
        s, b = rng.integers(1, 4, (M, E)) / 4, np.zeros(E)
    elif kind == "equal":
        s, b = np.full((M, E), 0.5), np.zeros(E)
    elif kind == "sorted":  # the best experts are neighbours
        s, b = np.sort(s, axis=1), np.sort(b)
    elif kind == "barred":
        b[rng.permutation(E)[: E // 3]] = -np.inf
    return jnp.asarray(s, jnp.float32), jnp.asarray(b, jnp.float32)


def expected(s, b, k, bins, real, scale=1.0):
    """The same by Python's sort of (-biased score, index), token by token, in the dtype of the op."""
    (M, E), s, b = s.shape, np.asarray(s), np.asarray(b)
    biased = s + b
    order = np.array([sorted(range(E), key=lambda e: (-row[e], e)) for row in biased])
    experts = order[:, :k]
    cutoff = np.take_along_axis(biased, order, 1)[:, k] if k < E else np.full(M, -np.inf, s.dtype)
    chosen = np.take_along_axis(s, experts, 1).astype(np.float64)
    weights = scale * chosen / (chosen.sum(1, keepdims=True) + 1e-20)
    load = np.bincount(experts[real].reshape(-1), minlength=E)
    low, high = b[np.isfinite(b)].min() - np.float32(1), b[np.isfinite(b)].max() + np.float32(1)
    place = np.floor((cutoff[:, None] - s - low) * (1 / np.float32((high - low) / np.float32(bins))))
    place = np.clip(place, 0, bins - 1).astype(int)
    histogram = np.array([np.bincount(place[real, e], minlength=bins) for e in range(E)])
    return experts, weights, cutoff, load, histogram


CASES = [
    (40, 24, 3, "random"),
    (40, 24, 3, "ties"),
    (7, 16, 4, "equal"),
    (40, 24, 3, "barred"),
    (1, 12, 2, "random"),
    (9, 8, 8, "random"),  # k = E
    (33, 40, 1, "sorted"),
    (20, 896, 16, "random"),  # fewer tokens than experts
    (5, 896, 16, "equal"),
]


@pytest.mark.parametrize("implementation", EVERYWHERE)
@pytest.mark.parametrize("M, E, k, kind", CASES)
def test_routing(M, E, k, kind, implementation):
    if implementation.startswith("pallas") and k == E:
        pytest.skip("k < E is supported")
    bins = 10 if E > 100 else 50
    (s, b), real = draw(M, E, kind), jnp.asarray(np.random.default_rng(1).random(M) < 0.8)
    got = router(s, b, k=k, bins=bins, scale=2.5, real_M=real, implementation=implementation)
    experts, weights, cutoff, load, histogram = expected(s, b, k, bins, real, 2.5)
    np.testing.assert_array_equal(got.experts_MK, experts)
    np.testing.assert_array_equal(got.cutoff_M, cutoff)
    np.testing.assert_array_equal(got.load_E, load)
    np.testing.assert_array_equal(got.histogram, histogram)
    np.testing.assert_allclose(got.weights_MK, weights, rtol=1e-6)
    assert all(len(set(row)) == k for row in np.asarray(got.experts_MK).tolist())


@pytest.mark.parametrize("implementation", EVERYWHERE)
def test_logits(implementation):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(30, 64)), jnp.float32)
    b = jnp.zeros(64)
    got = router(x, b, k=4, bins=20, sigmoid=True, implementation=implementation)
    experts, weights, cutoff, load, histogram = expected(sigmoid(np.asarray(x)), b, 4, 20, np.ones(30, bool))
    np.testing.assert_array_equal(got.experts_MK, experts)
    np.testing.assert_array_equal(got.load_E, load)
    np.testing.assert_allclose(got.weights_MK, weights, rtol=1e-5)
    np.testing.assert_allclose(got.cutoff_M, cutoff, rtol=1e-6)
    assert np.abs(np.cumsum(np.asarray(got.histogram) - histogram, 1)).max() <= 1  # rounding at an edge


@pytest.mark.parametrize("implementation", EVERYWHERE)
@pytest.mark.parametrize("activate", [False, True])
def test_gradient(implementation, activate):
    (s, b), d = draw(12, 16), np.random.default_rng(2).normal(size=(12, 3)).astype(np.float32)

    def loss(x):
        r = router(x, b, k=3, bins=10, scale=1.5, sigmoid=activate, implementation=implementation)
        return (r.weights_MK * d).sum() + r.cutoff_M.sum()  # the cutoff passes no gradient

    order = np.argsort(-(sigmoid(np.asarray(s)) if activate else np.asarray(s)) - b, axis=1, kind="stable")[:, :3]
    mask, weight = np.zeros((2, *s.shape), np.float32)
    np.put_along_axis(mask, order, 1, 1)
    np.put_along_axis(weight, order, d, 1)

    def dense(x):
        """The same with every expert in the sum, chosen by a mask."""
        s = jax.nn.sigmoid(x) if activate else x
        return (1.5 * s * mask / (s * mask).sum(1, keepdims=True) * weight).sum()

    want = jax.grad(dense)(s)
    np.testing.assert_allclose(jax.grad(loss)(s), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shift", [-40, -50, -120])
@pytest.mark.parametrize("activate", [False, True])
def test_gradient_where_no_expert_scores(activate, shift):
    """All scores of a token may sink together; the square of their sum is below float32's range at a shift of -50, the
    scores themselves at -120. Against differences of the definition, in float64."""
    rng = np.random.default_rng(3)
    x, d = shift + rng.normal(size=(6, 8)), rng.normal(size=(6, 3))

    def loss(x):
        s = x if activate else jax.nn.sigmoid(x)
        return (router(s, jnp.zeros(8), k=3, sigmoid=activate, implementation="xla").weights_MK * d).sum()

    def row(x, order, d):
        s = sigmoid(x)[order]
        return (s / (s.sum() + 1e-20) * d).sum()

    want = np.zeros_like(x)
    for m, e in np.ndindex(*x.shape):
        order, step = np.argsort(-x[m], kind="stable")[:3], 1e-4 * np.eye(8)[e]
        want[m, e] = (row(x[m] + step, order, d[m]) - row(x[m] - step, order, d[m])) / 2e-4
    np.testing.assert_allclose(jax.grad(loss)(jnp.asarray(x, jnp.float32)), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "sorted", "barred"])
@pytest.mark.parametrize("E, count", [(896, 17), (33, 2), (32, 32), (20, 5)])
def test_the_warp_program(kind, E, count):
    """The GPU kernel's selection, lane by lane in numpy: both of its branches."""
    s, b = map(np.asarray, draw(3 if E > 100 else 20, E, kind))
    W = NumpyWarp()
    for row in s + b:
        lanes = np.concatenate([row, np.zeros(-E % 32, np.float32)]).reshape(-1, 32)
        index = np.arange(lanes.size, dtype=np.uint32).reshape(-1, 32)
        keys = [W.select(i < E, to_key(W, x), 0) for i, x in zip(index, lanes)]
        key, expert = top(W, keys, count)
        want = sorted(range(E), key=lambda e: (-row[e], e))[:count]
        assert expert[:count].tolist() == want
        np.testing.assert_array_equal(from_key(W, key)[:count], row[want])
    if kind == "random":
        assert W.branches[True] >= 0.8 * len(s)
    if kind == "equal" and E > 32:
        assert W.branches[False] == len(s)


def test_next_bias_is_the_quantile():
    """Against the order statistic, with a barred expert and layers as a leading axis."""
    k, bins, M, E = 3, 2000, 400, 12
    s, b = draw(M, E)
    b = b.at[4].set(-np.inf)
    found = router(s, b, k=k, bins=bins)
    s, b = np.asarray(s), np.asarray(b)
    live = np.flatnonzero(np.isfinite(b))
    required = np.sort(np.asarray(found.cutoff_M)[:, None] - s, axis=0)
    exact = required[M * k // len(live)][live]
    got = np.asarray(quantile_bias(jnp.stack([found.histogram] * 2), jnp.stack([jnp.asarray(b)] * 2), k))
    np.testing.assert_array_equal(got[0], got[1])
    assert got[0][4] == -np.inf
    width = (b[live].max() - b[live].min() + 2) / bins
    np.testing.assert_allclose(got[0][live], exact - exact.mean(), atol=2 * width)
    np.testing.assert_allclose(got[0][live].mean(), 0, atol=1e-6)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"k": 0}, "k=0 of 8 experts"),
        ({"k": 9}, "k=9 of 8 experts"),
        ({"bins": -1}, "bins=-1"),
        ({"dtype": jnp.bfloat16}, "bfloat16"),
    ],
)
def test_errors(change, says):
    scores = jnp.zeros((4, 8), change.get("dtype", jnp.float32))
    with pytest.raises(ValueError, match=says):
        router(scores, jnp.zeros(8, scores.dtype), k=change.get("k", 2), bins=change.get("bins", 0))


@pytest.mark.parametrize("E, k, bins", [(2048, 4, 0), (64, 40, 0), (8, 8, 0), (64, 4, 8000)])
def test_gpu_kernel_refuses_what_it_cannot_serve(E, k, bins):
    with pytest.raises(NotImplementedError, match="supported"):
        router(jnp.zeros((4, E)), jnp.zeros(E), k=k, bins=bins, implementation="pallas_gpu")


@pytest.mark.slow
def test_tpu_kernel_over_several_blocks():
    """Tokens and experts that fill no block, and counts that add up over blocks."""
    s, b = draw(1100, 130)
    real = jnp.arange(1100) % 7 > 0
    got, want = (router(s, b, k=3, bins=40, real_M=real, implementation=name) for name in ("pallas_tpu", "xla"))
    for name, x, y in zip(got._fields, got, want):
        np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_compiles_for_tpus(chip, monkeypatch):
    topologies = pytest.importorskip("jax.experimental.topologies")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        device = topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0]
    except Exception as error:  # whatever the missing library raises
        pytest.skip(f"no libtpu: {error}")
    mesh = jax.sharding.Mesh(np.array([device]), ("device",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        where = jax.sharding.NamedSharding(mesh, jax.P())
        shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=where)
        for M, E, k, bins, activate in ((32768, 896, 16, 1000, False), (100, 40, 3, 50, True)):
            op = functools.partial(select_pallas_tpu, k=k, bins=bins, sigmoid=activate)
            compiled = jax.jit(op).lower(shape(jnp.float32, M, E), shape(jnp.float32, E), shape(jnp.bool_, M)).compile()
            assert compiled.as_text().count("tpu_custom_call") >= 2


@pytest.mark.aot
@pytest.mark.parametrize("M, E, k, bins, activate", [(32768, 896, 16, 1000, False), (1, 100, 3, 50, True)])
def test_compiles_for_h200(h200, M, E, k, bins, activate):  # noqa: F811
    where = jax.sharding.NamedSharding(h200, jax.P())
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=where)

    def both(scores, bias, real, d):
        op = lambda s: router(s, bias, k=k, bins=bins, real_M=real, sigmoid=activate, implementation="pallas_gpu")
        found, vjp = jax.vjp(lambda s: op(s).weights_MK, scores)
        return op(scores), found, vjp(d)

    args = shape(jnp.float32, M, E), shape(jnp.float32, E), shape(jnp.bool_, M), shape(jnp.float32, M, k)
    text = jax.jit(both).lower(*args).compile().as_text()
    assert text.count("mosaic_gpu") >= 2

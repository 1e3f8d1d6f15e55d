"""Attention on Hopper GPUs: which blocks meet, what the kernels refuse, that they compile for an H200, and, where there
is one, parity with attention by its definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, gpu_tiles, pallas_gpu
from tests.pallas_kernels.test_kda_gpu import h200, on_hopper  # noqa: F401  (a fixture)

SIZES = [(192, 128), (96, 64), (80, 128)]


def inputs(G, B, t, T, H, K, V, seed=0):
    """q [G, B, t, H, K], k, v [B, T, H, .] and the cotangent, with some sharp logits."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(G, B, t, H, K)) * 3, rng.normal(size=(B, T, H, K))
    v, do = rng.normal(size=(B, T, H, V)) + 0.5, rng.normal(size=(G, B, t, H, V))
    return [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, do)]


def definition(q, k, v, do, start, ids_q, ids_k, scale):
    """o, dq, dk, dv and the largest logits, in float64 from the formulas."""
    q, k, v, do = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v, do))
    G, B, t, _, _ = q.shape
    at = np.asarray(start)[:, None] + np.arange(t)
    seen = (at[:, None, :, None] >= np.arange(k.shape[1])) & (ids_q[..., None] == ids_k[None, :, None])
    logits = np.where(seen[:, :, None], np.einsum("gbthk,bchk->gbhtc", q, k) * scale, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    o = np.einsum("gbhtc,bchv->gbthv", p, v)
    dp = np.einsum("gbthv,bchv->gbhtc", do, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    return {
        "o": o,
        "dq": np.einsum("gbhtc,bchk->gbthk", ds, k),
        "dk": np.einsum("gbhtc,gbthk->bchk", ds, q),
        "dv": np.einsum("gbhtc,gbthv->bchv", p, do),
        "top": logits.max((0, 1, 3, 4)),
    }


def assert_parity(G, B, t, T, H, K, V, start=None, ids_q=None, ids_k=None, seed=0):
    q, k, v, do = inputs(G, B, t, T, H, K, V, seed)
    start = np.zeros(1, int) if start is None else np.asarray(start)
    scale = K**-0.5

    @jax.jit
    def run(q, k, v, do, start, *ids):
        op = lambda *x: pallas_gpu.attend(*x, start, *(ids or (None, None)), scale=scale)
        (o, top), vjp = jax.vjp(op, q, k, v)
        return dict(
            zip(("o", "top", "dq", "dk", "dv"), (o, top, *vjp((do.astype(o.dtype), jnp.ones_like(top)))))
        )

    ids = () if ids_k is None else (jnp.asarray(ids_q, jnp.int32), jnp.asarray(ids_k, jnp.int32))
    got = run(q, k, v, do, jnp.asarray(start, jnp.int32), *ids)
    one = (np.zeros((G, B, t), int), np.zeros((B, T), int)) if ids_k is None else (ids_q, ids_k)
    want = definition(q, k, v, do, start, *one, scale)
    for name, y in want.items():
        x = np.asarray(got[name].astype(jnp.float32), np.float64)
        assert np.isfinite(x).all(), name
        error = np.linalg.norm(x - y) / (np.linalg.norm(y) + 1e-2)  # a query with one key has dq = dk = 0, up to 1e-5
        # probabilities, dS and the gradients are rounded to bfloat16 once each; logits only add up in float32
        assert error < {"top": 1e-6, "o": 3e-3}.get(name, 6e-3), (name, error)
    assert got["o"].dtype == jnp.float32


@on_hopper
@pytest.mark.parametrize("K, V", SIZES)
@pytest.mark.parametrize("T", [1, 127, 128, 384, 777])
def test_parity(K, V, T):
    assert_parity(1, 2, T, T, 3, K, V)


@on_hopper
@pytest.mark.parametrize("K, V", SIZES)
@pytest.mark.parametrize("density", [0.002, 0.02, 0.5])
def test_packed(K, V, density):
    ids = np.cumsum(np.random.default_rng(1).random((2, 1000)) < density, axis=1)
    assert_parity(1, 2, 1000, 1000, 2, K, V, ids_q=ids[None], ids_k=ids)


@on_hopper
def test_ids_in_any_order():
    """Equal ids are one document wherever they stand."""
    rng = np.random.default_rng(2)
    ids = np.repeat(rng.integers(-3, 3, (2, 15)), 64, axis=1)
    assert_parity(1, 2, 960, 960, 2, 192, 128, ids_q=ids[None], ids_k=ids)


@on_hopper
@pytest.mark.parametrize("start", [[0, 896], [300, 550], [768, 128]])
@pytest.mark.parametrize("packed", [False, True])
def test_runs_at_any_position(start, packed):
    ids = np.cumsum(np.random.default_rng(3).random((2, 1024)) < 0.01, axis=1) if packed else None
    ids_q = np.stack([ids[:, s : s + 128] for s in start]) if packed else None
    assert_parity(2, 2, 128, 1024, 2, 192, 128, start, ids_q, ids)


@on_hopper
def test_short_runs():
    assert_parity(2, 1, 70, 500, 2, 96, 64, [430, 11])


@on_hopper
def test_documents_and_the_future_do_not_reach_a_bit():
    q, k, v, do = (x[0] if x.ndim == 5 else x for x in inputs(1, 1, 640, 640, 2, 192, 128))
    q2, k2, v2, do2 = (x[0] if x.ndim == 5 else x for x in inputs(1, 1, 640, 640, 2, 192, 128, seed=1))
    ids = jnp.asarray(np.repeat([0, 1, 2], [100, 300, 240])[None], jnp.int32)

    @jax.jit
    def run(q, k, v, do):
        (o, _), vjp = jax.vjp(
            lambda *x: attention(*x, scale=0.1, segment_ids=ids, implementation="pallas_gpu"), q, k, v
        )
        return o, *vjp((do.astype(o.dtype), jnp.zeros(2)))

    base = run(q, k, v, do)
    inside = (jnp.arange(640) >= 100) & (jnp.arange(640) < 400)
    mixed = run(*(jnp.where(inside[:, None, None], x, y) for x, y in ((q, q2), (k, k2), (v, v2), (do, do2))))
    for x, y in zip(base, mixed):
        np.testing.assert_array_equal(np.asarray(x)[:, 100:400], np.asarray(y)[:, 100:400])
    for x, y in zip(base, run(q, k, v, do)):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    past = jnp.arange(640) < 333
    mixed = run(*(jnp.where(past[:, None, None], x, y) for x, y in ((q, q2), (k, k2), (v, v2))), do)
    np.testing.assert_array_equal(np.asarray(base[0])[:, :333], np.asarray(mixed[0])[:, :333])


@on_hopper
def test_default_on_hopper():
    """The kernels are what the op takes by itself; the scale and the ids go through."""
    q, k, v, _ = inputs(1, 2, 200, 200, 2, 96, 64)
    ids = jnp.asarray(np.repeat([[0, 1], [3, 4]], 100, axis=1), jnp.int32)
    run = lambda name: attention(q[0], k, v, scale=0.07, segment_ids=ids, implementation=name)
    for x, y, z in zip(run(None), run("pallas_gpu"), run("reference")):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        np.testing.assert_allclose(np.asarray(x), np.asarray(z), atol=2e-2, rtol=1e-2)


def meetings(ids_q, start, ids_k, queries, keys):
    """By looking at every pair: whether any of a block's pairs is visible, and whether all are."""
    N, t = ids_q.shape
    at = np.asarray(start)[:, None] + np.arange(t)
    theirs = np.tile(ids_k, (N // ids_k.shape[0], 1))
    seen = (at[..., None] >= np.arange(ids_k.shape[1])) & (ids_q[..., None] == theirs[:, None])
    seen = seen.reshape(N, t // queries, queries, -1, keys)
    return seen.any((2, 4)), seen.all((2, 4))


@pytest.mark.parametrize("documents", [1, 4, 40])
@pytest.mark.parametrize("sizes", [(128, 64), (64, 128)])
@pytest.mark.parametrize("order", ["packed", "any"])
def test_spans_and_visits(documents, sizes, order):
    """Every block with a visible pair is visited once, and one that is taken to need no mask needs none."""
    rng = np.random.default_rng(documents)
    ids_k = np.sort(rng.integers(0, documents, (2, 1024)), axis=1)
    packed = order == "packed"
    if not packed:
        ids_k = ids_k[:, rng.permutation(16).repeat(64) * 64 + np.tile(np.arange(64), 16)]
    start = np.array([0, 0, 700, 700])
    ids_q = np.concatenate([ids_k[:, s : s + 256] for s in (0, 700)])
    some, every = meetings(ids_q, start, ids_k, *sizes)
    args = jnp.asarray(ids_q, jnp.int32), jnp.asarray(start, jnp.int32), jnp.asarray(ids_k, jnp.int32)
    for spans, transpose in ((gpu_tiles.query_spans, False), (gpu_tiles.key_spans, True)):
        spans = jax.jit(spans, static_argnums=(3, 4))(*args, *sizes)
        visits = gpu_tiles.Visits(list(jnp.moveaxis(spans, 2, 0)[..., None]))
        order, total, masked = (
            np.asarray(x) for x in (visits[jnp.arange(16)][0], visits.total, visits.masked)
        )
        for n, block in np.ndindex(spans.shape[:2]):
            visited = order[n, block, : total[n, block, 0]]
            any_seen, all_seen = ((x[n, :, block] if transpose else x[n, block]) for x in (some, every))
            assert len(set(visited)) == len(visited)
            assert set(np.flatnonzero(any_seen)) <= set(visited)
            assert all_seen[visited[masked[n, block, 0] :]].all()
            if documents == 1 or packed:
                assert set(visited) == set(np.flatnonzero(any_seen))


def test_visits_of_several_runs():
    spans = [[jnp.int32(x) for x in run] for run in ((2, 3, 5, 6), (0, 0, 0, 0), (1, 1, 3, 3))]
    visits = gpu_tiles.Visits(*spans)
    assert int(visits.masked) == 2 and int(visits.total) == 6
    assert [tuple(map(int, visits[i])) for i in range(6)] == [(2, 0), (5, 0), (3, 0), (4, 0), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    "change, says",
    [
        ({"K": 224}, "K=224"),
        ({"V": 96}, "V=96"),
        ({"dtype": jnp.float32}, "bfloat16"),
        ({}, "9.0"),
        ({"scale": -1.0}, "scale"),
    ],
)
def test_refuses_what_it_cannot_serve(change, says):
    if not change and jax.default_backend() == "gpu":
        pytest.skip("a GPU is there")
    x = jnp.zeros((1, 4, 1, change.get("K", 64)), change.get("dtype", jnp.bfloat16))
    v = jnp.zeros((1, 4, 1, change.get("V", 64)), x.dtype)
    with pytest.raises(NotImplementedError, match=says):
        attention(x, x, v, scale=change.get("scale", 1.0), implementation="pallas_gpu")


@pytest.mark.aot
@pytest.mark.parametrize(
    "B, T, H, K, V, packed, G",
    [(1, 8192, 96, 192, 128, False, 1), (2, 1000, 3, 96, 64, True, 2), (1, 1 << 20, 32, 192, 128, True, 1)],
)
def test_compiles_for_h200(h200, B, T, H, K, V, packed, G):  # noqa: F811
    """The last shape has more than 2^31 elements in every operand."""
    where = jax.sharding.NamedSharding(h200, jax.P())
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=where)
    q, k, v = (shape(jnp.bfloat16, *dims) for dims in ((G, B, T // G, H, K), (B, T, H, K), (B, T, H, V)))
    ids = (shape(jnp.int32, G, B, T // G), shape(jnp.int32, B, T)) if packed else (None, None)

    def both(q, k, v, start, ids):
        f = functools.partial(pallas_gpu.attend, scale=0.1)
        (o, top), vjp = jax.vjp(lambda *x: f(*x, start, *ids), q, k, v)
        return top, vjp((o, top))

    jax.jit(both).lower(q, k, v, shape(jnp.int32, G), ids).compile()

"""Attention: tiles of scores against the whole score matrix and against numpy."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, attention_from, attention_runs, blocks, cached, xla


def example(T, segments, dtype=np.float32):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, T, 2, 6)).astype(dtype) for _ in range(2))
    v = rng.normal(size=(2, T, 2, 4)).astype(dtype)
    ids = np.sort(rng.integers(1, 4, (2, T)), axis=1) if segments else None
    return q, k, v, ids


def outputs_and_gradients(implementation, scale=0.5):
    """(q, k, v, ids) -> outputs, largest logits and the three gradients."""
    def f(q, k, v, ids):
        def loss(q, k, v):
            o, top = attention(q, k, v, scale=scale, segment_ids=ids, implementation=implementation)
            return jnp.sin(o).sum(), (o, top)

        (_, outs), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return *outs, *grads

    return jax.jit(f)


@pytest.mark.parametrize("T, segments, dtype", [(1, False, "float32"), (16, True, "float32"), (37, True, "float64"),
                                                (48, False, "float32")])  # fmt: skip
def test_values_and_gradients(T, segments, dtype, monkeypatch):
    monkeypatch.setattr(xla, "TILE", 16)
    q, k, v, ids = example(T, segments, dtype)
    ids_or_ones = np.ones((2, T), int) if ids is None else ids
    logits = np.einsum("bqhk,bthk->bhqt", q, k).astype(np.float64) * 0.5
    t = np.arange(T)
    visible = (t[:, None] >= t) & (ids_or_ones[:, :, None] == ids_or_ones[:, None, :])
    logits = np.where(visible[:, None], logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum("bhqt,bthv->bqhv", p / p.sum(-1, keepdims=True), v)

    with jax.enable_x64(dtype == "float64"):
        found, reference = (outputs_and_gradients(name)(q, k, v, ids) for name in ("xla", "reference"))
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == "float64" else {"rtol": 1e-4, "atol": 1e-5}
    for o, top, *_ in (found, reference):
        assert o.dtype == dtype
        np.testing.assert_allclose(o, expected, **near)
        np.testing.assert_allclose(top, logits.max((0, 2, 3)), **near)
    for a, b in zip(found[2:], reference[2:]):
        np.testing.assert_allclose(a, b, **near)


def test_any_documents_in_tiles(monkeypatch):
    """Ids in any order, a negative largest logit, which padding must not raise; in float64, one compiled shape."""
    monkeypatch.setattr(xla, "TILE", 8)
    k, _, v, _ = example(21, False, np.float64)
    tiled, whole = (outputs_and_gradients(name, scale=-0.5) for name in ("xla", "reference"))

    @hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
    @hypothesis.given(st.lists(st.integers(0, 4), min_size=42, max_size=42), st.booleans())
    @hypothesis.example(list(range(42)), False)
    def check(ids, in_order):
        ids = np.array(ids).reshape(2, 21)
        ids = np.sort(ids, axis=1) if in_order else ids
        with jax.enable_x64(True):
            for a, b in zip(tiled(k, k, v, ids), whole(k, k, v, ids)):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)

    check()


def test_tiles_inside_other_transformations(monkeypatch):
    """Mapped, rematerialised, in a loop, in a shard: what the layers of a model do with it."""
    monkeypatch.setattr(xla, "TILE", 16)
    q, k, v, ids = map(jnp.asarray, example(37, True))

    def loss(implementation, q, k, v):
        one = lambda *rows: attention(*(x[None] for x in rows[:3]), scale=0.5, segment_ids=rows[3][None],
                                      implementation=implementation)[0][0]

        @jax.checkpoint
        def layer(v, _):
            return jax.vmap(one)(q, k, v, ids), None

        mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
        run = jax.shard_map(lambda v: jax.lax.scan(layer, v, None, length=2)[0], mesh=mesh,
                            in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False)
        return jnp.sin(run(v)).sum()

    found, expected = (jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)(name, q, k, v)
                       for name in ("xla", "reference"))
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("T", [513, 1200, 2048])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_long_rows_as_they_are(T, dtype):
    """The real tile, packed documents: float64 elementwise; bfloat16 as near to float64 as the whole score matrix."""
    q, k, v, ids = example(T, True, np.float64)
    with jax.enable_x64(True):
        exact = outputs_and_gradients("reference")(q, k, v, ids)
        narrow = [jnp.asarray(x, dtype) for x in (q, k, v)]
        found, whole = (outputs_and_gradients(name)(*narrow, ids) for name in ("xla", "reference"))
        assert [x.dtype for x in found] == [x.dtype for x in whole]
    wide = lambda x: np.asarray(x).astype(np.float64)
    error = lambda xs: [float(np.abs(wide(x) - wide(y)).max()) for x, y in zip(xs, exact)]
    if dtype == "float64":
        assert max(error(found)) < 1e-11
    else:
        assert all(a <= 1.5 * b + 1e-6 for a, b in zip(error(found), error(whole)))


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_runs_are_rows_of_the_whole(packed):
    """Runs of queries at any positions, over keys made from a source: the same rows of attention over everything."""
    q, k, v, ids = example(48, packed)
    up = np.random.default_rng(1).normal(size=(6, 4)).astype(np.float32)
    start = np.array([32, 8])
    cut = lambda x: jnp.stack([jnp.asarray(x)[:, s : s + 8] for s in start])
    expand = lambda up, k: (k, k @ up)
    ids = None if ids is None else jnp.asarray(ids)

    def runs(q, k, up):
        rows = None if ids is None else cut(ids)
        o, top = attention_runs(expand, cut(q), jnp.asarray(start), rows, up, k, ids, scale=0.5)
        return (o**2).sum(), (o, top)

    def whole(q, k, up):
        o, _ = attention(q, k, k @ up, scale=0.5, segment_ids=ids, implementation="reference")
        return (cut(o) ** 2).sum(), cut(o)

    (_, (o, _)), found = jax.value_and_grad(runs, (0, 1, 2), has_aux=True)(q, k, up)
    (_, wanted), expected = jax.value_and_grad(whole, (0, 1, 2), has_aux=True)(q, k, up)
    for a, b in zip((o, *found), (wanted, *expected)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_queries_from_a_position_of_their_own_row():
    """Every row's from another one; keys behind the queries are old."""
    q, k, v, _ = example(48, False)
    start = np.array([8, 24])
    cut = lambda x: jnp.stack([x[b, s : s + 16] for b, s in enumerate(start)])
    old = [x.copy() for x in (k, v)]
    for x in old:
        for b, s in enumerate(start):
            x[b, s + 16 :] = 7
    want, _ = attention(*map(jnp.asarray, (q, k, v)), scale=0.5, implementation="reference")
    got, top = attention_from(cut(q), *map(jnp.asarray, (*old, start)), scale=0.5)
    np.testing.assert_allclose(got, cut(want), rtol=1e-5, atol=1e-6)
    logits = [[q[b, s + i, h] @ k[b, : s + i + 1, h].T for b, s in enumerate(start) for i in range(16)] for h in (0, 1)]
    np.testing.assert_allclose(top, [0.5 * max(x.max() for x in own) for own in logits], rtol=1e-5)


def test_a_chunk_of_one_cached_sequence_is_a_run_on_hopper(monkeypatch):
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    latents, q, k_up, v_up = draw(1, 64, 12), draw(1, 16, 2, 12), draw(8, 2, 8), draw(8, 2, 8)
    latents[:, 40:] = 1e4  # not there yet
    position = 24 + jnp.arange(16)[None]
    q, k_up, v_up = map(jnp.asarray, (q, k_up, v_up))
    read = lambda start, size: jax.lax.dynamic_slice_in_dim(jnp.asarray(latents), start, size, 1)
    call = lambda: cached.cached_attention(q, position, read, 64, jnp.int32(40), k_up, v_up, scale=0.3)
    expected = call()
    monkeypatch.setattr(cached, "RUN", 16)
    used = []
    monkeypatch.setattr(cached, "is_hopper", lambda: True)
    monkeypatch.setattr(cached.pallas_gpu, "runs", lambda *args: used.append(args) or blocks.runs(*args))
    np.testing.assert_allclose(call(), expected, rtol=1e-5, atol=1e-5)
    assert len(used) == 1

    def refuses(*args):
        raise NotImplementedError

    monkeypatch.setattr(cached.pallas_gpu, "runs", refuses)
    np.testing.assert_array_equal(call(), expected)

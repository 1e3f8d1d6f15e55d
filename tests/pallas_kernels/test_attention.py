"""Attention: blocks of queries against the whole score matrix and against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import attention, attention_runs, blocks, cached, xla


def example(T, segments):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, T, 2, 6)).astype(np.float32) for _ in range(2))
    v = rng.normal(size=(2, T, 2, 4)).astype(np.float32)
    ids = np.sort(rng.integers(1, 4, (2, T)), axis=1) if segments else None
    return q, k, v, ids


@pytest.mark.parametrize("T, segments", [(1, False), (16, True), (37, True), (48, False)])
def test_values_and_gradients(T, segments, monkeypatch):
    monkeypatch.setattr(xla, "QUERIES", 16)
    q, k, v, ids = example(T, segments)
    ids_or_ones = np.ones((2, T), int) if ids is None else ids
    logits = np.einsum("bqhk,bthk->bhqt", q, k).astype(np.float64) * 0.5
    t = np.arange(T)
    visible = (t[:, None] >= t) & (ids_or_ones[:, :, None] == ids_or_ones[:, None, :])
    logits = np.where(visible[:, None], logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum("bhqt,bthv->bqhv", p / p.sum(-1, keepdims=True), v)

    def f(implementation):
        def loss(q, k, v):
            o, top = attention(q, k, v, scale=0.5, segment_ids=None if ids is None else jnp.asarray(ids),
                               implementation=implementation)
            return jnp.sin(o).sum(), (o, top)
        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*map(jnp.asarray, (q, k, v)))

    (_, (o, top)), grads = f("xla")
    (_, (o_ref, _)), grads_ref = f("reference")
    np.testing.assert_allclose(o, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(o_ref, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(top, logits.max((0, 2, 3)), rtol=1e-5)
    for a, b in zip(grads, grads_ref):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
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

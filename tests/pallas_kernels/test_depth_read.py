"""The depth read: XLA's form and the interpreted Triton kernel against the training layers' own functions."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.depth_read import depth_read, pallas_gpu, xla
from trillium_moe.model.attn_res import read
from trillium_moe.model.norms import rms_norm

M, D, EPS = 3, 48, 1e-5
HOW = [xla.depth_read, functools.partial(pallas_gpu.depth_read, interpret=True)]


@pytest.mark.parametrize("how", HOW, ids=["xla", "pallas_gpu"])
@pytest.mark.parametrize("n, reads, new", [(0, True, False), (3, True, True), (2, False, True)])
def test_read_is_the_training_layers(how, n, reads, new):
    """bfloat16 sums of 48 channels, of very different sizes; the same roundings in the same places."""
    rng = np.random.default_rng(n)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    query = jnp.asarray(rng.normal(size=D), jnp.float32) if reads else None
    sealed, live, added = tuple(10.0**i * draw(M, D) for i in range(n)), draw(M, D), draw(M, D) if new else None
    norm = jnp.asarray(rng.normal(size=D), jnp.float32)
    x, total = how(query, sealed, live, added, norm, EPS)
    want = live + added if new else live
    np.testing.assert_array_equal(np.asarray(total, np.float32), np.asarray(want, np.float32))
    h = want
    if reads:
        stacked = jnp.stack([*sealed, jnp.zeros_like(live)])[:, :, None]
        h = read(query, stacked, n, want[:, None], True, EPS)[0][:, 0]
    raw, _ = how(query, sealed, live, added, None, EPS)
    for got, y in ((x, rms_norm(h, norm, EPS)), (raw, h)):
        got, y = np.asarray(got, np.float64), np.asarray(y, np.float64)
        assert np.linalg.norm(got - y) < 3e-3 * np.linalg.norm(y)  # a rounding here and there


def test_a_first_sum_needs_no_other():
    new = jnp.ones((M, D), jnp.bfloat16)
    x, live = depth_read(None, (), None, new, jnp.full(D, 2.0), EPS)
    np.testing.assert_array_equal(np.asarray(live, np.float32), 1)
    np.testing.assert_allclose(np.asarray(x, np.float32), 2, rtol=1e-2)


def test_kernel_refuses_what_it_cannot_serve():
    x = jnp.ones((M, D), jnp.float32)
    with pytest.raises(NotImplementedError, match="1 float32 sums of 48"):
        depth_read(None, (), x, None, jnp.ones(D), EPS, implementation="pallas_gpu")

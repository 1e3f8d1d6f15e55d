"""MXFP4: decoding against a scalar decoder, packing against the nearest value, products of packed matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.mxfp4 import Packed, pack, unpack

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PACK, UNPACK = jax.jit(pack), jax.jit(unpack, static_argnums=2)


def scalar(byte: int, high: int, scale: int) -> float:
    """One element, by the definition."""
    code = byte >> 4 if high else byte & 15
    value = MAGNITUDES[code & 7] * (-1.0 if code & 8 else 1.0)
    return float("nan") if scale == 255 else value * 2.0 ** (scale - 127)


@pytest.mark.parametrize("dtype, smallest", [(jnp.float32, 0.0), (jnp.bfloat16, 2.0**-133)])
def test_every_code_at_every_scale(dtype, smallest):
    codes = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8), 16)[:, None]
    want = np.array([[scalar(int(b), high, int(s[0])) for b in row for high in (0, 1)]
                     for row, s in zip(codes, scales)])
    got = np.asarray(UNPACK(codes, scales, dtype))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = want.astype(got.dtype)
    exact = np.isnan(want) | (np.abs(want) >= smallest) | (want == 0)
    same = (got == rounded) & (np.signbit(got.astype(float)) == np.signbit(want)) | np.isnan(want) & np.isnan(got)
    assert (same | ~exact).all() and exact.mean() > 0.99


groups = hnp.arrays(np.float32, (2, 64), elements=st.floats(-(2.0**20), 2.0**20, width=32, allow_subnormal=False))


@given(groups)
@settings(max_examples=40, deadline=None)
def test_packing_takes_the_nearest_value(w):
    codes, scales = PACK(w)
    got = np.asarray(UNPACK(codes, scales, jnp.float32), np.float64).reshape(-1, 32)
    for row, scale, out in zip(np.float64(w).reshape(-1, 32), np.asarray(scales).reshape(-1), got):
        largest = np.abs(row).max()
        assert scale == (max(np.floor(np.log2(largest)) + 125, 0) if largest >= 2.0**-126 else 0)
        if largest >= 2.0**-120:
            grid = np.array([s * m for m in MAGNITUDES for s in (1, -1)]) * 2.0 ** (float(scale) - 127)
            nearest = np.abs(row[:, None] - grid).min(1)
            np.testing.assert_array_equal(np.abs(row - out), nearest)
    again = PACK(got.reshape(w.shape).astype(np.float32))
    tops = np.abs(got).max(1) * 2.0 ** (127 - np.asarray(scales, np.float64).reshape(-1))
    if (tops >= 4).all():  # else a smaller scale holds the same values
        np.testing.assert_array_equal(UNPACK(*again, jnp.float32), got.reshape(w.shape))


def test_ties_go_to_the_even_code_and_eight_saturates():
    w = np.zeros(32, np.float32)
    w[:10] = 4, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7.99, -0.25
    out = UNPACK(*PACK(w[None]), jnp.float32)[0]
    np.testing.assert_array_equal(out[:10], [4, 0, 1, 1, 2, 2, 4, 4, 6, -0.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(bad):
    w = np.ones((1, 64), np.float32)
    w[0, 40] = bad
    out = np.asarray(UNPACK(*PACK(w), jnp.float32))
    assert np.isnan(out[0, 32:]).all() and (out[0, :32] == 1).all()


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="multiple of 32"):
        pack(jnp.zeros((2, 48)))
    with pytest.raises(ValueError, match="groups of 32"):
        unpack(jnp.zeros((2, 32), jnp.uint8), jnp.zeros((2, 3), jnp.uint8))


def packed_matrices(rng, G, K, N):
    """Random packed matrices, and their values [G, K, N]."""
    codes = rng.integers(0, 256, (G, N, K // 2), np.uint8)
    scales = rng.integers(120, 128, (G, K // 32, N), np.uint8)
    flat = [[[scalar(int(b), high, int(scales[g, k // 16, n])) for k, b in enumerate(codes[g, n]) for high in (0, 1)]
             for n in range(N)] for g in range(G)]
    return Packed(jnp.asarray(codes), jnp.asarray(scales)), np.array(flat, np.float32).transpose(0, 2, 1)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_products_of_packed_matrices(implementation):
    rng, sizes = np.random.default_rng(0), jnp.array([8, 0, 24])
    w, values = packed_matrices(rng, 3, 64, 32)
    x, d = (rng.normal(size=(40, n)).astype(np.float32) for n in (64, 32))
    x[32:] = np.nan  # rows that no group owns
    op = lambda x: grouped_matmul(x, w, sizes, align=8, implementation=implementation)
    out, vjp = jax.vjp(op, x)
    want = np.concatenate([x[:8] @ values[0], x[8:32] @ values[2], np.zeros((8, 32), np.float32)])
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
    d_x = np.concatenate([d[:8] @ values[0].T, d[8:32] @ values[2].T, np.zeros((8, 64), np.float32)])
    np.testing.assert_allclose(vjp(jnp.asarray(d))[0], d_x, rtol=2e-5, atol=2e-5)


def test_expert_ffn_of_packed_matrices_is_that_of_their_values():
    rng, sizes = np.random.default_rng(1), jnp.array([16, 0, 8])
    packed, values = zip(*(packed_matrices(rng, 3, *shape) for shape in ((64, 32), (64, 32), (32, 64))))
    x, weight = (jnp.asarray(a, jnp.float32) for a in (rng.normal(size=(24, 64)), rng.uniform(size=24)))
    op = lambda x, weight, w: expert_ffn(x, weight, sizes, *w, align=8, implementation="xla")
    got, want = (jax.vjp(lambda x, p, w=w: op(x, p, w), x, weight) for w in (packed, map_float(values)))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)
    for a, b in zip(got[1](want[0]), want[1](want[0])):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def map_float(values):
    return [jnp.asarray(v) for v in values]

"""Sequences cut over eight devices: every mixer against itself on one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda as kda_op
from pallas_kernels.kda import kda_gated, log_decay, unit
from pallas_kernels.kda.affine import affine_map
from pallas_kernels.kda_decode import kda_decode
from tests.meshes import mesh
from trillium_moe.model.conv import short_conv
from trillium_moe.parallel import context

B, T, H, K, V = 2, 256, 2, 16, 8
# a document inside one device's 32 tokens, one over several devices, one that starts exactly where a device does,
# one of a single token at a device's end, padding
DOCUMENTS = {
    "none": None,
    "crossing": [[1] * 5 + [2] * 20 + [3] * 103 + [4] * 63 + [5] + [6] * 64, [1] * 200 + [0] * 56],
    "aligned": [[1] * 32 + [2] * 32 + [3] * 192, [1] * 256],
}


def kda_inputs(dtype, seed=0):
    """What `kda_gated` takes, and a state."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, T, H, K))
    open_ = np.exp(rng.uniform(-7, 1.6, (B, T, H, K))) / 5  # from a memory of a thousand tokens to -5 a token
    slope, bias = rng.uniform(0.5, 2, H), rng.normal(size=(H, K))
    z = np.log(open_ / (1 - open_)) / slope[:, None] - bias
    arrays = q, k, rng.normal(size=(B, T, H, V)), z, 2 * rng.normal(size=(B, T, H)), np.log(slope), bias
    return [jnp.asarray(a, dtype) for a in arrays], jnp.asarray(rng.normal(size=(B, H, K, V)), dtype)


def differences(a, b):
    return max(float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(y).max(), 1e-30)) for x, y in zip(a, b, strict=True))


def pull_back(f, args, seed=1):
    """Outputs of f and the gradients of its arguments for random cotangents, jitted."""
    def run(args):
        out, vjp = jax.vjp(f, *args)
        rng = np.random.default_rng(seed)
        d = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), out)
        return [*jax.tree.leaves(out), *jax.tree.leaves(vjp(d))]
    return jax.jit(run)(args)


@pytest.mark.parametrize("documents, dtype, tolerance, axes", [
    ("none", "float64", 1e-10, {"context": 8}),
    ("crossing", "float64", 1e-10, {"context": 8}),
    ("aligned", "float64", 1e-10, {"context": 8}),
    ("crossing", "float32", 1e-4, {"context": 4, "model": 2}),
], ids=str)  # fmt: skip
def test_kda_over_devices(documents, dtype, tolerance, axes):
    """Outputs, final state, and the gradients of every input and of the initial state."""
    with jax.enable_x64(dtype == "float64"):
        ids = None if DOCUMENTS[documents] is None else jnp.asarray(DOCUMENTS[documents])
        x, state = kda_inputs(dtype)
        call = lambda op: lambda *a: op(*a[:7], initial_state=a[7], segment_ids=ids, g_min=-5.0)
        expected = pull_back(call(kda_gated), [*x, state])
        with jax.set_mesh(mesh(**axes)):
            found = pull_back(call(context.kda_gated), [*x, state])
        names = ("o", "final", "q", "k", "v", "decay_logits", "beta_logits", "a_log", "dt_bias", "initial")
        for name, a, b in zip(names, found, expected, strict=True):
            assert differences([a], [b]) < tolerance, name


def test_kda_step_over_devices():
    """A decoding step: heads over one axis, sequences over two, one of which has no token."""
    rng = np.random.default_rng(3)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    B, H = 4, 4
    arrays = [normal(B, 3, H, K), normal(B, H, K), normal(B, H), normal(B, H, K), normal(B, 3, 3, H, K)]
    weights = {"conv": normal(3, H, K, 4), "a_log": normal(H), "dt_bias": normal(H, K), "out_norm": normal(K)}
    run = lambda op: jax.jit(lambda *a: op(*a, **weights, active=jnp.arange(B) != 2, g_min=-5.0))
    args = (*arrays, normal(B, H, K, K))
    expected = run(kda_decode)(*args)
    with jax.set_mesh(mesh(data=2, expert=2, model=2)):
        found = run(context.kda_decode)(*args)
    assert differences(found, expected) < 1e-6


@pytest.mark.slow
def test_kda_in_bfloat16_keeps_its_rounding_error():
    """The maps add no error that one pass in bfloat16 does not have."""
    x, state = kda_inputs("float32")
    low = [*(a.astype(jnp.bfloat16) for a in x[:3]), *x[3:]]
    exact = pull_back(lambda *a: kda_gated(*a)[0], [*(a.astype(jnp.float32) for a in low[:3]), *x[3:]])
    one = pull_back(lambda *a: kda_gated(*a)[0].astype(jnp.float32), low)
    with jax.set_mesh(mesh(context=4)):
        cut = pull_back(lambda *a: context.kda_gated(*a, g_min=-5.0)[0].astype(jnp.float32), low)
    for a, b, c in zip(one, cut, exact, strict=True):
        rms = lambda e, c=c: float(jnp.sqrt(jnp.mean((e.astype(jnp.float32) - c) ** 2)))
        assert rms(b) < 1.5 * rms(a) + 1e-6


def test_affine_map_is_the_token_product():
    with jax.enable_x64(True):
        (_, k, v, z, b, a_log, bias), state = kda_inputs("float64")
        k, g, beta = unit(k), log_decay(z, a_log, bias, -5.0), jax.nn.sigmoid(b)
        maps = jax.jit(lambda ids: affine_map(
            lambda v, entry: kda_op(k, k, v, g, beta, initial_state=entry, segment_ids=ids), k, v
        ))  # fmt: skip
        M, N = maps(jnp.ones((B, T), jnp.int32))
        product = np.broadcast_to(np.eye(K), M.shape)
        for t in range(T):
            k_t = np.asarray(k[:, t])
            erase = np.eye(K) - beta[:, t, :, None, None] * k_t[..., :, None] * k_t[..., None, :]
            product = erase @ (np.exp(g[:, t])[..., None] * product)
        np.testing.assert_allclose(M, product, atol=1e-13)
        final = kda_op(k, k, v, g, beta, initial_state=state, implementation="reference")[1]
        np.testing.assert_allclose(M @ state + N, final, atol=1e-12)
        np.testing.assert_array_less(np.linalg.norm(np.asarray(M), 2, axis=(-2, -1)), 1 + 1e-12)
        two = jnp.asarray([[1] * 100 + [2] * 156, [1] * 256])
        M, _ = maps(two)
        assert not M[0].any() and M[1].any()


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_short_convolution_takes_its_past_from_the_neighbour(documents):
    ids = None if DOCUMENTS[documents] is None else jnp.asarray(DOCUMENTS[documents])
    x = kda_inputs("float32")[0][0]
    w = jnp.asarray(np.random.default_rng(2).normal(size=(H, K, 4)), jnp.float32)
    f = lambda x, w: short_conv(x, w, ids)
    expected = pull_back(f, [x, w])
    with jax.set_mesh(mesh(context=8)):
        found = pull_back(f, [x, w])
    np.testing.assert_array_equal(found[0], expected[0])
    assert differences(found, expected) < 1e-5
    with jax.set_mesh(mesh(context=8)), pytest.raises(ValueError, match="use at least 24 tokens"):
        short_conv(x[:, :16], w)


@pytest.mark.parametrize("documents, axes", [
    ("none", {"context": 8}),
    ("crossing", {"context": 8}),
    ("aligned", {"context": 4, "model": 2}),
    ("crossing", {"data": 2, "model": 2}),
    ("crossing", {"context": 3}),  # odd: the causal halves are not exchanged
], ids=str)  # fmt: skip
def test_latent_attention_over_devices(documents, axes):
    with jax.enable_x64(True):
        n = T - T % axes.get("context", 1)
        ids = None if DOCUMENTS[documents] is None else jnp.asarray(DOCUMENTS[documents])[:, :n]
        rng = np.random.default_rng(0)
        normal = lambda *shape: jnp.asarray(rng.normal(size=shape))
        args = [normal(B, n, H, 12), normal(B, n, 16), normal(B, n, 4), normal(16, H, 8), normal(16, H, V)]
        f = lambda *a: context.latent_attention(*a, scale=0.3, segment_ids=ids)
        expected = pull_back(f, args)
        with jax.set_mesh(mesh(**axes)):
            found = pull_back(f, args)
        for a, b in zip(found, expected, strict=True):
            assert differences([a], [b]) < 1e-12


def test_a_length_that_does_not_divide_is_named():
    x, state = kda_inputs("float32")
    with jax.set_mesh(mesh(context=8)), pytest.raises(ValueError, match="252.*mesh.context=8; use 248 or 256"):
        context.kda_gated(*(a[:, :252] for a in x[:5]), *x[5:], g_min=-5.0)

"""Ops for few rows: XLA's forms and the interpreted Triton kernels against NumPy, and that rows do not meet."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import few_rows
from pallas_kernels.attention import gpu_decode
from pallas_kernels.expert_ffn.activation import Activation
from pallas_kernels.few_rows import pallas_gpu, xla
from tests.pallas_kernels.test_kda_tpu import absent_mesh

interpreted = {name: functools.partial(getattr(pallas_gpu, name), interpret=True)
               for name in ("linear", "heads", "route", "experts", "join")}  # fmt: skip
HOW = pytest.mark.parametrize("how", ["xla", "pallas_gpu"])


def op(how, name):
    return interpreted[name] if how == "pallas_gpu" else getattr(xla, name)


def normal(*shape, seed=0, dtype=jnp.bfloat16, std=1.0):
    return jnp.asarray(std * np.random.default_rng(seed).normal(size=shape), dtype)


def exact(x):
    return np.asarray(x, np.float64)


def error(got, want):
    return np.linalg.norm(exact(got) - want) / np.linalg.norm(want)


@HOW
def test_one_product_gives_every_matrix(how):
    """Sizes that fill no tile; a float32 matrix by its bfloat16 parts, to float32's rounding."""
    x, matrices = normal(20, 128), [normal(128, n, seed=n, dtype=jnp.float32) for n in (72, 8, 40)]
    router = few_rows.exact(matrices[2], jnp.bfloat16)
    packed = few_rows.pack([*matrices[:2], router], jnp.bfloat16)
    got = op(how, "linear")(x, packed, (72, 8, 120), (jnp.bfloat16, jnp.bfloat16, jnp.float32), None, 0.0, 32)
    assert [y.shape for y in got] == [(20, 72), (20, 8), (20, 120)]
    for y, w in zip(got, matrices[:2]):
        assert error(y, exact(x) @ exact(w.astype(jnp.bfloat16))) < 2**-8
    assert error(exact(got[2]).reshape(20, 3, 40).sum(1), exact(x) @ exact(matrices[2])) < 3e-7


@HOW
def test_rows_are_normed_first(how):
    x, w, norm = normal(3, 192, std=7.0), normal(192, 32, seed=1), normal(192, seed=2, dtype=jnp.float32)
    (got,) = op(how, "linear")(x, few_rows.pack([w], jnp.bfloat16), (32,), (jnp.float32,), norm, 1e-5, 32)
    normed = exact(x) / np.sqrt((exact(x) ** 2).mean(-1, keepdims=True) + 1e-5) * exact(norm)
    assert error(got, normed @ exact(w)) < 1e-2  # three roundings to bfloat16


@HOW
def test_heads_with_a_gate(how):
    x, w, gate = normal(5, 3, 80), normal(3, 64, 64, seed=1), normal(5, 3, 64, seed=2)
    want = np.einsum("mhi,hoi->mho", exact(x)[..., :64], exact(w))
    run = op(how, "heads")
    assert error(run(x, w, None), want) < 2**-8
    assert error(run(x, w, gate), want / (1 + np.exp(-exact(gate)))) < 2**-8


@HOW
def test_routing_is_the_routers(how):
    """Ties go to the lower index, biases choose but do not weigh, parts of logits add up."""
    logits = normal(4, 24, dtype=jnp.float32).at[1].set(0.5)
    bias = normal(24, seed=1, dtype=jnp.float32, std=0.1).at[3].set(-jnp.inf)
    parts = jnp.concatenate([logits - 1, jnp.ones_like(logits)], axis=1)
    got, slots = map(exact, op(how, "route")(parts, bias, 5, 2.5))
    score = 1 / (1 + np.exp(-exact(logits)))
    want = np.zeros((24, 4))
    for m in range(4):
        chosen = np.argsort(-(score[m] + exact(bias)), kind="stable")[:5]
        want[chosen, m] = 2.5 * score[m, chosen] / score[m, chosen].sum()
        np.testing.assert_array_equal(np.sort(slots[chosen, m]), range(5))
    np.testing.assert_array_equal(got > 0, want > 0)
    np.testing.assert_array_equal(slots < 0, want == 0)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@HOW
@pytest.mark.parametrize("activation", [Activation(), Activation("swiglu")], ids=["situ", "swiglu"])
def test_experts_are_a_loop_over_choices(how, activation):
    E, M, L, F = 70, 3, 64, 192  # three runs of hidden channels; most experts are taken by no row
    z, p = normal(M, L), np.zeros((E, M), np.float32)
    for m, chosen in enumerate(([0, 2, 69], [2, 33, 35], [35, 34, 68])):
        p[chosen, m] = [0.5, 0.3, 0.2]
    w = normal(E, L, F, seed=1, std=0.2), normal(E, L, F, seed=2, std=0.2), normal(E, F, L, seed=3, std=0.2)
    got = op(how, "experts")(z, jnp.asarray(p), few_rows.slots(jnp.asarray(p) > 0), 3, *w, activation).sum(0)
    want = np.zeros((M, L))
    for e, m in np.argwhere(p):
        gate, up = (exact(z)[m] @ exact(x)[e] for x in w[:2])
        sigmoid = 1 / (1 + np.exp(-gate))
        hidden = gate * sigmoid * up
        if activation.name == "situ":
            hidden = 4 * np.tanh(gate / 4) * sigmoid * 25 * np.tanh(up / 25)
        want[m] += p[e, m] * hidden @ exact(w[2])[e]
    assert got.dtype == jnp.float32 and error(got, want) < 6e-3


def test_a_row_is_the_same_in_any_company():
    """Bit for bit, where others take other experts and hold other numbers of keys."""
    z, w = normal(4, 64), (normal(40, 64, 64, seed=1), normal(40, 64, 64, seed=2), normal(40, 64, 64, seed=3))
    p = np.zeros((40, 4), np.float32)
    p[[3, 17], 0] = p[[2, 16], 1:] = 0.5
    other = p.copy()
    other[[2, 16], 1:], other[[3, 18], 1:] = 0.0, 0.5
    run = jax.jit(lambda z, p: interpreted["experts"](z, p, few_rows.slots(p > 0), 2, *w, Activation()))
    scaled = z * jnp.array([[1], [3], [5], [7]], z.dtype)
    np.testing.assert_array_equal(run(z, jnp.asarray(p))[:, 0], run(scaled, jnp.asarray(other))[:, 0])


@HOW
@pytest.mark.parametrize("normed", [True, False])
def test_parts_are_joined_with_the_shared_experts(how, normed):
    parts, (gate, up) = normal(5, 3, 96, dtype=jnp.float32, std=3.0), (normal(3, 40, seed=n) for n in (1, 2))
    norm = normal(96, seed=3, dtype=jnp.float32) if normed else None
    got = op(how, "join")(parts, norm, 1e-5, gate, up, Activation("swiglu"))
    u, gate, up = exact(parts).sum(0), exact(gate), exact(up)
    if normed:
        u = u / np.sqrt((u**2).mean(-1, keepdims=True) + 1e-5) * exact(norm)
    assert got.dtype == jnp.bfloat16
    assert error(got[:, :96], u) < 6e-3 and error(got[:, 96:], gate / (1 + np.exp(-gate)) * up) < 4e-3


def test_tanh_is_exact_where_exponentials_cancel():
    """Also of the smallest numbers: a last digit lost here is another bfloat16 number than in training."""
    x = np.concatenate([np.linspace(-9, 9, 20_001), np.logspace(-30, 0, 2_000)]).astype(np.float32)
    want = np.tanh(x.astype(np.float64))
    np.testing.assert_allclose(pallas_gpu._tanh(jnp.asarray(x)), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("programs", [264, 8, 4], ids=["six runs of 32", "two read at once", "one of six blocks"])
def test_attention_over_latents(programs, monkeypatch):
    """A token after none, after part of a run, and the last there is room for; a full sequence without one."""
    monkeypatch.setattr(gpu_decode, "PROGRAMS", programs)
    B, H, C, R, P, N, V = 4, 3, 192, 64, 16, 64, 64
    q, kv, latents, gate = normal(B, H, N + P), normal(B, R + P, seed=5), normal(B, C, R + P, seed=1), normal(B, H, V)
    k_up, v_up = normal(H, R, N, seed=3, std=0.2), normal(H, V, R, seed=4, std=0.2)
    norm, length = normal(R, seed=6, dtype=jnp.float32), np.array([0, 99, 191, 192], np.int32)
    active = np.array([1, 1, 1, 0], np.int32)
    run = functools.partial(gpu_decode.latent_decode, interpret=True)
    got, after = run(q, kv, norm, 1e-6, latents, *map(jnp.asarray, (length, active)), k_up, v_up, gate, 0.1)
    cache, new = exact(latents).copy(), exact(kv)
    new[:, :R] *= exact(norm) / np.sqrt((new[:, :R] ** 2).mean(-1, keepdims=True) + 1e-6)
    for b in range(3):
        assert error(after[b, length[b]], new[b]) < 2**-7
        cache[b, length[b]] = exact(after[b, length[b]])
    np.testing.assert_array_equal(exact(after), cache)
    for b in range(3):
        c, rope = np.split(cache[b, : length[b] + 1], [R], axis=-1)
        for h in range(H):
            keys = np.concatenate([c @ exact(k_up)[h], rope], axis=-1)
            logits = 0.1 * keys @ exact(q)[b, h]
            probs = np.exp(logits - logits.max())
            want = probs / probs.sum() @ c @ exact(v_up)[h].T / (1 + np.exp(-exact(gate)[b, h]))
            assert error(got[b, h], want) < 2e-2, (b, h)


@pytest.mark.parametrize("call, message", [
    (lambda: few_rows.linear(normal(2, 64), normal(64, 64), (20,)), "sizes"),
    (lambda: few_rows.linear(normal(2, 64, dtype=jnp.float32), normal(32, 64), (20,), implementation="pallas_gpu"),
     "rows are float32"),
    (lambda: few_rows.experts(normal(65, 64), few_rows.Routes(*[normal(2, 65)] * 2), 1, *[normal(2, 64, 64)] * 3,
                              implementation="pallas_gpu"),
     "at most 64"),
])  # fmt: skip
def test_refusals_name_their_reason(call, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        call()


@pytest.mark.aot
@pytest.mark.parametrize("M, L, F", [(1, 64, 192), (32, 512, 512), (64, 2304, 1024)])
def test_experts_compile(M, L, F):
    """The widths of `large` and of the released 48B model, and one that fills no run of channels."""
    mesh, E, k = absent_mesh("h200:1"), 16, 4
    where = jax.sharding.NamedSharding(mesh, jax.P())
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype, sharding=where)
    args = shape(M, L), shape(M, E, dtype=jnp.float32), shape(E, dtype=jnp.float32)
    weights = shape(E, L, F), shape(E, L, F), shape(E, F, L)

    def run(z, logits, bias, *w):
        return few_rows.experts(z, few_rows.route(logits, bias, k=k), k, *w, implementation="pallas_gpu")

    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(*args, *weights).compile()
    assert compiled.out_info.shape[0] % k == 0 and compiled.out_info.shape[1:] == (M, L)

"""Expert feed-forward op: values and gradients against experts one by one in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_ffn import Activation, expert_ffn

NAMES = ("y", "d_x", "d_weight", "d_w_gate", "d_w_up", "d_w_down")


def example(sizes, D=6, F=10, spare=8, seed=0):
    rng = np.random.default_rng(seed)
    M, G = sum(sizes) + spare, len(sizes)
    shapes = (M, D), (M,), (G, D, F), (G, D, F), (G, F, D), (M, D)
    x, weight, *matrices, d_y = (rng.normal(size=shape) for shape in shapes)
    return x, np.abs(weight), *matrices, d_y


def oracle(sizes, activation, x, weight, w_gate, w_up, w_down, d_y):
    """In NAMES' order; one dense network per expert, differentiated by JAX in float64."""

    def f(x, weight, w_gate, w_up, w_down):
        y, start = jnp.zeros_like(x), 0
        for g, size in enumerate(sizes):
            rows = slice(start, start + size)
            hidden = activation(x[rows] @ w_gate[g], x[rows] @ w_up[g])
            y = y.at[rows].set(weight[rows, None] * (hidden @ w_down[g]))
            start += size
        return y

    with jax.enable_x64(True):
        y, vjp = jax.vjp(f, *(jnp.asarray(a, jnp.float64) for a in (x, weight, w_gate, w_up, w_down)))
        return [np.asarray(a) for a in (y, *vjp(jnp.asarray(d_y, jnp.float64)))]


def evaluate(sizes, align, activation, implementation, dtype, x, weight, w_gate, w_up, w_down, d_y):
    how = {"align": align, "activation": activation, "implementation": implementation}
    x, w_gate, w_up, w_down, d_y = (jnp.asarray(a, dtype) for a in (x, w_gate, w_up, w_down, d_y))
    sizes = jnp.asarray(sizes, jnp.int32)

    @jax.jit
    def both(d_y, *inputs):
        y, vjp = jax.vjp(lambda x, p, *w: expert_ffn(x, p, sizes, *w, **how), *inputs)
        return y, *vjp(d_y)

    return both(d_y, x, jnp.asarray(weight, jnp.float32), w_gate, w_up, w_down)


@pytest.mark.parametrize("sizes", [[8, 0, 8, 0], [0, 24, 0], [8, 16, 32]])
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_values_and_gradients(implementation, sizes):
    inputs = example(sizes)
    got = evaluate(sizes, 8, Activation(), implementation, jnp.float32, *inputs)
    for name, a, b in zip(NAMES, got, oracle(sizes, Activation(), *inputs)):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4, err_msg=name)


def test_swiglu_and_other_caps():
    for activation in (Activation("swiglu"), Activation(beta=1.5, linear_beta=2.0)):
        inputs = example([8, 16])
        got = evaluate([8, 16], 8, activation, "xla", jnp.float32, *inputs)
        for name, a, b in zip(NAMES, got, oracle([8, 16], activation, *inputs)):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4, err_msg=name)


def test_results_are_not_kept():
    """The gradient of the weights comes from <d activation, activation>: no [M, D] but x and no activation is saved."""
    M, D, F, G = 16, 6, 10, 2
    inputs = [jnp.zeros(s) for s in ((M, D), (M,), (G, D, F), (G, D, F), (G, F, D))]
    op = lambda x, p, *w: expert_ffn(x, p, jnp.array([8, 8]), *w, align=8)
    _, vjp = jax.vjp(op, *inputs)
    kept = sorted(x.shape for x in jax.tree.leaves(vjp) if x.ndim == 2)
    assert kept == [(M, D), (M, F), (M, F)]


def test_bad_calls_are_refused():
    with pytest.raises(ValueError, match="situ or swiglu"):
        Activation("relu")
    inputs = example([8], spare=2)[:5]
    with pytest.raises(ValueError, match="align=8 must divide the 10 rows"):
        x, weight, *matrices = (jnp.asarray(a, jnp.float32) for a in inputs)
        expert_ffn(x, weight, jnp.array([8]), *matrices, align=8)

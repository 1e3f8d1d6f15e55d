"""Every implementation against numbers of fla-core's naive recurrence in float64 (tests/golden/kda_ops/README.md)."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from pallas_kernels.kda import kda

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "kda_ops"
INPUTS = ("q", "k", "v", "g", "beta")


@functools.partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def value_and_gradients(implementation, inputs, initial_state, segment_ids, d_o, d_state):
    def functional(inputs, initial_state):
        o, state = kda(
            *inputs, initial_state=initial_state, segment_ids=segment_ids, implementation=implementation
        )
        return (o * d_o).sum() + (state * d_state).sum(), (o, state)

    (_, values), gradients = jax.value_and_grad(functional, argnums=(0, 1), has_aux=True)(
        inputs, initial_state
    )
    return values, gradients


def relative_error(got, want):
    """Largest error over largest value; where all are zero (dg of a first token) the largest error."""
    return np.abs(np.asarray(got, np.float64) - want).max() / (np.abs(want).max() or 1.0)


def test_all_cases_are_here():
    assert len(list(GOLDEN.glob("*.safetensors"))) == 16


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("reference", np.float64),
        pytest.param("reference", np.float32, marks=pytest.mark.slow),
        ("xla", np.float64),
        ("xla", np.float32),
    ],
)
@pytest.mark.parametrize("case", sorted(path.stem for path in GOLDEN.glob("*.safetensors")))
def test_golden(case, implementation, dtype):
    data = load_file(GOLDEN / f"{case}.safetensors")
    B, T, H, K = data["q"].shape
    V = data["v"].shape[-1]
    packed = "cu_seqlens" in data
    with jax.enable_x64(dtype == np.float64):
        segment_ids, state_shape = None, (B, H, K, V)
        if packed:
            segment_ids = jnp.asarray(
                np.searchsorted(data["cu_seqlens"], np.arange(T), side="right")[None] - 1
            )
            state_shape = (1, len(data["cu_seqlens"]) - 1, H, K, V)
        initial_state = data.get("initial_state", np.zeros(state_shape)).reshape(state_shape)
        (o, state), (gradients, d_initial_state) = value_and_gradients(
            implementation,
            [jnp.asarray(data[name], dtype) for name in INPUTS],
            jnp.asarray(initial_state, dtype),
            segment_ids,
            jnp.asarray(data["do"], dtype),
            jnp.asarray(data["dfinal_state"].reshape(state_shape), dtype),
        )
        assert o.dtype == state.dtype == dtype

    values = {"o": o, "final_state": state}
    gradients = {f"grad_{name}": gradient for name, gradient in zip(INPUTS, gradients)}
    if "initial_state" in data:
        gradients["grad_initial_state"] = d_initial_state
    # The gradients, and all of K128, are stored rounded to float32.
    exact = 5e-7 if case == "K128" else 1e-12
    value_bound, gradient_bound = (5e-6, 2e-5) if dtype == np.float32 else (exact, 5e-7)
    errors = {
        name: relative_error(x, data[name].reshape(x.shape)) for name, x in (values | gradients).items()
    }
    assert all(errors[name] < value_bound for name in values), errors
    assert all(errors[name] < gradient_bound for name in gradients), errors

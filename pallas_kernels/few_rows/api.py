"""The public ops for few rows: one product for all matrices that share an input, routing, and routed experts.

A step of decoding is hundreds of kernels of a few microseconds, so what counts is how many there are: `linear` is one
product with several results, `route` ends in the weight of every expert for every row, and `experts` reads each
matrix of an expert that some row takes once, sorts nothing and forms the activation inside.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.dispatch import dispatch
from pallas_kernels.expert_ffn.activation import Activation
from pallas_kernels.few_rows import pallas_gpu, xla
from pallas_kernels.rounding import rounded, widened

ALIGN = 32  # rows of a packed matrix that every part starts at a multiple of

Dtype = Any  # what jnp.dtype takes


class Routes(NamedTuple):
    """Experts of some rows. Pytree fields are untyped: arrays or shapes."""

    weights_EM: Any  # of every expert for every row, at least float32; zero where not chosen
    slots_EM: Any  # int32, which of the row's own experts this one is, from 0; -1 where not chosen


def pack(matrices: list[Float[Array, "I _"]], dtype: Dtype) -> Float[Array, "O I"]:
    """Matrices that share their input, transposed, one below the other, for `linear`.

    Each is rounded to `dtype`; one that must not be goes through `exact` first.
    """
    rows = [jnp.pad(w.astype(dtype).T, ((0, -w.shape[1] % ALIGN), (0, 0))) for w in matrices]
    return jnp.concatenate(rows)


def exact_parts(dtype: Dtype) -> int:
    """Matrices of `dtype` that a float32 matrix is the sum of."""
    return 3 if jnp.dtype(dtype) == jnp.bfloat16 else 1


def exact(w_IO: Float[Array, "I O"], dtype: Dtype) -> Float[Array, "I _"]:
    """A float32 matrix as `exact_parts` matrices of `dtype` side by side, of which it is the sum to float32's rounding.

    Products of bfloat16 rows with them add up to those of the float32 matrix, at three times the bytes of one.
    """
    parts, rest = [], w_IO
    for _ in range(exact_parts(dtype)):
        parts.append(rounded(rest, dtype))
        rest = rest - widened(parts[-1])  # by casts alone XLA would take rest from itself, and leave zeros
    return jnp.concatenate(parts, axis=1)


def linear(
    x_MI: Float[Array, "M I"],
    w_OI: Float[Array, "O I"],
    sizes: tuple[int, ...],
    dtypes: tuple[Dtype, ...] = (),
    *,
    norm_I: Float[Array, " I"] | None = None,
    norm_eps: float = 1e-5,
    implementation: str | None = None,
) -> tuple[Float[Array, "M _"], ...]:
    """Products of x with several matrices.

    Args:
      w_OI: from `pack`.
      sizes: columns of each matrix.
      dtypes: of each result; by default that of x.
      norm_I: RMS-normalise x first and multiply it by this; rounded to x' dtype before and after the factor.
      norm_eps: added to the mean of squares.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      One result per matrix. Products accumulate in at least float32; a row's results do not depend on other rows.

    Raises:
      ValueError: sizes that are not those of w.
      NotImplementedError: a named implementation cannot serve the call.
    """
    if (needed := sum(size + -size % ALIGN for size in sizes)) != w_OI.shape[0]:
        raise ValueError(f"few_rows.linear: sizes {sizes} need a packed matrix of {needed} rows, not {w_OI.shape[0]}")
    dtypes = dtypes or (x_MI.dtype,) * len(sizes)
    implementations = {"xla": xla.linear, "pallas_gpu": pallas_gpu.linear}
    return dispatch(
        "few_rows.linear", implementations, implementation, x_MI, w_OI, sizes, dtypes, norm_I, norm_eps, ALIGN
    )


def heads(
    x_MHI: Float[Array, "M H X"],
    w_HOI: Float[Array, "H O I"],
    gate_MHO: Float[Array, "M H O"] | None = None,
    *,
    implementation: str | None = None,
) -> Float[Array, "M H O"]:
    """Products of every head of x with a matrix of its own, in x' dtype, times the sigmoid of `gate`'s logits.

    Args:
      x_MHI: may be wider than the I columns that are used, the first.
      implementation: see `pallas_kernels.dispatch`.
    """
    implementations = {"xla": xla.heads, "pallas_gpu": pallas_gpu.heads}
    return dispatch("few_rows.heads", implementations, implementation, x_MHI, w_HOI, gate_MHO)


def route(
    logits_MX: Float[Array, "M X"],
    bias_E: Float[Array, " E"],
    *,
    k: int,
    scale: float = 1.0,
    implementation: str | None = None,
) -> Routes:
    """The experts and weights of `pallas_kernels.router` (sigmoid=True).

    Args:
      logits_MX: float32 (or float64); several numbers per expert, E apart, are added up (products with `exact`).
      bias_E, k, scale, implementation: see `pallas_kernels.router.router`.
    """
    implementations = {"xla": xla.route, "pallas_gpu": pallas_gpu.route}
    return Routes(*dispatch("few_rows.route", implementations, implementation, logits_MX, bias_E, k, scale))


def experts(
    z_ML: Float[Array, "M L"],
    routes: Routes,
    k: int,
    w_gate_ELF: Float[Array, "E L F"],
    w_up_ELF: Float[Array, "E L F"],
    w_down_EFL: Float[Array, "E F L"],
    *,
    activation: Activation = Activation(),
    implementation: str | None = None,
) -> Float[Array, "G M L"]:
    """sum_e p_e activation(z w_gate_e, z w_up_e) w_down_e of every row, at least float32, as G sums to be added up.

    The weight multiplies the activation before it is rounded to z' dtype. Experts that no row takes are not read. A
    row's sums lie in its own slots, so that they do not depend on other rows.

    Args:
      routes: from `route`.
      k: experts of every row.
      implementation: see `pallas_kernels.dispatch`.
    """
    implementations = {"xla": xla.experts, "pallas_gpu": pallas_gpu.experts}
    weights = w_gate_ELF, w_up_ELF, w_down_EFL
    return dispatch("few_rows.experts", implementations, implementation, z_ML, *routes, k, *weights, activation)


def join(
    parts_GML: Float[Array, "G M L"],
    norm_L: Float[Array, " L"] | None,
    norm_eps: float,
    gate_MS: Float[Array, "M S"],
    up_MS: Float[Array, "M S"],
    *,
    activation: Activation = Activation(),
    implementation: str | None = None,
) -> Float[Array, "M _"]:
    """[rms_norm(sum of parts) norm, activation(gate, up)] of every row: what leads back to the model's width.

    Args:
      parts_GML: from `experts`; their sum is rounded to gate's dtype before the norm, and so is what is normed.
      norm_L: None: no norm.
      implementation: see `pallas_kernels.dispatch`.
    """
    implementations = {"xla": xla.join, "pallas_gpu": pallas_gpu.join}
    args = parts_GML, norm_L, norm_eps, gate_MS, up_MS, activation
    return dispatch("few_rows.join", implementations, implementation, *args)

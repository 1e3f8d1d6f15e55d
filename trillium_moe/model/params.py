"""Parameters with their meaning attached: logical axes, which optimizer they take, whether they decay.

Every parameter of the model is made by `param`. Its metadata is all that sharding, the optimizer and the parameter
tables need, so none of them keeps a list of names. Constructors only describe: under `jax.eval_shape` nothing is
allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.rounding import widened
from trillium_moe.shapes import Array, Float, PyTree


class RouterBias(nnx.Variable):
    """The balancing bias of a router: state returned by the train step, never a gradient's target."""


def normal(std: float) -> Callable:
    """Initialiser N(0, std^2)."""
    return lambda key, shape, dtype: std * jax.random.normal(key, shape, dtype)


def zeros(key, shape, dtype):
    return jnp.zeros(shape, dtype)


def ones(key, shape, dtype):
    return jnp.ones(shape, dtype)


def param(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    dtype: str,
    init: Callable,
    *,
    muon: str = "",
    n_in: int = 1,
    decay: bool | None = None,
) -> nnx.Param:
    """One parameter.

    Args:
      shape, axes: sizes and logical axis names (see `trillium_moe.shapes`), of equal length.
      init: called with (key, shape, dtype).
      muon: "" for AdamW; "whole" to orthogonalise the matrix formed by the input and output axes; "head" to do so for
        each head alone. Axes named layers and experts always count as separate matrices.
      n_in: how many of the axes, after layers and experts, are contracted with the input; the rest are outputs.
      decay: whether weight decay applies; by default to Muon matrices only.
    """
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} must have equal length")
    value = init(rngs.params(), shape, jnp.dtype(dtype))
    return nnx.Param(value, axes=axes, muon=muon, n_in=n_in, decay=bool(muon) if decay is None else decay)


def stack(make: Callable[[nnx.Rngs], nnx.Module], n: int, rngs: nnx.Rngs) -> nnx.Module:
    """`n` independent modules as one whose variables have a leading `layers` axis of size n.

    `nnx.split` gives (graphdef, state); `nnx.merge(graphdef, layer(state, i))` is layer i again.
    """
    graphdef = None

    def init(key):
        nonlocal graphdef
        graphdef, state = nnx.split(make(nnx.Rngs(params=key)))
        return state

    state = jax.vmap(init)(jax.random.split(rngs.params(), n))
    for _, variable in nnx.to_flat_state(state):
        variable.set_metadata(axes=("layers", *variable.get_metadata()["axes"]))
    return nnx.merge(graphdef, state)


def layer(tree: PyTree, i: int | Array) -> PyTree:
    """Layer i of stacked state."""
    return jax.tree.map(lambda p: jax.lax.dynamic_index_in_dim(p, i, 0, keepdims=False), tree)


def put_layer(tree: PyTree, i: int | Array, value: PyTree) -> PyTree:
    """Stacked state with layer i replaced by `value`, cast to the stack's dtype."""
    write = lambda p, v: jax.lax.dynamic_update_index_in_dim(p, v.astype(p.dtype), i, 0)
    return jax.tree.map(write, tree, value)


def linear(x: Float[Array, "*b I"], w: Float[Array, "I O"] | nnx.Param) -> Float[Array, "*b O"]:
    """x W in x's dtype. (As an einsum: XLA:CPU takes twice as long for the weight gradient of a 3-D `@`.)"""
    return jnp.einsum("...i,io->...o", x, w.astype(x.dtype))


def wide_dtype(x: Any) -> Any:
    """The dtype of `wide(x)`."""
    return jnp.promote_types(x.dtype, jnp.float32)


def wide(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """At least float32: the dtype of every island where bfloat16 would lose the result. Of x as it is rounded."""
    return widened(x)


def axes_of(state: nnx.State) -> dict[tuple, tuple[str, ...]]:
    """Logical axes of every variable of a state, by path."""
    return {path: variable.get_metadata()["axes"] for path, variable in nnx.to_flat_state(state)}


def metadata(state: nnx.State, name: str) -> Any:
    """A tree like `state`, of plain values: one metadata entry per variable."""
    return nnx.map_state(lambda path, v: v.get_metadata()[name], state)

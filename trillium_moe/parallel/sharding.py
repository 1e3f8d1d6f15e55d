"""Where everything lies: one table from logical axes to mesh axes, and the few functions that apply it.

A parameter is cut twice. `TENSOR` axes stay cut while it is used: each device works with its heads, experts or
columns. On the axes of `FSDP`, parameters are cut only for storage: `gathered` brings a layer's weights together, in
the compute dtype, just before the layer uses them, and scatters their gradients back. Optimizer state lies as its
parameter does; vectors, which every device keeps whole, have their moments cut as well (ZeRO-1).

A dimension that an FSDP axis does not divide leaves that axis to the next dimension; if none is left, the parameter
is replicated over it. Dimensions that must divide are checked by `parallel.mesh.check_mesh`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from trillium_moe.parallel.mesh import BATCH
from trillium_moe.shapes import Array, PyTree, Shaped

TENSOR = {"heads": "model", "mlp": "model", "vocab": "model", "expert_mlp": "model", "experts": "expert"}
FSDP = ("data", "context", "expert")
# Dimensions that take FSDP axes, best first. Head widths are last: they fill the lanes of a TPU's tiles.
STORED = ("embed", "latent", "mlp", "expert_mlp", "vocab", "rank", "heads", "experts", "head_dim")

AnyMesh = Mesh | AbstractMesh


def current_mesh() -> AbstractMesh | None:
    """The mesh in context (`jax.set_mesh`), or None without one, on one device, or inside `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
        return None
    return mesh


def tensor_spec(axes: tuple[str, ...], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Mesh axes that cut each dimension of a parameter while it is used."""
    lead = 1 if axes[:1] == ("layers",) else 0
    cut = []
    for i, axis in enumerate(axes):
        target = TENSOR.get(axis)
        if axis == "experts" and i != lead:
            target = None  # the router's output: every token scores all experts
        cut.append((target,) if target and sizes[target] > 1 else ())
    return cut


def stored_spec(
    axes: tuple[str, ...], shape: tuple[int, ...], sizes: Mapping[str, int], vectors: bool = False
) -> list[tuple[str, ...]]:
    """Mesh axes that cut each dimension of a parameter in memory.

    Args:
      axes, shape: as given to `trillium_moe.model.params.param`, with or without a leading `layers`.
      vectors: cut vectors, too, and anything over its layers if all else fails: for optimizer state.
    """
    cut = tensor_spec(axes, sizes)
    names = [axis for axis in axes if axis != "layers"]
    if len(names) < 2 and not vectors:
        return cut
    order = [i for name in STORED for i, axis in enumerate(axes) if axis == name]
    if vectors:
        order += [i for i, axis in enumerate(axes) if axis == "layers"]
    used = {name for dim in cut for name in dim}
    # the largest first: 7168 is a multiple of 128 or of 16, not of 2048
    for name in sorted(FSDP, key=lambda name: -sizes[name]):
        if sizes[name] == 1 or name in used:
            continue
        for i in order:
            if shape[i] % (math.prod(sizes[a] for a in cut[i]) * sizes[name]) == 0:
                cut[i] = (*cut[i], name)
                break
    return cut


def as_spec(cut: Sequence[tuple[str, ...]]) -> P:
    """A PartitionSpec from tuples of mesh axes."""
    return P(*(None if not dim else dim[0] if len(dim) == 1 else dim for dim in cut))


def param_spec(axes: tuple[str, ...], shape: tuple[int, ...], mesh: AnyMesh) -> P:
    """How a parameter lies in memory."""
    return as_spec(stored_spec(axes, shape, mesh.shape))


def moment_spec(axes: tuple[str, ...], shape: tuple[int, ...], mesh: AnyMesh) -> P:
    """How the optimizer state of a parameter lies in memory."""
    return as_spec(stored_spec(axes, shape, mesh.shape, vectors=True))


def batch_spec() -> P:
    """[B, T] arrays of a batch."""
    return P(BATCH, "context")


def state_shardings(state: Any, mesh: AnyMesh) -> Any:
    """Shardings of a `TrainState` of arrays or shapes; the variables' metadata say what they are."""
    def place(spec_of, tree):
        def one(x):
            if not isinstance(x, nnx.Variable):
                return NamedSharding(mesh, P())
            spec = spec_of(x.get_metadata()["axes"], jax.tree.leaves(x)[0].shape, mesh)
            return jax.tree.map(lambda _: NamedSharding(mesh, spec), x)

        return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))

    replicated = lambda tree: jax.tree.map(lambda _: NamedSharding(mesh, P()), tree)
    return type(state)(
        step=replicated(state.step),
        params=place(param_spec, state.params),
        router_bias=replicated(state.router_bias),
        opt_state=place(moment_spec, state.opt_state),
    )


def with_shardings(abstract: PyTree, shardings: PyTree) -> PyTree:
    """Shapes with their shardings, for `checkpoint.restore` and ahead-of-time compilation."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)


# --- inside the model


def constrain(x: Shaped[Array, "..."], spec: P) -> Shaped[Array, "..."]:
    """x with a sharding of the mesh in context; x itself without one."""
    return x if current_mesh() is None else jax.lax.with_sharding_constraint(x, spec)


def activations(x: Shaped[Array, "*n B T D"]) -> Shaped[Array, "*n B T D"]:
    """Rows over the batch axes, tokens over context, D whole."""
    return constrain(x, P(*(None,) * (x.ndim - 3), BATCH, "context"))


def stored(params: PyTree) -> PyTree:
    """Variables (gradients, say) laid out as the parameters whose metadata they carry; other leaves as they are."""
    mesh = current_mesh()
    if mesh is None:
        return params

    def one(x):
        if not isinstance(x, nnx.Variable):
            return x
        axes = x.get_metadata()["axes"]
        return jax.tree.map(lambda a: constrain(a, param_spec(axes, a.shape, mesh)), x)

    return jax.tree.map(one, params, is_leaf=lambda x: isinstance(x, nnx.Variable))


def gathered(params: nnx.State, dtype: DTypeLike) -> nnx.State:
    """The parameters of one layer, ready to use: gathered over the FSDP axes, matrices in the compute dtype.

    Casting first halves what is sent. Gradients come back in the parameter's dtype, laid out as it is stored.
    """
    mesh = current_mesh()
    if mesh is None:
        return params
    return nnx.map_state(lambda _, variable: gathered_variable(variable, dtype), params)


def gathered_variable(variable: nnx.Variable, dtype: DTypeLike) -> nnx.Variable:
    """`gathered` for one parameter."""
    mesh, meta = current_mesh(), variable.get_metadata()
    if mesh is None or not isinstance(variable, nnx.Param):
        return variable
    axes = meta["axes"]

    def one(w):
        names = axes[1:] if axes[0] == "layers" and len(axes) == w.ndim + 1 else axes  # one layer of a stack
        cut, used = stored_spec(names, w.shape, mesh.shape), tensor_spec(names, mesh.shape)
        # router logits are computed in at least float32: near-tie experts flip otherwise
        matrix = (meta["muon"] and names[-1] != "experts") or "vocab" in names
        return _gather(w, jnp.dtype(dtype) if matrix else w.dtype, w.dtype, tuple(used), tuple(cut))

    return jax.tree.map(one, variable)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(w, dtype, stored_dtype, used, cut):
    # constrained after the cast, too, or the partitioner may gather first and cast afterwards
    w = constrain(w.astype(dtype), as_spec(cut))
    extra = [(dim, axes[len(kept) :]) for dim, (axes, kept) in enumerate(zip(cut, used)) if len(axes) > len(kept)]
    if not extra:
        return w

    def whole(w):
        # left to the partitioner, a matrix cut in two dimensions would be summed up from zero-padded pieces: twice
        # the traffic, and on a pod most of the compilation
        for dim, axes in extra:
            w = jax.lax.all_gather(w, axes, axis=dim, tiled=True)
        return w

    mesh = current_mesh()
    return jax.shard_map(whole, mesh=mesh, in_specs=as_spec(cut), out_specs=as_spec(used), check_vma=False)(w)


def _gather_bwd(dtype, stored_dtype, used, cut, _, d):
    # cut before the cast, too: the partial sums of all devices are then scattered, not added up on every one
    return (constrain(constrain(d, as_spec(cut)).astype(stored_dtype), as_spec(cut)),)


_gather.defvjp(lambda w, *args: (_gather(w, *args), None), _gather_bwd)

"""Muon: steepest descent under the spectral norm, per matrix or per attention head.

Sources: Jordan, Muon, 2024; Moonlight (arXiv 2502.16982), section 2.2 for the scale; Kimi K2 (2507.20534),
algorithm 1; Kimi K3 (2607.24653), Per-Head Muon. Momentum and eps are those of `torch.optim.Muon`.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike

from trillium_moe.model.params import wide
from trillium_moe.optim.partition import MatrixForm, matrix_form
from trillium_moe.parallel import sharding
from trillium_moe.shapes import Array, Float

QUINTIC = (3.4445, -4.7750, 2.0315)  # steepest at 0 among quintics that keep singular values near 1 (Jordan)
EPS = 1e-7  # smallest Frobenius norm divided by
SERIAL = 2**28  # elements above which a stack goes layer by layer, to need the temporaries of one layer only


class MuonState(NamedTuple):
    """Momentum: a tree like the parameters, same shapes and dtypes."""

    momentum: optax.Updates


def newton_schulz(
    g_BNM: Float[Array, "*B N M"], steps: int = 5, dtype: DTypeLike | None = None
) -> Float[Array, "*B N M"]:
    """U f(S) V^T for each matrix U S V^T of the batch, f in about [0.7, 1.2] unless s is tiny.

    Args:
      dtype: of the iteration. None: bfloat16, whose rounding is below the error of the polynomial; float32 if
        the program is compiled for a CPU, which multiplies bfloat16 slowly; float64 for float64 input.
    """
    if dtype is None and g_BNM.dtype != jnp.float64:
        run = functools.partial(newton_schulz, steps=steps)
        cpu, other = functools.partial(run, dtype=jnp.float32), functools.partial(run, dtype=jnp.bfloat16)
        return jax.lax.platform_dependent(g_BNM, cpu=cpu, default=other)
    dtype = jnp.dtype(dtype or jnp.float64)
    # the norm decides whether the iteration converges: at least float32
    x_BNM = wide(g_BNM)
    x_BNM = (x_BNM / jnp.maximum(jnp.linalg.norm(x_BNM, axis=(-2, -1), keepdims=True), EPS)).astype(dtype)
    tall = x_BNM.shape[-2] > x_BNM.shape[-1]
    x_BNM = x_BNM.mT if tall else x_BNM  # the Gram matrix of the shorter side
    # Sums and coefficients stay at least float32: 3.4445 in bfloat16 is 3.4375, an error that compounds.
    # Asking for a float32 iteration means it: TPUs and GPUs would otherwise round the operands.
    dot = functools.partial(jnp.matmul, precision=None if dtype.itemsize < 4 else "highest",
                            preferred_element_type=jnp.promote_types(dtype, jnp.float32))
    a, b, c = QUINTIC

    for _ in range(steps):  # written out: a loop on the device would count in a kernel of its own
        gram_BNN = dot(x_BNM, x_BNM.mT).astype(dtype)
        factor_BNN = (b * wide(gram_BNN) + c * dot(gram_BNN, gram_BNN)).astype(dtype)
        x_BNM = (a * wide(x_BNM) + dot(factor_BNN, x_BNM)).astype(dtype)
    return (x_BNM.mT if tall else x_BNM).astype(g_BNM.dtype)


def muon_update(
    g_BNM: Float[Array, "*B N M"], steps: int = 5, update_rms: float = 0.2, dtype: DTypeLike | None = None
) -> Float[Array, "*B N M"]:
    """Orthogonalised matrices scaled by update_rms * sqrt(max(N, M)).

    An orthogonal N x M matrix has elements of root mean square 1 / sqrt(max(N, M)), so that of the result is
    about `update_rms` whatever the shape, like AdamW's: learning rate and weight decay are shared.
    """
    return update_rms * max(g_BNM.shape[-2:]) ** 0.5 * newton_schulz(g_BNM, steps, dtype)


def sharded_update(
    form: MatrixForm,
    spec: jax.sharding.PartitionSpec,
    mesh: jax.sharding.AbstractMesh,
    update: Callable[[Array], Array],
    x: Float[Array, "..."],
    *,
    serial: int = SERIAL,
) -> Float[Array, "..."]:
    """`update` of the matrices of a parameter that is cut over a mesh, each matrix whole on one device.

    A device holds a piece of every matrix of its batch (layers, and those heads and experts that are its own). One
    all-to-all per cut dimension turns that into a share of the whole matrices, padded to equal shares; the iteration
    needs no communication; the same all-to-alls turn back. Each sends what the device holds once, padding apart.

    Args:
      spec: how x lies on the mesh.
      update: [N, n, m] -> [N, n, m], every matrix alone.
      serial: elements above which a device's share is done a part at a time.
    """
    matrix_dims = form.inputs + form.outputs
    names = lambda i: () if i >= len(spec) or spec[i] is None else (spec[i],) if isinstance(spec[i], str) else spec[i]
    cut = [(1 + at, names(i)) for at, i in enumerate(matrix_dims) if names(i)]
    shares = math.prod(mesh.shape[name] for _, axes in cut for name in axes)

    def local(x):
        n_batch = len(form.batch)
        x = x.transpose(form.order)
        batch, pieces = x.shape[:n_batch], x.shape[n_batch:]
        y = x.reshape(-1, *pieces)
        count = y.shape[0]
        y = jnp.pad(y, ((0, -count % shares), *((0, 0),) * len(pieces)))
        for dim, axes in cut:
            y = jax.lax.all_to_all(y, axes, split_axis=0, concat_axis=dim, tiled=True)
        whole = y.shape
        y = y.reshape(whole[0], math.prod(whole[1 : 1 + len(form.inputs)]), -1)
        at_once = max(1, serial // math.prod(y.shape[1:]))
        y = update(y) if whole[0] <= at_once else jax.lax.map(lambda m: update(m[None])[0], y, batch_size=at_once)
        y = y.reshape(whole)
        for dim, axes in reversed(cut):
            y = jax.lax.all_to_all(y, axes, split_axis=dim, concat_axis=0, tiled=True)
        y = y[:count].reshape(*batch, *pieces)
        return y.transpose(sorted(range(len(form.order)), key=form.order.__getitem__))

    return jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


def scale_by_muon(
    momentum: float = 0.95,
    nesterov: bool = True,
    steps: int = 5,
    update_rms: float = 0.2,
    per_head: bool = True,
    dtype: DTypeLike | None = None,
    serial: int = SERIAL,
) -> optax.GradientTransformation:
    """Gradients to Muon updates, before learning rate and sign.

    buf = momentum buf + (1 - momentum) g; u = momentum buf + (1 - momentum) g if nesterov, else buf; each
    matrix of u (`partition.matrix_form`) becomes `muon_update(u)`.

    Args:
      dtype: of the iteration, see `newton_schulz`.
      serial: parameters with a layers axis and more elements than this are done one layer at a time.
    """
    lerp = functools.partial(jax.tree.map, lambda m, g: momentum * m + (1 - momentum) * g)
    matrices_update = functools.partial(muon_update, steps=steps, update_rms=update_rms, dtype=dtype)

    def orthogonalise(variable: nnx.Variable) -> nnx.Variable:
        meta = variable.get_metadata()
        axes, mesh = meta["axes"], sharding.current_mesh()

        def update(x, axes):
            form = matrix_form(axes, meta["muon"], meta["n_in"], per_head)
            return form.restore(matrices_update(form.matrices(x)), x.shape)

        if mesh is not None:
            form = matrix_form(axes, meta["muon"], meta["n_in"], per_head)
            spec = sharding.moment_spec(axes, variable.shape, mesh)
            run = functools.partial(sharded_update, form, spec, mesh, matrices_update, serial=serial)
            return jax.tree.map(run, variable)
        if axes[0] == "layers" and variable.size > serial:
            return jax.tree.map(lambda x: jax.lax.map(lambda y: update(y, axes[1:]), x), variable)
        return jax.tree.map(lambda x: update(x, axes), variable)

    def init(params):
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None):
        del params
        buffer = lerp(state.momentum, grads)
        with jax.named_scope("muon"):
            updates = jax.tree.map(orthogonalise, lerp(buffer, grads) if nesterov else buffer,
                                   is_leaf=lambda x: isinstance(x, nnx.Variable))
        return updates, MuonState(buffer)

    return optax.GradientTransformation(init, update)

"""Muon on 8 devices: the same updates, one reshard in and out, no collective inside the iteration."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from trillium_moe.config import MeshConfig
from trillium_moe.optim.muon import scale_by_muon
from trillium_moe.parallel.mesh import make_mesh
from trillium_moe.parallel.sharding import moment_spec

# name: axes, shape, metadata; 3 layers divide by nothing, so every stack is padded
PARAMETERS = {
    "q": (("layers", "embed", "heads", "head_dim"), (3, 16, 4, 8), {"muon": "head", "n_in": 1}),
    "out": (("layers", "heads", "head_dim", "embed"), (3, 4, 8, 16), {"muon": "whole", "n_in": 2}),
    "experts": (("layers", "experts", "latent", "expert_mlp"), (3, 4, 8, 12), {"muon": "whole", "n_in": 1}),
    "fuse": (("embed", "mlp"), (16, 24), {"muon": "whole", "n_in": 1}),
}
MESHES = [{"data": 8}, {"data": 2, "expert": 2, "model": 2}, {"data": 1, "context": 2, "expert": 4},
          {"replica": 2, "data": 4}]


def gradients():
    rng = np.random.default_rng(0)
    return nnx.State({name: nnx.Param(jnp.asarray(rng.normal(size=shape), jnp.float32), axes=axes, decay=True, **meta)
                      for name, (axes, shape, meta) in PARAMETERS.items()})


def place(state, mesh):
    put = lambda v: jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, moment_spec(v.get_metadata()["axes"], x.shape, mesh))), v)
    return jax.tree.map(put, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


@pytest.fixture(scope="module")
def expected():
    tx, grads = scale_by_muon(momentum=0.0), gradients()
    return jax.jit(tx.update)(grads, tx.init(grads))[0]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("serial", [1, 1 << 28])
def test_updates_are_those_of_one_device(sizes, serial, expected):
    mesh = make_mesh(MeshConfig(**sizes))
    tx = scale_by_muon(momentum=0.0, serial=serial)
    with jax.set_mesh(mesh):
        grads = place(gradients(), mesh)
        updates = jax.jit(tx.update)(grads, tx.init(grads))[0]
    for (path, got), (_, want) in zip(nnx.to_flat_state(updates), nnx.to_flat_state(expected), strict=True):
        np.testing.assert_allclose(got[...], want[...], rtol=0, atol=2e-6, err_msg=str(path))


def test_one_reshard_in_and_one_out():
    """None in the iteration, whose steps are written out."""
    mesh = make_mesh(MeshConfig(data=4, model=2))
    tx = scale_by_muon(momentum=0.0)
    with jax.set_mesh(mesh):
        grads = place(nnx.State({"q": gradients()["q"]}), mesh)
        hlo = jax.jit(tx.update).lower(grads, tx.init(grads)).compile().as_text()
    found = re.findall(r" (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(", hlo)
    assert found == ["all-to-all"] * 2  # embed is cut over data; the heads over model stay where they are

"""Import onto a mesh: the same arrays as on one device, laid out as training lays them out, as the plan says."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests import goldens
from trillium_moe.config import DtypeConfig, MeshConfig
from trillium_moe.interop import hf
from trillium_moe.interop.export import export
from trillium_moe.interop.plan import plan
from trillium_moe.interop.safetensors import read_directory
from trillium_moe.model.params import RouterBias
from trillium_moe.parallel.mesh import make_mesh
from trillium_moe.parallel.sharding import param_spec

DTYPES = DtypeConfig(param="bfloat16", compute="float32")
MESHES = (MeshConfig(data=2, expert=4), MeshConfig(replica=2, data=2, expert=2), MeshConfig(data=4, expert=2))


@pytest.mark.parametrize("mesh_config", MESHES)
@pytest.mark.parametrize("experts_format, small", [("dense", 0), ("mxfp4", 0), ("dense", hf.SMALL)])
def test_import_onto_a_mesh(mesh_config, experts_format, small, tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "SMALL", small)
    name = "kimi_k3_tiny_mxfp4"
    mesh = make_mesh(mesh_config)
    _, model = hf.load(goldens.ROOT / name, DTYPES, mesh=mesh, experts_format=experts_format)
    _, _, params, bias = goldens.model(name, DTYPES, experts_format)
    held = dict.fromkeys(jax.devices(), 0)
    whole = dict(nnx.to_flat_state(params)) | dict(nnx.to_flat_state(bias))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        array, want = variable[...], whole[path][...]
        assert array.dtype == want.dtype
        np.testing.assert_array_equal(array, want)
        axes = variable.get_metadata()["axes"]
        if not isinstance(variable, RouterBias):
            assert array.sharding.spec == param_spec(axes, array.shape, mesh), path
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    found = plan(goldens.ROOT / name, DTYPES, mesh_config, 8, experts_format)
    assert set(held.values()) == {found.total.device}
    _, params, bias = nnx.split(model, nnx.Param, RouterBias)
    config = found.config
    export(tmp_path / "out", config, params, bias, experts="mxfp4")
    again = read_directory(tmp_path / "out")
    for tensor, entry in read_directory(goldens.ROOT / name).items():
        np.testing.assert_array_equal(again[tensor].read(), entry.read())


@pytest.mark.parametrize("experts_format", ["dense", "mxfp4"])
def test_logits_on_a_mesh(experts_format):
    """Experts cut over devices, packed or not, with the golden logits."""
    name = "kimi_k3_tiny_mxfp4"
    ref = goldens.arrays(name, "reference.safetensors")
    tokens = np.tile(ref["input_ids"], (8 // len(ref["input_ids"]), 1))
    mesh = make_mesh(MeshConfig(data=2, expert=4))
    dtypes = DtypeConfig(compute="float32")
    _, model = hf.load(goldens.ROOT / name, dtypes, mesh=mesh, experts_format=experts_format)
    graphdef, state = nnx.split(model)
    with jax.set_mesh(mesh):
        logits = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens)[0])(state, tokens)
    assert goldens.error(logits[: len(ref["input_ids"])], ref["logits"]) < 1e-4

"""Mesh sizes and sharding rules, without devices."""

import math

import pytest
from flax import nnx

from configs import scales
from trillium_moe.config import (
    Config,
    ConfigError,
    DataConfig,
    KDAConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from trillium_moe.parallel.mesh import AXES, check_mesh, mesh_shape, nearest_divisors, nearest_multiples
from trillium_moe.parallel.sharding import as_spec, stored_spec, tensor_spec
from trillium_moe.train.state import model_def


def sizes(**kw):
    return dict.fromkeys(AXES, 1) | kw


def test_the_remaining_devices_go_where_the_config_says():
    assert mesh_shape(MeshConfig(), 8) == (1, 8, 1, 1, 1)
    assert mesh_shape(MeshConfig(expert=2, model=2), 8) == (1, 2, 1, 2, 2)
    assert mesh_shape(MeshConfig(data=2, context=-1), 8) == (1, 2, 4, 1, 1)
    assert mesh_shape(MeshConfig(data=2, replica=2, model=2), 8) == (2, 2, 1, 1, 2)


@pytest.mark.parametrize("config, message", [
    (MeshConfig(expert=3), "config mesh.data=-1 x mesh.expert=3: does not fill the 8 devices; give mesh.expert=2 or 4"),
    (MeshConfig(data=3, model=2), "config mesh.data=3 x mesh.model=2: does not fill the 8 devices; give mesh.data=4"),
    (MeshConfig(data=16), "mesh.data=16: does not fill the 8 devices; give mesh.data=8"),
])
def test_sizes_that_do_not_fill_the_devices(config, message):
    with pytest.raises(ConfigError) as error:
        mesh_shape(config, 8)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_sizes_that_cannot_be():
    with pytest.raises(ConfigError, match="mesh.expert=0: must be 1 or more, or -1"):
        MeshConfig(expert=0)
    with pytest.raises(ConfigError, match="mesh.expert=-1: only one axis .* mesh.data is -1 too"):
        MeshConfig(expert=-1)


@pytest.mark.parametrize("mesh, change, message", [
    (sizes(data=3), {}, "mesh.replica x mesh.data x mesh.expert=3 must divide data.batch_size=8; nearest "
     "data.batch_size that works: 6 or 9; nearest product of the axes: 2 or 4"),
    (sizes(data=4), {"train": TrainConfig(micro_batches=4)}, "must divide data.batch_size/4 micro-batches=2; nearest "
     "data.batch_size that works: 16"),
    (sizes(context=3), {}, "mesh.context=3: must divide data.seq_len=512; nearest mesh.context that works: 2 or 4; "
     "nearest data.seq_len: 510 or 513"),
    (sizes(model=4), {"model": ModelConfig(kda=KDAConfig(n_heads=6))},
     "mesh.model=4: must divide model.kda.n_heads=6; nearest mesh.model that works: 3 or 6; nearest model.kda.n_heads: "
     "4 or 8"),
    (sizes(expert=32), {"data": DataConfig(batch_size=32)}, "mesh.expert=32: must divide model.moe.n_experts=16"),
])
def test_dimensions_that_do_not_divide(mesh, change, message):
    with pytest.raises(ConfigError) as error:
        check_mesh(Config(**change), mesh)
    assert message in str(error.value) and "\n" not in str(error.value)
    check_mesh(Config(), sizes(data=2, context=2, expert=2, model=2))


def test_nearest():
    assert nearest_divisors(12, 5) == [4, 6] and nearest_divisors(12, 4) == [4] and nearest_divisors(12, 50) == [12]
    assert nearest_multiples(5, 8) == [8] and nearest_multiples(17, 8) == [16, 24] and nearest_multiples(16, 8) == [16]


def test_the_released_model_is_cut_evenly_over_2048_devices():
    _, params, _ = model_def(scales.trillium_2t8())
    mesh = sizes(data=16, expert=128)
    total = held = 0
    specs = {}
    for path, variable in nnx.to_flat_state(params):
        axes, shape = variable.get_metadata()["axes"], variable.shape
        cut = stored_spec(axes, shape, mesh)
        flat = [name for dim in cut for name in dim]
        assert len(flat) == len(set(flat))
        shard = [n // math.prod(mesh[a] for a in dim) for n, dim in zip(shape, cut, strict=True)]
        total, held = total + math.prod(shape), held + math.prod(shard)
        specs[path] = as_spec(cut)
        # in use, weights are whole but for experts
        assert [a for dim in tensor_spec(axes, mesh) for a in dim] == (["expert"] if "expert_mlp" in axes else [])
    assert held < 1.01 * total / 2048  # what is replicated is small
    assert specs["moe", "w_gate"] == as_spec([(), ("expert",), ("data",), ()])
    assert specs["kda", "q"] == as_spec([(), ("expert",), ("data",), ()])  # 7168 / 128 by 96 / 16 by 128
    assert specs["moe", "router"] == as_spec([(), ("expert",), ("data",)])
    assert specs["norm",] == as_spec([()])


def test_optimizer_state_of_vectors_is_cut_too():
    assert stored_spec(("layers", "embed"), (5, 16), sizes(data=8)) == [(), ()]
    assert stored_spec(("layers", "embed"), (5, 16), sizes(data=8), vectors=True) == [(), ("data",)]
    assert stored_spec(("layers", "rank"), (16, 5), sizes(data=8), vectors=True) == [("data",), ()]
    assert stored_spec(("embed",), (5,), sizes(data=8), vectors=True) == [()]
    # tensor axes first, then storage axes on what is left of the dimension
    assert stored_spec(("embed", "heads", "head_dim"), (3, 8, 4), sizes(data=4, model=2)) == [(), ("model", "data"), ()]

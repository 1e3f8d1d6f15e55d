"""A checkpoint does not know the mesh it was written on."""

import jax
import numpy as np
import pytest

from tests.eight_devices.test_step import CONFIG
from trillium_moe.config import MeshConfig
from trillium_moe.parallel import sharding
from trillium_moe.parallel.mesh import make_mesh
from trillium_moe.train import checkpoint
from trillium_moe.train.state import abstract_state

pytestmark = pytest.mark.slow


def state_on(mesh):
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda x: rng.integers(0, 99, x.shape).astype(x.dtype), abstract_state(CONFIG))
    return jax.device_put(values, sharding.state_shardings(values, mesh))


def abstract_on(mesh):
    abstract = abstract_state(CONFIG)
    return sharding.with_shardings(abstract, sharding.state_shardings(abstract, mesh))


def write(workdir, step, state):
    with checkpoint.open_checkpoints(workdir, 9) as checkpoints:
        checkpoint.save(checkpoints, step, state, {"next_row": step})


def test_one_to_eight_to_two_by_four_and_back(tmp_path):
    meshes = [make_mesh(MeshConfig(), jax.devices()[:1]), make_mesh(MeshConfig(data=8)),
              make_mesh(MeshConfig(data=2, model=4)), make_mesh(MeshConfig(data=2, expert=2, context=2)),
              make_mesh(MeshConfig(data=4), jax.devices()[:4]), make_mesh(MeshConfig(), jax.devices()[:1])]
    expected = jax.device_get(state_on(meshes[0]))
    write(tmp_path, 0, state_on(meshes[0]))
    for step, mesh in enumerate(meshes[1:], 1):
        restored = checkpoint.restore(tmp_path, abstract_on(mesh))
        assert restored.step == step - 1
        assert jax.tree.map(lambda x: x.sharding, restored.state) == sharding.state_shardings(restored.state, mesh)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored.state), expected)
        write(tmp_path, step, restored.state)


def test_restored_shards_are_donatable(tmp_path):
    mesh = make_mesh(MeshConfig(data=4, model=2))
    write(tmp_path, 1, state_on(mesh))
    restored = checkpoint.restore(tmp_path, abstract_on(mesh)).state
    shards = lambda tree: {s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for s in x.addressable_shards}
    before = shards(restored)
    layout = jax.tree.map(lambda x: x.sharding, restored)
    step = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0, out_shardings=layout)
    after = step(restored)
    assert all(x.is_deleted() for x in jax.tree.leaves(restored)) and shards(after) == before


def test_a_whole_state_never_visits_one_device(tmp_path):
    """What restoring holds at any time, over what it returns: one leaf more."""
    mesh = make_mesh(MeshConfig(data=8))
    write(tmp_path, 1, state_on(mesh))
    held = dict.fromkeys(jax.devices(), 0)
    restored = checkpoint.restore(tmp_path, abstract_on(mesh)).state
    for x in jax.tree.leaves(restored):
        for shard in x.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert max(held.values()) < 0.2 * sum(x.nbytes for x in jax.tree.leaves(restored))


@pytest.mark.parametrize("sizes", [{"data": 8}, {"data": 4, "context": 2}, {"data": 2, "expert": 4}], ids=str)
def test_rows_are_placed_where_the_mesh_wants_them(sizes):
    from jax.sharding import NamedSharding

    from trillium_moe.parallel import runtime

    mesh = make_mesh(MeshConfig(**sizes))
    layout = NamedSharding(mesh, sharding.batch_spec())
    assert runtime.local_rows(layout, 16) == list(range(16))
    x = np.arange(16 * 8).reshape(16, 8)
    placed = runtime.place({"tokens": x}, layout, range(16), 16)["tokens"]
    np.testing.assert_array_equal(placed, x)
    assert placed.sharding == layout

"""One device against eight: loss, gradients, next router bias; state laid out and kept; one compilation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.trillium_moe.test_stack import small
from trillium_moe.config import (
    Config,
    DataConfig,
    DtypeConfig,
    KDAConfig,
    MeshConfig,
    MLAConfig,
    MoEConfig,
    TrainConfig,
)
from trillium_moe.parallel import sharding
from trillium_moe.parallel.mesh import make_mesh
from trillium_moe.train.state import abstract_state, init_state
from trillium_moe.train.step import balance, in_mesh, make_train_step, value_and_grad

B, T = 8, 32
MODEL = small(
    vocab_size=272, n_layers=2, kda_per_mla=1, block_size=1, remat="block", dtypes=DtypeConfig("float32", "float32"),
    kda=KDAConfig(n_heads=8, head_dim=4), moe=MoEConfig(n_experts=8, k=2, expert_dim=8, latent_dim=8),
    mla=MLAConfig(n_heads=8, q_lora_rank=8, kv_lora_rank=8, nope_dim=4, rope_dim=4, v_dim=4),
)  # fmt: skip
CONFIG = Config(model=MODEL, data=DataConfig(seq_len=T, batch_size=B), train=TrainConfig(steps=20))

ALONE = [{"data": 8}, {"data": 1, "replica": 8}, {"data": 1, "context": 8}, {"data": 1, "expert": 8},
         {"data": 1, "model": 8}]
MIXED = [{"data": 2, "expert": 2, "context": 2}, {"data": 2, "context": 2, "model": 2}]


def batch_of(seed=0):
    tokens = jax.random.randint(jax.random.key(seed), (B, T + 1), 0, 272)
    ids = jnp.repeat(jnp.asarray([[1] * 9 + [2] * 20 + [0] * 3]), B, 0)  # documents cross every cut of the sequence
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ids,
            "weights": (ids > 0).astype(jnp.float32)}


def random_state():
    """With a bias and pseudo-queries that are not zero, so that both matter."""
    state = jax.jit(init_state, static_argnums=0)(CONFIG)
    rng = np.random.default_rng(0)
    shift = lambda tree, by: jax.tree.map(lambda x: x + by * rng.normal(size=x.shape).astype(np.float32), tree)
    return dataclasses.replace(state, params=shift(state.params, 0.1), router_bias=shift(state.router_bias, 0.05))


def evaluate(mesh, n_micro=1):
    """(loss, gradients, next bias) of the random state's first step."""
    def run(state, batch):
        (nll, aux), grads = value_and_grad(MODEL, n_micro)(state.params, state.router_bias, batch)
        return nll, grads, balance(MODEL, state.router_bias, aux)

    state, batch = random_state(), batch_of()
    if mesh is not None:
        state = jax.device_put(state, sharding.state_shardings(state, mesh))
        batch = jax.device_put(batch, NamedSharding(mesh, sharding.batch_spec()))
    return jax.jit(in_mesh(mesh)(run))(state, batch)


@pytest.fixture(scope="module")
def one_device():
    return jax.device_get(evaluate(None))


def assert_equal_steps(got, want):
    (loss, grads, bias), (loss1, grads1, bias1) = jax.device_get(got), want
    np.testing.assert_allclose(loss, loss1, rtol=2e-6)
    for (path, a), (_, b) in zip(nnx.to_flat_state(grads), nnx.to_flat_state(grads1), strict=True):
        np.testing.assert_allclose(a[...], b[...], rtol=0, atol=2e-5 * abs(b[...]).max() + 1e-8, err_msg=str(path))
    np.testing.assert_allclose(bias["moe"]["bias"][...], bias1["moe"]["bias"][...], rtol=0, atol=1e-6)


@pytest.mark.parametrize("sizes", [MIXED[0], pytest.param(MIXED[1], marks=pytest.mark.slow),
                                   *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ALONE)], ids=str)
def test_eight_devices_compute_what_one_does(sizes, one_device):
    assert_equal_steps(evaluate(make_mesh(MeshConfig(**sizes))), one_device)


@pytest.mark.slow
def test_micro_batches_over_devices(one_device):
    assert_equal_steps(evaluate(make_mesh(MeshConfig(data=2, context=2, model=2)), n_micro=4), one_device)


def test_state_is_created_cut_as_the_rules_say():
    mesh = make_mesh(MeshConfig(data=4, model=2))
    abstract = abstract_state(CONFIG)
    layout = sharding.state_shardings(abstract, mesh)
    lowered = jax.jit(lambda: init_state(CONFIG), out_shardings=layout).lower()
    state = lowered.compile()()
    q, moment = state.params["kda"]["q"], state.opt_state["direction"].inner_states["muon"].inner_state.momentum
    assert q[...].sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data", "model")), 4)
    assert q[...].addressable_shards[0].data.shape == (1, 4, 4, 4)
    assert moment["kda"]["q"][...].sharding == q[...].sharding
    adam = state.opt_state["direction"].inner_states["adamw"].inner_state
    # ZeRO-1: the norm's weights are whole everywhere, their moments are not
    assert state.params["norm"][...].sharding.is_fully_replicated
    assert adam.mu["norm"][...].sharding.spec == P("data") and adam.count.sharding.is_fully_replicated
    total = sum(x.nbytes for x in jax.tree.leaves(state))
    held = max(sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards if s.device == d)
               for d in mesh.devices.flat)
    assert held < 0.16 * total  # 1/8, and what is small
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(jax.jit(init_state, static_argnums=0)(CONFIG))):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_step_compiles_once_and_keeps_the_layout():
    mesh = make_mesh(MeshConfig(data=2, expert=2, context=2))
    layout = sharding.state_shardings(abstract_state(CONFIG), mesh)
    state = jax.jit(lambda: init_state(CONFIG), out_shardings=layout)()
    step = make_train_step(CONFIG, mesh)
    put = lambda seed: jax.device_put(batch_of(seed), NamedSharding(mesh, sharding.batch_spec()))
    losses = []
    for i in range(3):
        before, (state, metrics) = state, step(state, put(i))
        assert all(x.is_deleted() for x in jax.tree.leaves(before.params))
        losses.append(float(metrics["train/loss"]))
    assert step._cache_size() == 1 and losses[-1] < losses[0]
    assert jax.tree.map(lambda x: x.sharding, state) == layout
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(metrics))

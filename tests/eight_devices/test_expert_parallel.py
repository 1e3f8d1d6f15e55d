"""Experts on several devices: every transport against the layer on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.meshes import mesh
from trillium_moe.config import DtypeConfig, ModelConfig, MoEConfig
from trillium_moe.model.context import Context
from trillium_moe.model.moe import MoE
from trillium_moe.model.params import RouterBias
from trillium_moe.model.router import next_bias
from trillium_moe.parallel import expert

B, T, D, E = 8, 16, 16, 8
EXPERT_8, MIXED, MODEL = {"expert": 8}, {"data": 2, "context": 2, "expert": 2}, {"expert": 2, "model": 2}


def config(**moe):
    fields = {"n_experts": E, "k": 2, "expert_dim": 8, "latent_dim": 8, "bins": 50, **moe}
    return ModelConfig(d_model=D, init_std=0.3, dtypes=DtypeConfig(compute="float32"), moe=MoEConfig(**fields))


def run(config, favourite=None):
    """Output, gradients of everything, statistics and next bias of one layer; `favourite` is chosen by every token."""
    graphdef, params, bias = nnx.split(MoE(config, rngs=nnx.Rngs(params=0)), nnx.Param, RouterBias)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
    ids = jnp.asarray(np.where(np.arange(T) < rng.integers(8, T + 1, (B, 1)), 1, 0))
    d = jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32)
    offset = 0.05 * rng.normal(size=E) + (0 if favourite is None else 10 * (np.arange(E) == favourite))
    bias = jax.tree.map(lambda b: b + offset.astype(np.float32), bias)

    @jax.jit
    def both(params, x):
        def loss(params, x):
            y, aux = nnx.merge(graphdef, params, bias)(x, Context(ids))
            return (y * d).sum(), (y, aux)

        grads, (y, aux) = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        stats = expert.reduce_stats({"moe": jax.tree.map(lambda a: a[None], aux)})["moe"]
        return y, grads, stats, next_bias(config.moe, bias["bias"][...][None], stats)

    return both(params, x)


def assert_same(found, expected, tolerance=1e-5):
    y, grads, stats, bias = found
    found = y, grads, {k: v for k, v in stats.items() if k != "dropped"}, bias
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(b.dtype, jnp.integer):
            np.testing.assert_array_equal(a, b, err_msg=str(path))
        else:
            scale = float(jnp.abs(b).max()) + 1e-30
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=str(path))


@pytest.fixture
def ragged_on_cpu(monkeypatch):
    """`jax.lax.ragged_all_to_all` by its definition; XLA has none for CPU. Slices travel in three pieces."""
    def emulated(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        R, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
        pieces = input_offsets.shape[0] // R
        rows = jax.lax.all_gather(operand, axis_name)
        facts = jax.lax.all_gather(jnp.stack([input_offsets, send_sizes, output_offsets]), axis_name)
        received = []
        for sender in range(R):
            for piece in range(pieces):
                start, size, to = facts[sender, :, me * pieces + piece]
                n = jnp.arange(operand.shape[0])
                at = jnp.where(n < size, to + n, output.shape[0])
                source = jnp.take(rows[sender], start + n, axis=0, mode="fill", fill_value=jnp.nan)
                output = output.at[at].set(source, mode="drop")
                received.append(size)
        # a wrong promise of what comes would hang a real device
        agree = (jnp.stack(received) == recv_sizes).all()
        return jnp.where(agree, output, jnp.nan)

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    monkeypatch.setitem(expert.UPDATES, "cpu", 3)


@functools.cache
def one_device(favourite):
    return run(config(), favourite)


@pytest.mark.parametrize("axes, favourite", [(EXPERT_8, None), (EXPERT_8, 5), (MIXED, None), (MODEL, 5)], ids=str)
def test_padded_transport(axes, favourite):
    expected = one_device(favourite)
    if favourite is not None:
        real = int(expected[2]["histogram"][0, 0].sum())
        assert int(expected[2]["load"][0, favourite]) == real  # every real token
    with jax.set_mesh(mesh(**axes)):
        found = run(config(), favourite)
    assert int(found[2]["dropped"].sum()) == 0
    assert_same(found, expected)


@pytest.mark.parametrize("axes, favourite", [({"expert": 4}, 5), (MIXED, None)], ids=str)
def test_ragged_transport(axes, favourite, ragged_on_cpu):
    expected = one_device(favourite)
    with jax.set_mesh(mesh(**axes)):
        found = run(config(transport="ragged"), favourite)
    assert int(found[2]["dropped"].sum()) == 0
    assert_same(found, expected)


@pytest.mark.parametrize("axes, favourite", [(EXPERT_8, None), (EXPERT_8, 5), ({"expert": 4}, 5), (MIXED, 0)], ids=str)
@pytest.mark.parametrize("transport", ["padded", "ragged"])
def test_exactly_balanced(axes, favourite, transport, ragged_on_cpu):
    expected = one_device(favourite)
    with jax.set_mesh(mesh(**axes)):
        found = run(config(transport=transport, balance="exact"), favourite)
    assert int(found[2]["dropped"].sum()) == 0
    assert_same(found, expected)


@pytest.mark.parametrize("transport", ["padded", "ragged"])
def test_what_has_no_room_is_dropped_and_counted(transport, ragged_on_cpu):
    """With every token's first choice on one of two devices, that device has room for an even share."""
    c = config(transport=transport, capacity=1.0)
    with jax.set_mesh(mesh(expert=2)):
        found = run(c, favourite=5)
    full = one_device(5)
    # each device: 64 tokens, 128 pairs, room for 64 to each device (padded) or 128 from both (ragged)
    changed = np.abs(np.asarray(found[0] - full[0])).max(-1) > 1e-6
    dropped = int(found[2]["dropped"].sum())
    assert 0 < changed.sum() <= dropped
    assert int(found[2]["load"].sum()) == int(full[2]["load"].sum())  # loads count choices, dropped or not
    assert np.isfinite(np.asarray(found[0])).all()


@pytest.mark.skipif(jax.default_backend() == "cpu" or jax.device_count() < 2, reason="XLA has none for CPU")
@pytest.mark.parametrize("balance", ["", "exact"])
@pytest.mark.parametrize("transport", ["padded", "ragged"])
def test_transport_on_two_devices(transport, balance):
    with jax.set_mesh(mesh(expert=2)):
        found = run(config(transport=transport, balance=balance), 5)
    assert_same(found, one_device(5), 1e-3)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_ragged_transport_lowers(platform):
    c = config(transport="ragged")
    graphdef, *state = nnx.split(MoE(c, rngs=nnx.Rngs(params=0)), nnx.Param, RouterBias)
    loss = lambda params, bias, x: nnx.merge(graphdef, params, bias)(x, Context())[0].sum()
    with jax.set_mesh(mesh(**EXPERT_8)):
        traced = jax.jit(jax.grad(loss)).trace(*state, jnp.zeros((B, T, D)))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("@ragged_all_to_all") + text.count("ragged-all-to-all") >= 4  # there and back, twice


@pytest.mark.parametrize("balancing", ["quantile_exact", "aux_loss", "batch_threshold"])
def test_every_balancing_rule_sees_the_whole_batch(balancing):
    c = config(balancing=balancing, aux_weight=1.0)
    expected = run(c)
    with jax.set_mesh(mesh(**MIXED)):
        found = run(c)
    assert_same(found, expected)


def test_experts_that_do_not_divide_are_named():
    c = dataclasses.replace(config(), moe=dataclasses.replace(config().moe, n_experts=6))
    model = MoE(c, rngs=nnx.Rngs(params=0))
    with jax.set_mesh(mesh(expert=4)), pytest.raises(ValueError, match="n_experts=6.*mesh.expert=4; use 4 or 8"):
        model(jnp.zeros((B, T, D)), Context())

"""Muon and the whole optimizer. Goldens: tests/golden/muon (torch.optim.Muon of torch 2.13)."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.flax import load_file

from trillium_moe.config import OptimConfig
from trillium_moe.model.params import param, stack, zeros
from trillium_moe.optim import make_optimizer, muon_adamw
from trillium_moe.optim.muon import muon_update, newton_schulz, scale_by_muon

with jax.enable_x64(True):
    GOLDEN = load_file(pathlib.Path(__file__).parents[1] / "golden/muon/reference.safetensors")
NAMES = ("tall", "wide", "square", "lowrank", "scaled", "row")


def error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return abs(got - want).max() / abs(want).max()


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", NAMES)
def test_newton_schulz_float64(name, x64):
    g = GOLDEN[f"ns.{name}.in"].astype(jnp.float64)
    assert error(newton_schulz(g), GOLDEN[f"ns.{name}.out_f64"]) < 1e-10
    assert error(muon_update(g), GOLDEN[f"ns.{name}.k2_update"]) < 1e-10


@pytest.mark.parametrize("name", NAMES)
def test_newton_schulz_float32(name):
    got = newton_schulz(GOLDEN[f"ns.{name}.in"])  # float32 is the default on a CPU
    tolerance = 1e-3 if name == "lowrank" else 1e-4  # null directions amplify rounding by 3.4445^5
    assert error(got, GOLDEN[f"ns.{name}.out_f32"]) < tolerance
    assert got.dtype == jnp.float32


@pytest.mark.parametrize("name", [n for n in NAMES if n != "lowrank"])
def test_newton_schulz_bfloat16(name):
    got = newton_schulz(GOLDEN[f"ns.{name}.in"], dtype=jnp.bfloat16)
    assert error(got, GOLDEN[f"ns.{name}.out_bf16"]) < 5e-2
    assert error(got, GOLDEN[f"ns.{name}.out_f64"]) < 5e-2


def test_newton_schulz_iterates_in_bfloat16_except_on_cpus():
    traced = jax.jit(newton_schulz).trace(jax.ShapeDtypeStruct((4, 8), jnp.float32))
    assert "bf16" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "bf16" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_newton_schulz_of_nothing_is_nothing():
    """An expert that saw no token gets no update."""
    assert (newton_schulz(jnp.zeros((2, 3, 4))) == 0).all()


def param_of(value, axes, **metadata):
    return nnx.Param(value, axes=axes, decay=True, **metadata)


def direction(variable, **kwargs):
    """The Muon update of one gradient, without momentum."""
    tx = scale_by_muon(momentum=0.0, **kwargs)
    state = nnx.State({"w": variable})
    return jax.jit(tx.update)(state, tx.init(state))[0]["w"].get_value()


def test_per_head(x64):
    """3 heads of 16 rows, [out, in] in the golden: each head is orthogonalised alone."""
    g = GOLDEN["perhead.in"].astype(jnp.float64).reshape(3, 16, 40).transpose(2, 0, 1)
    q = param_of(g, ("embed", "heads", "head_dim"), muon="head", n_in=1)
    rows = lambda x: x.transpose(1, 2, 0).reshape(48, 40)
    assert error(rows(direction(q)), GOLDEN["perhead.out"]) < 1e-10
    # the golden of the whole matrix has no scale: compare directions
    whole, want = rows(direction(q, per_head=False)), GOLDEN["perhead.whole_matrix"]
    assert error(whole / jnp.linalg.norm(whole), want / jnp.linalg.norm(want)) < 1e-10


def test_key_and_value_up_projections(x64):
    """2 heads of 12 key and 10 value rows: separate parameters here."""
    g = GOLDEN["kvb.in"].astype(jnp.float64).reshape(2, 22, 24).transpose(2, 0, 1)
    got = [direction(param_of(part, ("rank", "heads", "head_dim"), muon="head", n_in=1))
           for part in (g[..., :12], g[..., 12:])]
    assert error(jnp.concatenate(got, -1).transpose(1, 2, 0).reshape(44, 24), GOLDEN["kvb.out"]) < 1e-10


@pytest.mark.parametrize("tag, tolerance", [
    ("nesterov_f64", 1e-10), ("plain_f64", 1e-10), ("nesterov_bf16ns", 1e-3)])
def test_three_steps_of_torch_muon(tag, tolerance, x64):
    config = OptimConfig(weight_decay=0.1, clip_norm=0.0, nesterov=tag.startswith("nesterov"))
    axes = ("rows", "columns")
    state = lambda w: nnx.State({"w": param_of(w.astype(jnp.float64), axes, muon="whole", n_in=1)})
    params = state(GOLDEN[f"opt.{tag}.w0"])
    tx = muon_adamw(config, 0.02, params, ns_dtype=jnp.bfloat16 if "bf16" in tag else None)
    opt_state = tx.init(params)
    update = jax.jit(tx.update)
    for g, want in zip(GOLDEN[f"opt.{tag}.grads"], GOLDEN[f"opt.{tag}.w"]):
        updates, opt_state = update(state(g), opt_state, params)
        params = optax.apply_updates(params, updates)
        assert error(params["w"].get_value(), want) < tolerance


class Layer(nnx.Module):
    """Every kind of axes the model has."""

    def __init__(self, rngs, dtype):
        make = lambda shape, axes, **kwargs: param(rngs, shape, axes, dtype, zeros, **kwargs)
        self.q = make((24, 3, 8), ("embed", "heads", "head_dim"), muon="head")
        self.o = make((3, 8, 24), ("heads", "head_dim", "embed"), muon="whole", n_in=2)
        self.experts = make((4, 12, 20), ("experts", "latent", "expert_mlp"), muon="whole")
        self.conv = make((3, 8, 4), ("heads", "head_dim", "taps"))
        self.norm = make((24,), ("embed",))


class Model(nnx.Module):
    def __init__(self, rngs, dtype):
        self.embed = param(rngs, (30, 24), ("vocab", "embed"), dtype, zeros, decay=True)
        self.layers = stack(lambda rngs: Layer(rngs, dtype), 2, rngs)


@functools.cache
def abstract_toy(dtype="float32"):
    return jax.eval_shape(lambda: nnx.state(Model(nnx.Rngs(params=0), dtype), nnx.Param))


def toy(seed=0, dtype="float32"):
    """Numpy's numbers: compiling jax.random for every shape takes most of the time of these tests."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.02 * rng.normal(size=x.shape), x.dtype), abstract_toy(dtype))


def flat(state):
    """Arrays by dotted path."""
    return {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(state)}


def first_update(tx, grads, params):
    """Updates and state of the first step."""
    return jax.jit(lambda grads, params: tx.update(grads, tx.init(params), params))(grads, params)


MUON = {"layers.q", "layers.o", "layers.experts"}


def test_update_rms_of_every_matrix():
    params = toy()
    updates = flat(first_update(muon_adamw(OptimConfig(weight_decay=0.0), 1.0, params), toy(1), params)[0])
    for name in MUON:
        rms = np.sqrt(np.mean(np.square(updates[name])))
        assert 0.2 * 0.75 < rms < 0.2 * 1.15, name  # f(s) of Newton-Schulz lies in about [0.7, 1.2]


def test_layer_by_layer_is_the_same():
    grads = nnx.State({name: toy()["layers"][name] for name in ("q", "experts")})
    got, want = (flat(first_update(tx, grads, grads)[0]) for tx in (scale_by_muon(serial=0), scale_by_muon()))
    for name in got:
        np.testing.assert_allclose(got[name], want[name], atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_only_where_metadata_says(name):
    params, zero = toy(), jax.tree.map(jnp.zeros_like, toy())
    tx = muon_adamw(OptimConfig(name=name, weight_decay=0.1), 0.5, params)
    updates, old = flat(first_update(tx, zero, params)[0]), flat(params)
    for path, update in updates.items():
        want = -0.05 * old[path] if path in MUON | {"embed"} else np.zeros(update.shape)
        np.testing.assert_allclose(update, want, rtol=1e-6, err_msg=path)


def test_adamw_part_is_optax_adamw():
    config, start = OptimConfig(clip_norm=0.0), toy()
    mask = nnx.map_state(lambda _, v: v.get_metadata()["decay"], start)
    rival = optax.adamw(1e-2, config.beta1, config.beta2, config.eps, weight_decay=config.weight_decay,
                        mask=mask)

    def three_steps(tx):
        @jax.jit
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state
        params, state = start, tx.init(start)
        for seed in (1, 2, 3):
            params, state = step(params, state, toy(seed))
        return flat(params)

    want = three_steps(rival)
    for name, exempt in (("adamw", set()), ("muon", MUON)):
        got = three_steps(muon_adamw(dataclasses.replace(config, name=name), 1e-2, start))
        for path in want:
            same = np.allclose(got[path], want[path], rtol=1e-6, atol=1e-8)
            assert same == (path not in exempt), (name, path)


def test_gradients_are_clipped_to_the_global_norm():
    grads = nnx.State({"q": toy()["layers"]["q"]})
    norm = float(optax.global_norm(grads))

    def momentum(clip_norm):
        tx = muon_adamw(OptimConfig(clip_norm=clip_norm), 1e-2, grads)
        state = first_update(tx, grads, grads)[1]
        return state["direction"].inner_states["muon"].inner_state.momentum["q"].get_value()

    np.testing.assert_allclose(momentum(0.5 * norm), 0.5 * momentum(0.0), rtol=1e-5)
    assert (momentum(2 * norm) == momentum(0.0)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_abstract_state_and_one_compilation(dtype):
    abstract = abstract_toy(dtype)
    tx = make_optimizer(OptimConfig(), 10, abstract)
    described = jax.eval_shape(tx.init, abstract)
    params = toy(dtype=dtype)
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for seed in (1, 2, 3):
        params, state = step(params, state, toy(seed, dtype))
    assert step._cache_size() == 1
    kind = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False)), tree)
    assert kind(state) == kind(described)
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {dtype, "int32"}
    assert int(state["learning_rate"].count) == 3


def test_first_step_moves_by_the_first_rate():
    config, grads = OptimConfig(weight_decay=0.0), nnx.State({"experts": toy()["layers"]["experts"]})
    tx = make_optimizer(config, 300, grads)  # 3 warm-up steps: a quarter of the peak
    update = first_update(tx, grads, grads)[0]["experts"].get_value()
    np.testing.assert_allclose(np.sqrt(np.mean(update**2)), 0.2 * config.lr / 4, rtol=0.2)

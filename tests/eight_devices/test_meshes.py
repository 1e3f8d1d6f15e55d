"""The whole model on eight devices against one: loss, gradients, router statistics and the next router bias."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.meshes import mesh
from trillium_moe.config import DtypeConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from trillium_moe.model.params import RouterBias
from trillium_moe.model.trillium import Trillium
from trillium_moe.train.step import balance, value_and_grad

B, T = 8, 64
MESHES = {
    "context 8": {"context": 8},
    "expert 8": {"expert": 8},
    "expert 4, data 2": {"expert": 4, "data": 2},
    "data 2, expert 2, context 2": {"data": 2, "expert": 2, "context": 2},
    "model 2, context 2, expert 2": {"model": 2, "context": 2, "expert": 2},
}
TOLERANCE = 1e-4  # of the largest entry of each gradient, in float32


def small(**kw):
    fields = {
        "vocab_size": 32, "d_model": 16, "n_layers": 3, "kda_per_mla": 2, "ffn_dim": 24, "block_size": 2,
        "init_std": 0.2, "dtypes": DtypeConfig(compute="float32"),
        "kda": KDAConfig(n_heads=2, head_dim=8),
        "mla": MLAConfig(q_lora_rank=8, kv_lora_rank=8, nope_dim=8, rope_dim=4, v_dim=8, position="rope"),
        "moe": MoEConfig(n_experts=8, k=2, expert_dim=8, latent_dim=8, bins=100),
    }  # fmt: skip
    return ModelConfig(**{**fields, **kw})


def batch():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 32, (B, T + 1))
    # four documents a row that end anywhere, then padding
    ends = np.sort(rng.integers(1, T + 1, (B, 4)), axis=1)
    ids = 1 + (np.arange(T) >= ends[:, :, None]).sum(1)
    ids = np.where(ids == 5, 0, ids)
    return {"tokens": tokens[:, :-1].astype(np.int32), "targets": tokens[:, 1:].astype(np.int32),
            "segment_ids": ids.astype(np.int32), "weights": (ids > 0).astype(np.float32)}


def variables(config, favourite=None):
    params, bias = nnx.split(Trillium(config, rngs=nnx.Rngs(params=0)), nnx.Param, RouterBias)[1:]
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: p + 0.1 * rng.normal(size=p.shape).astype(np.float32), params)
    favour = 0 if favourite is None else 10 * (np.arange(config.moe.n_experts) == favourite).astype(np.float32)
    return params, jax.tree.map(lambda b: b + 0.05 * rng.normal(size=b.shape).astype(np.float32) + favour, bias)


def program(config, n_micro=1):
    def run(params, bias, data):
        (nll, aux), grads = value_and_grad(config, n_micro)(params, bias, data)
        return nll, grads, balance(config, bias, aux), aux
    return jax.jit(run)


def place(params, bias, data, devices):
    """Experts over `expert`, rows and time over their axes, the rest everywhere."""
    put = lambda x, *spec: jax.device_put(x, jax.NamedSharding(devices, jax.P(*spec)))
    flat = [(p, v.replace(put(v[...], *("expert" if a == "experts" and v[...].ndim == 4 else None for a in v.axes))))
            for p, v in nnx.to_flat_state(params)]
    data = {k: put(v, ("replica", "data", "expert"), "context") for k, v in data.items()}
    return nnx.from_flat_state(flat), jax.tree.map(put, bias), data


def compare(found, expected):
    found[3]["moe"].pop("dropped", None)  # only counted where experts are on several devices
    for (path, a), b in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(b.dtype, jnp.integer):
            np.testing.assert_array_equal(a, b, err_msg=str(path))
        else:
            scale = float(jnp.abs(b).max()) + 1e-30
            np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * scale, err_msg=str(path))


@pytest.fixture(scope="module")
def one_device():
    args = (*variables(small()), batch())
    return args, program(small())(*args)




@pytest.mark.slow  # tests/eight_devices/test_step.py runs one such mesh
@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_are_one(name, one_device):
    args, expected = one_device
    devices = mesh(**MESHES[name])
    with jax.set_mesh(devices):
        args = place(*args, devices)
        compiled = program(small()).lower(*args).compile()
    assert_one_all_reduce(small(), compiled.as_text())
    found = compiled(*args)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    compare(found, expected)


@pytest.mark.slow
def test_one_expert_takes_every_token():
    args = (*variables(small(), favourite=3), batch())
    expected = program(small())(*args)
    assert (np.asarray(expected[3]["moe"]["load"])[:, 3] == (args[2]["segment_ids"] > 0).sum()).all()
    devices = mesh(expert=8)
    with jax.set_mesh(devices):
        found = program(small())(*place(*args, devices))
    assert not np.asarray(found[3]["moe"]["dropped"]).any()
    compare(found, expected)


@pytest.mark.slow
def test_counts_of_micro_batches_add_up_where_they_are():
    config, devices = small(), mesh(**MESHES["data 2, expert 2, context 2"])
    args = place(*variables(config), batch(), devices)
    with jax.set_mesh(devices):
        text = program(config, n_micro=2).lower(*args).compile().as_text()
    assert_one_all_reduce(config, text)


def assert_one_all_reduce(config, text):
    """The histograms of all layers meet in one all-reduce a step, and in no other collective."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    of_counts, one_layer = [], config.moe.n_experts * config.moe.bins
    for shape, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        sizes = [int(np.prod([int(n) for n in d.split(",") if n])) for d in re.findall(r"s32\[([\d,]*)\]", shape)]
        if max(sizes, default=0) >= one_layer:
            of_counts.append((kind, max(sizes)))
    assert len(of_counts) == 1 and of_counts[0][0] == "all-reduce", of_counts
    assert of_counts[0][1] >= config.ffns.count("moe") * one_layer  # not one for each layer, in a loop

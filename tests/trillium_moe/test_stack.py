"""The layer stack: one compiled body against plain unrolled autodiff, and what it saves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import abstract_zeros, random_variables
from trillium_moe.config import DtypeConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from trillium_moe.model.context import Context
from trillium_moe.model.norms import rms_norm
from trillium_moe.model.stack import Schedule
from trillium_moe.train.loss import loss_sum
from trillium_moe.train.state import model_def

B, T = 2, 24


def small(**kw):
    fields = {
        "vocab_size": 32, "d_model": 16, "n_layers": 3, "kda_per_mla": 2, "ffn_dim": 24, "block_size": 2,
        "init_std": 0.2,
        "dtypes": DtypeConfig("float64", "float64", "float64"),
        "kda": KDAConfig(n_heads=2, head_dim=8),
        "mla": MLAConfig(q_lora_rank=8, kv_lora_rank=8, nope_dim=8, rope_dim=4, v_dim=8),
        "moe": MoEConfig(n_experts=6, k=2, expert_dim=8, latent_dim=8),
    }  # fmt: skip
    return ModelConfig(**{**fields, **kw})


def batch():
    tokens = jax.random.randint(jax.random.key(1), (B, T + 1), 0, 32)
    ids = jnp.asarray([[1] * 10 + [2] * 14, [1] * 20 + [0] * 4])
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": ids,
            "weights": (ids > 0).astype(jnp.float64)}


def variables(config):
    """Random parameters, pseudo-queries included (they start at zero), the same for every way to run them."""
    return random_variables(config, std=0.2, noise=0.1)[1:]


def value_and_grad(config, params, bias, data):
    graphdef = model_def(config)[0]

    def loss(params, bias):
        total, (_, aux) = loss_sum(nnx.merge(graphdef, params, bias), data)
        return total, aux

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, bias)


@pytest.mark.parametrize("remat", ["block", "layer"])
@pytest.mark.slow
def test_unrolled_rematerialisation(remat):
    with jax.enable_x64(True):
        config = small(scan_layers=False, remat=remat)
        params, bias = variables(config)
        (loss, _), grads = value_and_grad(config, params, bias, batch())
        plain = dataclasses.replace(config, remat="none")
        (expected, _), expected_grads = value_and_grad(plain, params, bias, batch())
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        for a, b in zip(*map(jax.tree.leaves, (grads, expected_grads)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("residual", ["block", *(pytest.param(x, marks=pytest.mark.slow) for x in ("full", "none"))])
def test_every_way_to_run_the_stack_is_the_same_function(residual):
    with jax.enable_x64(True):
        config = small(residual=residual)
        params, bias = variables(config)
        data = batch()
        plain = dataclasses.replace(config, scan_layers=False, remat="none")
        (loss, aux), grads = value_and_grad(plain, params, bias, data)
        ways = [(True, "block"), (True, "layer")] + ([(True, "none")] if residual == "block" else [])
        for scan_layers, remat in ways:
            way = dataclasses.replace(config, scan_layers=scan_layers, remat=remat)
            (loss2, aux2), grads2 = value_and_grad(way, params, bias, data)
            np.testing.assert_allclose(loss2, loss, rtol=1e-12)
            for a, b in zip(*map(jax.tree.leaves, (aux2, aux)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7)  # depth weights are float32 inside
            for (path, a), (_, b) in zip(nnx.to_flat_state(grads2), nnx.to_flat_state(grads), strict=True):
                scale = max(float(jnp.abs(b[...]).max()), 1e-6)
                message = f"scan_layers={scan_layers} remat={remat} {path}"
                np.testing.assert_allclose(a[...], b[...], rtol=0, atol=1e-9 * scale, err_msg=message)


def test_padding_rows_and_multi_token_prediction_run_through_the_same_loss():
    with jax.enable_x64(True):
        config = small(n_mtp=1, n_layers=1, n_dense_layers=0, residual="none", scan_layers=False, remat="none")
        params, bias = variables(config)
        data = batch()
        (loss, aux), grads = value_and_grad(config, params, bias, data)
        nll = loss_sum(nnx.merge(model_def(config)[0], params, bias), data)[1][0]
        assert float(loss) > float(nll)
        assert aux["mtp"]["moe"]["load"].shape == (1, 6)
        assert float(jnp.abs(grads["mtp"]["fuse"][...]).max()) > 0
        # padding counts nowhere: 44 real tokens, 2 experts each
        np.testing.assert_array_equal(aux["moe"]["load"].sum(-1), 44 * 2)


def saved_bytes(config):
    """Bytes of [.., B, T, ..] arrays that the stack's forward keeps for its backward."""
    graphdef, params, bias = model_def(config)

    def residuals(params, bias, tokens):
        hidden = lambda params: nnx.merge(graphdef, params, bias).hidden(tokens, Context())[0]
        return jax.vjp(hidden, params)[1]

    leaves = jax.tree.leaves(jax.eval_shape(residuals, params, bias, jax.ShapeDtypeStruct((B, T), jnp.int32)))
    return [leaf for leaf in leaves if leaf.shape[-3:] == (B, T, config.d_model)]


@pytest.mark.parametrize("remat", ["block", "layer"])
def test_remat_saves_what_it_says(remat):
    config = small(n_layers=9, block_size=2, remat=remat, dtypes=DtypeConfig(compute="float32"))
    schedule = Schedule.of(config)
    unit = B * T * config.d_model * 4
    sums = {"block": 0, "layer": schedule.n_blocks * schedule.block}[remat]
    leaves = saved_bytes(config)
    stack = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    h = jax.ShapeDtypeStruct((B, T, config.d_model), jnp.float32)
    weight = jax.ShapeDtypeStruct((config.d_model,), jnp.float32)
    after = jax.eval_shape(lambda *a: jax.vjp(rms_norm, *a)[1], h, weight)
    final_norm = sum(leaf.size * 4 for leaf in jax.tree.leaves(after) if leaf.shape == h.shape)
    assert stack - final_norm == (schedule.n_blocks + 1 + sums) * unit


def test_the_program_does_not_grow_with_the_number_of_layers():
    """Compile time follows the program; benchmarks/compile_time.py times it."""
    def program(n_layers):
        config = small(n_layers=n_layers, dtypes=DtypeConfig(compute="float32"), remat="block")
        graphdef, params, bias = model_def(config)
        data = abstract_zeros(jax.eval_shape(batch))
        loss = lambda p: loss_sum(nnx.merge(graphdef, p, abstract_zeros(bias)), data)[0]
        return len(jax.jit(jax.grad(loss)).lower(params).as_text().splitlines())

    assert program(48) <= 1.05 * program(12)


def test_schedule_of_the_released_model():
    from configs import scales

    schedule = Schedule.of(scales.trillium_2t8())
    assert schedule.kinds == ("kda", "dense", "moe", "mla")
    assert [schedule.count(k) for k in schedule.kinds] == [69, 1, 92, 24]
    assert schedule.n_blocks == 8 and schedule.block == 24
    mla = [s // 2 for s, k in enumerate(schedule.kind) if schedule.kinds[k] == "mla"]
    assert mla == [*range(3, 92, 4), 92]


def test_documents_of_a_row_never_see_one_another():
    """Bit for bit: another document's content changes nothing, whatever is in it."""
    config = small(dtypes=DtypeConfig(compute="float32"), n_layers=4)
    graphdef, params, bias = random_variables(config, std=0.2, noise=0.1)
    T = 150
    ids = jnp.asarray([[1] * 30 + [2] + [3] * 69 + [4] * 50])
    forward = jax.jit(lambda t: nnx.merge(graphdef, params, bias)(t, ids)[0])
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 32, (1, T))
    base = np.asarray(forward(tokens))
    for document in (1, 2, 3, 4):
        inside = np.asarray(ids[0] == document)
        changed = np.where(inside, rng.integers(0, 32, (1, T)), tokens)
        changed[0, np.argmax(inside)] = (tokens[0, np.argmax(inside)] + 1) % 32
        out = np.asarray(forward(changed))
        np.testing.assert_array_equal(out[0, ~inside], base[0, ~inside])
        assert (out[0, inside] != base[0, inside]).any()

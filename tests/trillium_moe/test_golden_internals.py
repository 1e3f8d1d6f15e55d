"""Released-layout checkpoints layer by layer: hidden states, depth weights, expert choices, greedy continuations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import goldens
from trillium_moe.config import Config, DataConfig, DtypeConfig
from trillium_moe.infer.generate import generate_ids
from trillium_moe.infer.sampling import Sampling
from trillium_moe.model.trillium import Trillium
from trillium_moe.train.state import model_def

F32 = DtypeConfig(compute="float32")


def layer_by_layer(name, monkeypatch):
    """config, golden data, what every sublayer got and gave, the embeddings, and aux, of one unrolled forward pass."""
    config, _, params, bias = goldens.model(name, F32)
    ref = goldens.arrays(name, "reference.safetensors")
    tokens = jnp.asarray(ref["input_ids"])
    config = dataclasses.replace(config, scan_layers=False, remat="none",
                                 moe=dataclasses.replace(config.moe, record=tokens.size))
    graphdef, seen, sublayer = model_def(config)[0], [], Trillium.sublayer

    def recorded(self, graphdef, params, state, x, ctx):
        y, aux = sublayer(self, graphdef, params, state, x, ctx)
        seen.append((x, y))
        return y, aux

    monkeypatch.setattr(Trillium, "sublayer", recorded)

    @jax.jit
    def run(params, bias, tokens):
        seen.clear()
        model = nnx.merge(graphdef, params, bias)
        _, aux = model(tokens)
        # before them, one of each kind was traced for its shapes
        return seen[-2 * config.n_layers :], model.embedding(tokens), aux

    seen, x, aux = jax.device_get(run(params, bias, tokens))
    assert len(seen) == 2 * config.n_layers
    return config, ref, seen, x, aux


def close(got, want):
    assert got.shape == want.shape and goldens.error(got, want) < 5e-5


def check_choices(config, ref, aux):
    """The experts of every token of every mixture layer."""
    layers = [i for i, kind in enumerate(config.ffns) if kind == "moe"]
    assert aux["moe"]["experts"].shape[0] == len(layers)
    for chosen, i in zip(aux["moe"]["experts"], layers):
        want = ref[f"router.topk_idx.{i}"].reshape(-1, config.moe.k)
        np.testing.assert_array_equal(np.sort(chosen, axis=-1), want)


@pytest.mark.slow
def test_kimi_k3_layer_by_layer(monkeypatch):
    config, ref, seen, x, aux = layer_by_layer("kimi_k3_tiny", monkeypatch)
    check_choices(config, ref, aux)
    live, n_sealed = x, 0
    for i in range(config.n_layers):
        if i % config.block_size == 0:
            live, n_sealed = 0, n_sealed + 1
        live = live + seen[2 * i][1] + seen[2 * i + 1][1]
        close(live, ref[f"live.{i}"])
        mixer = config.mixers[i]
        if f"{mixer}.in.{i}" in ref:
            close(seen[2 * i][0], ref[f"{mixer}.in.{i}"])
            close(seen[2 * i][1], ref[f"{mixer}.out.{i}"])
        if f"ffn.out.{i}" in ref:
            close(seen[2 * i + 1][1], ref[f"ffn.out.{i}"])
        for s, read in ((2 * i, "attn"), (2 * i + 1, "mlp")):
            if f"attnres.{read}.{i}" not in ref:
                continue  # the first read has nothing to choose from
            want, mine = ref[f"attnres.{read}.{i}"].mean((0, 1)), aux["attn_res"][s]
            fresh = s % (2 * config.block_size) == 0  # the live sum was sealed just now, and is the last of the sealed
            got = mine[: len(want)] if fresh else np.append(mine[: len(want) - 1], mine[-1])
            close(got, want)
            assert abs(got.sum() - 1) < 1e-5
    close(np.append(aux["attn_res"][-1][:n_sealed], aux["attn_res"][-1][-1]), ref["attnres.out"].mean((0, 1)))


@pytest.mark.slow
def test_kimi_linear_layer_by_layer(monkeypatch):
    config, ref, seen, x, aux = layer_by_layer("kimi_linear_tiny", monkeypatch)
    check_choices(config, ref, aux)
    close(seen[0][0], ref["attn.in.0"])
    close(seen[0][1], ref["attn.out.0"])
    for i in range(config.n_layers):
        x = x + seen[2 * i][1] + seen[2 * i + 1][1]
        close(x, ref[f"hidden.{i}"])


@pytest.mark.slow
@pytest.mark.parametrize("name, experts_format", [
    ("kimi_k3_tiny", "dense"), ("kimi_linear_tiny", "dense"), ("kimi_k3_tiny_mxfp4", "dense"),
    ("kimi_k3_tiny_mxfp4", "mxfp4"),
])
def test_greedy_continuation(name, experts_format):
    config, _, params, bias = goldens.model(name, F32, experts_format)
    ref = goldens.arrays(name, "reference.safetensors")
    run = Config(model=config, data=DataConfig(tokenizer="none.json"))
    for prompt, want in zip(ref["input_ids"], ref["greedy_tokens"]):
        tokens = generate_ids(run, params, bias, prompt.tolist(), len(want), Sampling(0.0))
        assert list(tokens) == want.tolist()

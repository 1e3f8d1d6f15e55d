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
from trillium_moe.model import stack
from trillium_moe.model.trillium import Trillium
from trillium_moe.parallel import expert
from trillium_moe.train.state import model_def

F32 = DtypeConfig(compute="float32")


def layer_by_layer(name, monkeypatch, experts_format="dense"):
    """Of one unrolled forward pass: config, golden data, what every sublayer got and gave, the embeddings, depth reads,
    the weights of the chosen experts in every mixture layer, and aux."""
    config, _, params, bias = goldens.model(name, F32, experts_format)
    ref = goldens.arrays(name, "reference.safetensors")
    tokens = jnp.asarray(ref["input_ids"])
    config = dataclasses.replace(config, scan_layers=False, remat="none",
                                 moe=dataclasses.replace(config.moe, record=tokens.size))
    graphdef, seen, reads, routes = model_def(config)[0], [], [], []

    def record(owner, name, into, pick):
        function = getattr(owner, name)

        def recorded(*args):
            out = function(*args)
            into.append(pick(args, out))
            return out

        monkeypatch.setattr(owner, name, recorded)

    record(Trillium, "sublayer", seen, lambda args, out: (args[-2], out[0]))
    record(stack, "read", reads, lambda args, out: out[0])
    record(expert, "route", routes, lambda args, out: out[:2])

    @jax.jit
    def run(params, bias, tokens):
        for each in (seen, reads, routes):
            each.clear()
        model = nnx.merge(graphdef, params, bias)
        _, aux = model(tokens)
        # before them, one of each kind was traced for its shapes
        return seen[-2 * config.n_layers :], model.embedding(tokens), reads, routes[-config.ffns.count("moe") :], aux

    seen, x, reads, routes, aux = jax.device_get(run(params, bias, tokens))
    assert len(seen) == 2 * config.n_layers
    return config, ref, seen, x, reads, routes, aux


def close(got, want):
    assert got.shape == want.shape and goldens.error(got, want) < 5e-5


def check_choices(config, ref, routes, aux):
    """The experts of every token of every mixture layer, and their weights."""
    layers = [i for i, kind in enumerate(config.ffns) if kind == "moe"]
    assert aux["moe"]["experts"].shape[0] == len(layers) == len(routes)
    for chosen, (experts, weights), i in zip(aux["moe"]["experts"], routes, layers):
        want = ref[f"router.topk_idx.{i}"].reshape(-1, config.moe.k)
        np.testing.assert_array_equal(np.sort(chosen, axis=-1), want)
        order = np.argsort(experts, axis=-1)
        np.testing.assert_array_equal(np.take_along_axis(experts, order, -1), want)
        close(np.take_along_axis(weights, order, -1), ref[f"router.topk_weight.{i}"].reshape(-1, config.moe.k))


def check_read(got, candidates, ref, read, name):
    """A depth read of every token, and the weight that each of its candidates had in it."""
    close(got, ref[read])
    if name in ref:  # the first has nothing to choose from
        C = np.stack(candidates, -2).astype(np.float64)
        weights = np.einsum("btd,btdn->btn", got, np.linalg.pinv(C))
        assert weights.shape == ref[name].shape and goldens.error(weights, ref[name]) < 2e-4


@pytest.mark.slow
def test_kimi_k3_layer_by_layer(monkeypatch):
    config, ref, seen, x, reads, routes, aux = layer_by_layer("kimi_k3_tiny", monkeypatch)
    check_choices(config, ref, routes, aux)
    assert len(reads) == 2 * config.n_layers + 1
    sealed, live = [], [x]
    for i in range(config.n_layers):
        check_read(reads[2 * i], sealed + live, ref, f"attn_read.{i}", f"attnres.attn.{i}")
        if i % config.block_size == 0:
            sealed, live = sealed + live, [0]
        live = [live[0] + seen[2 * i][1]]
        check_read(reads[2 * i + 1], sealed + live, ref, f"mlp_read.{i}", f"attnres.mlp.{i}")
        live = [live[0] + seen[2 * i + 1][1]]
        close(live[0], ref[f"live.{i}"])
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
    check_read(reads[-1], sealed + live, ref, "final_read", "attnres.out")
    close(np.append(aux["attn_res"][-1][: len(sealed)], aux["attn_res"][-1][-1]), ref["attnres.out"].mean((0, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("experts_format", ["dense", "mxfp4"])
def test_mxfp4_experts_layer_by_layer(experts_format, monkeypatch):
    config, ref, seen, _, _, routes, aux = layer_by_layer("kimi_k3_tiny_mxfp4", monkeypatch, experts_format)
    check_choices(config, ref, routes, aux)
    for i in range(3):
        close(seen[2 * i + 1][1], ref[f"ffn.out.{i}"])


@pytest.mark.slow
def test_kimi_linear_layer_by_layer(monkeypatch):
    config, ref, seen, x, _, routes, aux = layer_by_layer("kimi_linear_tiny", monkeypatch)
    check_choices(config, ref, routes, aux)
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

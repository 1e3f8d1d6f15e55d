import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models import random_variables
from trillium_moe.config import (
    Config,
    ConfigError,
    DataConfig,
    DtypeConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
)
from trillium_moe.data.tokenizer import ByteTokenizer
from trillium_moe.infer.generate import LoadedModel, TextStream, generate, generate_ids
from trillium_moe.infer.sampling import Sampling
from trillium_moe.train.state import model_def

CONFIG = Config(
    data=DataConfig(seq_len=16),
    model=ModelConfig(n_layers=2, d_model=16, ffn_dim=32, init_std=0.3, scan_layers=False, remat="none",
                      dtypes=DtypeConfig(compute="float32"),
                      kda=KDAConfig(n_heads=1, head_dim=8, implementation="reference"),
                      mla=MLAConfig(n_heads=1, q_lora_rank=8, kv_lora_rank=8, nope_dim=8, rope_dim=4, v_dim=8),
                      moe=MoEConfig(n_experts=4, k=2, expert_dim=8, latent_dim=8, n_shared=1)))


@pytest.fixture(scope="module")
def model():
    return LoadedModel(CONFIG, 7, *random_variables(CONFIG.model, std=0.3)[1:], ByteTokenizer())


def ids(model, prompt, n, **sampling):
    return list(generate_ids(model.config, model.params, model.router_bias, prompt, n, Sampling(**sampling)))


def test_greedy_equals_the_full_forward(model):
    """Every token is the argmax of a plain forward over all tokens before it, also beyond the training window."""
    prompt = [10, 20, 30]
    out = ids(model, prompt, 20, temperature=0.0)
    graphdef = model_def(CONFIG.model)[0]
    forward = jax.jit(lambda t: jnp.argmax(nnx.merge(graphdef, model.params, model.router_bias)(t)[0][0], -1))
    best = np.asarray(forward(jnp.array([prompt + out])))  # causal: position t has seen tokens 0 .. t
    assert out == best[2:-1].tolist()


def test_seed_decides_and_length_does_not(model):
    a, b = ids(model, [1, 2, 3], 10, seed=3), ids(model, [1, 2, 3], 13, seed=3)
    assert a == b[:10]
    assert a != ids(model, [1, 2, 3], 10, seed=4)


def test_text_ends_where_the_model_ends_the_document(model, monkeypatch):
    eos = model.tokenizer.eos_id
    monkeypatch.setattr("trillium_moe.infer.generate.generate_ids", lambda *_: iter([*b"abc", eos]))
    assert generate(model, "x", 12) == "abc"


def test_characters_are_streamed_whole():
    stream, text = TextStream(ByteTokenizer()), "aß→😀."
    pieces = [stream.add([byte]) for byte in text.encode()]
    assert [p for p in pieces if p] == list(text)
    assert stream.add([0xE2]) == "" and stream.end() == "\ufffd"
    assert "".join(stream.add([b]) for b in b"\xff" * 20) + stream.end() == "\ufffd" * 20


@pytest.mark.parametrize("key, value", [("temperature", -1.0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.5)])
def test_impossible_sampling_is_named(key, value):
    with pytest.raises(ConfigError, match=f"config {key}={value}"):
        Sampling(**{key: value})


def test_empty_prompt_is_named(model):
    with pytest.raises(ConfigError, match="prompt"):
        generate(model, "", 3)

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.stats import binomtest

from tests.models import random_variables
from trillium_moe.config import ConfigError, KDAConfig, MLAConfig, ModelConfig, MoEConfig
from trillium_moe.data.examples import Kit
from trillium_moe.data.packing import Documents
from trillium_moe.data.tokenizer import ByteTokenizer
from trillium_moe.evals import long
from trillium_moe.evals.long import LongConfig, binomial
from trillium_moe.evals.reader import Read, Reader, read_all

SMALL = ModelConfig(
    d_model=32, n_layers=2, kda_per_mla=1, ffn_dim=48, scan_layers=False, residual="none",
    kda=KDAConfig(n_heads=2, head_dim=8),
    mla=MLAConfig(n_heads=2, q_lora_rank=0, kv_lora_rank=8, nope_dim=8, rope_dim=4, v_dim=8),
    moe=MoEConfig(n_experts=4, k=2, expert_dim=8, latent_dim=0, n_shared=1),
    dtypes=dataclasses.replace(ModelConfig().dtypes, compute="float32"),
)  # fmt: skip
BYTES = ByteTokenizer()
TEXT = np.frombuffer(b"for line in lines:\n    print(line)\n" * 60, np.uint8).astype(np.uint16)
DOCUMENTS = Documents(TEXT, np.array([len(TEXT)]))


@pytest.fixture(scope="module")
def variables():
    return random_variables(SMALL, std=0.3)


@pytest.fixture(scope="module")
def reader(variables):
    _, params, bias = variables
    return Reader(SMALL, params, bias, capacity=256, rows=2, chunk=32)


def test_chunks_read_as_the_whole_model_does(variables, reader):
    tokens = np.random.default_rng(0).integers(0, 272, (3, 96)).astype(np.int32)
    sequences = [tokens[0], tokens[1][:41], tokens[2][:7]]  # of three lengths, two at a time
    model = nnx.merge(*variables)
    logits = np.asarray(jax.jit(lambda x: model(x)[0])(tokens), np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for i, (sequence, read) in enumerate(zip(sequences, reader.read(sequences))):
        n = len(sequence)
        assert np.array_equal(read.predicted, logits[i, :n].argmax(-1))
        assert read.nll[-1] == 0 and len(read.nll) == n
        np.testing.assert_allclose(read.nll[:-1], -logp[i, np.arange(n - 1), sequence[1:]], atol=2e-4)
    mixed = [sequences[2], *sequences]  # its groups are read longest first, and given back in this order
    both = read_all([reader, reader.twin()], mixed)
    for got, read in zip(both, reader.read(mixed), strict=True):
        assert np.array_equal(got.predicted, read.predicted) and np.allclose(got.nll, read.nll, atol=1e-5)
    # going on by its own likeliest tokens is reading what it wrote
    written = reader.continued([tokens[0][:40], tokens[1][:33]], 5)
    for i, n in ((0, 40), (1, 33)):
        (again,) = reader.read([np.concatenate([tokens[i][:n], written[i]])])
        assert np.array_equal(again.predicted[n - 1 : -1], written[i])
    with pytest.raises(ConfigError, match="length=300"):
        reader.read([np.zeros(300, np.int32)])


class Oracle:
    """Knows the answers to all but every third example."""

    rows = 4

    def __init__(self):
        self.seen = 0

    def read(self, sequences):
        out = []
        for tokens in sequences:
            self.seen += 1
            predicted = np.append(tokens[1:], 0)
            out.append(Read(predicted if self.seen % 3 else predicted + 1, np.full(len(tokens), 0.5, np.float32)))
        return out


def test_scores():
    config = LongConfig(tasks=("needle",), lengths=(300,), answers=30, depths=3)
    given = long.examples("needle", Kit(BYTES, DOCUMENTS), config, 300)
    assert len(given) == 30
    cell = long.score("needle", 300, given, Oracle().read([e.tokens for e in given]), 3)
    assert (cell.n, cell.right, cell.accuracy) == (30, 20, 20 / 30)
    assert cell.tokens_right == pytest.approx(20 / 30) and cell.chance == pytest.approx(1e-3)
    # depth i % 3 of example i, and every third is wrong: depth 1 is always wrong
    assert cell.depths == {"0.00": (10, 10), "0.50": (10, 10), "1.00": (10, 0)}
    # as many examples as the budget allows, one at least
    assert len(long.examples("needle", Kit(BYTES), dataclasses.replace(config, tokens=1000), 300)) == 3
    assert len(long.examples("needle", Kit(BYTES), dataclasses.replace(config, tokens=10), 300)) == 1


def test_intervals_are_exact():
    for k, n in ((0, 10), (3, 10), (10, 10), (199, 200)):
        expected = binomtest(k, n).proportion_ci(method="exact")
        assert binomial(k, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_gain_from_context():
    """Half a nat less for every token once 100 have been read."""
    whole = long.stretches(TEXT, 256, 4)
    assert [w.tolist() for w in whole] == [TEXT[i : i + 256].tolist() for i in (0, 256, 512, 768)]
    read = lambda n: [Read(np.zeros(n, np.int32), np.where(np.arange(n) < 100, 2.0, 1.5))] * 4
    out = long.text_losses(read(256), read(64))
    assert out["gain"] == pytest.approx(0.5) and (out["rows"], out["length"]) == (4, 256)
    assert out["positions"] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert out["nll"] == pytest.approx([2, 2, 2, 2, 2, 2, (36 * 2 + 28 * 1.5) / 64, 1.5])
    assert long.stretches(TEXT, 4096, 4) == []  # no text is that long


def test_a_model_without_training_is_at_chance(variables):
    _, params, bias = variables
    tasks = "needle", "chunk_order", "document_qa"
    config = LongConfig(tasks=tasks, lengths=(64, 256), answers=8, generate=2, rows=2, chunk=32)
    said = []
    out = long.evaluate(SMALL, params, bias, BYTES, DOCUMENTS, config, said.append)
    found = {(c["task"], c["length"]) for c in out["cells"]}
    assert found == {("needle", 64), ("chunk_order", 64), *((t, 256) for t in config.tasks)}  # documents need more
    assert all(c["right"] <= 1 and c["low"] <= c["accuracy"] <= c["high"] for c in out["cells"])
    assert all(c["generated"] == 2 for c in out["cells"]) and len(said) == len(out["cells"])
    assert json.loads(json.dumps(out)) == json.loads(json.dumps(out, sort_keys=True))
    assert [t["length"] for t in out["text"]] == [64, 256] and all(np.isfinite(t["nll"]).all() for t in out["text"])

import itertools
import math

import numpy as np
import pytest

from trillium_moe.data.tokenizer import ByteTokenizer
from trillium_moe.evals.heldout import heldout

TOKENIZER = ByteTokenizer()


def batch(targets, weights):
    return {"targets": np.array([targets], np.int32), "weights": np.array([weights], np.float32)}


def uniform(params, router_bias, batch):
    """A model that gives each of 256 bytes the same probability."""
    weight = batch["weights"].sum()
    return {"nll": weight * math.log(256), "weight": weight}


def test_uniform_bytes_are_eight_bits():
    batches = [batch([1, 2, 3], [1, 1, 1]), batch([4, 5, 6], [1, 0, 0])]
    out = heldout(uniform, None, None, iter(batches), TOKENIZER.token_bytes, 2)
    assert out == pytest.approx({"heldout/bits_per_byte": 8, "heldout/loss": math.log(256)})


def test_ends_of_documents_cost_nats_and_hold_no_bytes():
    out = heldout(uniform, None, None, iter([batch([1, TOKENIZER.eos_id], [1, 1])]), TOKENIZER.token_bytes, 5)
    assert out["heldout/bits_per_byte"] == pytest.approx(16)


def test_reads_n_batches_and_no_more():
    batches = itertools.chain([batch([1], [1])] * 3, (pytest.fail("read too far") for _ in range(1)))
    heldout(uniform, None, None, batches, TOKENIZER.token_bytes, 3)


def test_nothing_to_predict_is_an_error():
    with pytest.raises(ValueError, match="no text to predict; raise data.heldout"):
        heldout(uniform, None, None, iter([batch([1], [0])]), TOKENIZER.token_bytes, 1)

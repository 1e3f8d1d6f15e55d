"""Packing at 65,536 tokens: every document of one row computes what it computes alone, in any stage's row."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models import random_variables
from tests.trillium_moe.test_long import SMALL
from trillium_moe.model.context import Context

pytestmark = pytest.mark.slow

WINDOW = 65_536
LENGTHS = (1, 3, 8192, 5, 31_000, 16_384, 4095, 5000)  # with padding behind them


def test_documents_of_a_64k_row_are_alone():
    config = dataclasses.replace(SMALL, mla=dataclasses.replace(SMALL.mla, n_heads=1))
    graphdef, params, bias = random_variables(config, std=0.3)
    tokens = np.random.default_rng(1).integers(0, 272, (1, WINDOW)).astype(np.int32)
    ids = np.zeros((1, WINDOW), np.int32)
    stops = np.cumsum(LENGTHS)
    assert stops[-1] < WINDOW
    for i, (n, stop) in enumerate(zip(LENGTHS, stops)):
        ids[0, stop - n : stop] = i + 1

    @jax.jit
    def hidden(tokens, ids):
        return nnx.merge(graphdef, params, bias).hidden(tokens, Context(ids))[0]

    packed = np.asarray(hidden(tokens, ids))[0]
    assert np.isfinite(packed).all()
    spans = [slice(stop - n, stop) for n, stop in zip(LENGTHS, stops)]
    # every second document and the padding replaced: the others keep every bit
    other = np.random.default_rng(2).integers(0, 272, tokens.shape).astype(np.int32)
    for own in spans[1::2]:
        other[0, own] = tokens[0, own]
    changed = np.asarray(hidden(other, ids))[0]
    assert all(np.array_equal(changed[own], packed[own]) for own in spans[1::2])
    assert not any(np.array_equal(changed[own], packed[own]) for own in spans[::2])
    # and they compute what they do at the beginning of an otherwise empty row
    own, n = spans[4], LENGTHS[4]
    alone, alone_ids = np.zeros_like(tokens), np.zeros_like(ids)
    alone[0, :n], alone_ids[0, :n] = tokens[0, own], 1
    got = np.asarray(hidden(alone, alone_ids))[0, :n]
    np.testing.assert_allclose(got, packed[own], atol=2e-4 * np.abs(packed).max())

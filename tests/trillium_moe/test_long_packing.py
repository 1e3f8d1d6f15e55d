"""Packing at 65,536 tokens: every document of one row computes what it computes alone, in any stage's row."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.models import random_variables
from tests.trillium_moe.test_long import SMALL
from trillium_moe.model.context import Context

pytestmark = pytest.mark.slow

WINDOW = 65_536
LENGTHS = (1, 3, 8192, 5, 31_000, 16_384, 4095, 5856)  # with padding behind them


def test_documents_of_a_64k_row_are_alone():
    graphdef, params, bias = random_variables(SMALL, std=0.3)
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
    # every other document and the padding replaced: the rest keeps every bit
    for kept in (2, 5, 7):
        other = np.random.default_rng(kept).integers(0, 272, tokens.shape).astype(np.int32)
        own = slice(stops[kept] - LENGTHS[kept], stops[kept])
        other[0, own] = tokens[0, own]
        assert np.array_equal(np.asarray(hidden(other, ids))[0, own], packed[own])
    # and it is what the document gives at the beginning of an otherwise empty row
    for kept in (1, 4):
        own = slice(stops[kept] - LENGTHS[kept], stops[kept])
        alone, alone_ids = np.zeros_like(tokens), np.zeros_like(ids)
        alone[0, : LENGTHS[kept]], alone_ids[0, : LENGTHS[kept]] = tokens[0, own], 1
        got = np.asarray(hidden(alone, alone_ids))[0, : LENGTHS[kept]]
        np.testing.assert_allclose(got, packed[own], atol=2e-4 * np.abs(packed).max())

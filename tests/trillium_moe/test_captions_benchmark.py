"""What benchmarks/captions.py keeps of runs and concludes from them."""

import numpy as np
import pytest

from benchmarks.captions import conclude, load
from experiments.common import UsageError

NATS = np.array([[[[8.0, 12.0], [9.0, 12.0]], [[8.0, 11.0], [8.0, 10.0]]],  # seed 0: joint, blind; seed 1
                 [[[5.0, 10.0], [9.0, 10.0]], [[10.0, 15.0], [9.0, 11.0]]]])
STEPS = np.array([[10, 10], [20, 21]])


def test_conclusions():
    """Two evaluations of two seeds on two captions of four and six tokens."""
    last, _, after, lowest, error, lowest_after, first, *_, cat, puppy = conclude(
        STEPS, NATS, np.array([4, 6]), ["cat", "puppy"])
    assert last == "last   joint 2.0000, blind 1.9500: +0.0500, by seed -0.4000 +0.5000"
    assert after.endswith("after steps 20 and 20, 21 and 21")
    assert lowest == "lowest joint 1.7000, blind 1.8500: -0.1500, by seed -0.4000 +0.1000"
    assert error.endswith("standard error over captions 0.1768; 50% of them helped")
    assert lowest_after.endswith("after steps 20 and 20, 10 and 10")
    assert first == "step     10 joint 1.9500, blind 1.9500: -0.1000 +0.1000"
    assert cat == "   -2.00 nats, blind    8.50,   4 tokens: cat" and puppy.endswith("tokens: puppy")


def test_runs_of_a_folder(tmp_path):
    """In the order of their seeds, as far as the shortest run came."""
    with pytest.raises(UsageError, match="no run there; train one without --compare"):
        load(tmp_path)
    for seed, n in ((0, 2), (1, 1)):
        np.savez(tmp_path / f"{seed}.npz", steps=STEPS[:n, seed], nats_EAN=NATS[:n, seed], tokens_N=[4, 6],
                 texts=["cat", "puppy"])
    steps_ES, nats_ESAN, tokens_N, texts = load(tmp_path)
    np.testing.assert_array_equal(steps_ES, STEPS[:1])
    np.testing.assert_array_equal(nats_ESAN, NATS[:1])
    assert list(tokens_N) == [4, 6] and list(texts) == ["cat", "puppy"]

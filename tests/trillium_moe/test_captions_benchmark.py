"""What benchmarks/captions.py keeps of runs and concludes from them."""

import numpy as np
import pytest

from benchmarks.captions import Pooled, conclude, load, standard_error
from experiments.common import UsageError

TOKENS, TEXTS = np.array([4, 6]), np.array(["cat", "puppy"])
NATS = {0: [[[8.0, 12.0], [9.0, 12.0]], [[5.0, 10.0], [9.0, 10.0]]],  # joint, blind; after 10 steps, after 20
        1: [[[8.0, 11.0], [8.0, 10.0]], [[10.0, 15.0], [9.0, 11.0]]]}  # fmt: skip
BIRDS = np.array([10, 20]), np.full((2, 2, 1), 30.0), np.array([10]), np.array(["bird"])  # no arm is better


def runs():
    """One fold of two seeds."""
    return {seed: {0: (np.array([10, 20]), np.array(nats), TOKENS, TEXTS)} for seed, nats in NATS.items()}


def test_conclusions():
    """Two evaluations of two seeds on two captions of four and six tokens."""
    lines = list(conclude(runs()))
    assert lines[0].startswith("last   seed 0: joint 1.5000, blind 1.9000: -0.4000, standard error over 2 captions")
    assert lines[0].endswith("after steps 20 and 20")
    assert lines[1].startswith("last   seed 1: joint 2.5000, blind 2.0000: +0.5000")
    # helped by -1.5 and +2, 0.05 a token: -1.7 and +1.7 beside it, times the root of 2, over 10 tokens
    assert lines[2] == ("last   all: +0.0500, standard error over 2 captions 0.2404, deviation over seeds 0.6364; "
                        "50% of the captions helped")
    assert lines[4].startswith("lowest seed 1: joint 1.9000, blind 1.8000: +0.1000")
    assert lines[4].endswith("after steps 10 and 10")
    assert lines[5].startswith("lowest all: -0.1500")
    assert lines[6] == "step     10: 2.0000 2.1000 -0.1000, 1.9000 1.8000 +0.1000"
    assert lines[8] == "fold 0: -0.4000 +0.5000"
    assert lines[9] == "   -1.50 nats, blind    9.00,   4 tokens: cat" and lines[10].endswith("tokens: puppy")


def test_folds_of_a_seed_count_as_one():
    """Tokens weigh alike, whatever fold they are in: 4 nats of 20 tokens where they were 4 of 10."""
    found = runs()
    found[0][1] = BIRDS
    lines = list(conclude(found))
    assert lines[0].startswith("last   seed 0: joint 2.2500, blind 2.4500: -0.2000, standard error over 3 captions")
    assert lines[2].startswith("last   all: +0.0250, standard error over 3 captions")  # 0.5 nats of 20 tokens
    assert lines[8:10] == ["fold 0: -0.4000 +0.5000", "fold 1: +0.0000"]


def test_standard_error_is_that_of_the_ratio_over_draws_of_captions():
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 40, 300)
    apart = 0.2 * tokens + rng.normal(0, 3, 300)
    drawn = rng.integers(300, size=(4000, 300))
    spread = (apart[drawn].sum(1) / tokens[drawn].sum(1)).std()
    assert standard_error(apart, tokens) == pytest.approx(spread, rel=0.05)


def test_runs_of_a_folder(tmp_path):
    """By seed and fold; a fold that ended early cuts the others to where it ended."""
    with pytest.raises(UsageError, match="no run there; train one without --compare"):
        load(tmp_path)
    whole = runs()[0][0]
    for name, (steps, nats, tokens, texts), n in (("10_0", BIRDS, 1), ("2_0", whole, 2)):
        np.savez(tmp_path / f"{name}.npz", steps=steps[:n], nats_EAN=nats[:n], tokens_N=tokens, texts=texts)
    found = load(tmp_path)
    assert list(found) == [0] and list(found[0]) == [2, 10] and list(found[0][2][3]) == list(TEXTS)
    np.testing.assert_array_equal(found[0][2][1], NATS[0])
    pooled = Pooled(found[0])
    assert pooled.steps == [10] and pooled.keys == [(2, 0, "cat"), (2, 1, "puppy"), (10, 0, "bird")]
    np.testing.assert_allclose(pooled.loss_EA, [[50 / 20, 51 / 20]])

"""What benchmarks/captions.py keeps of runs and concludes from them."""

import numpy as np
import pytest

from benchmarks.captions import conclude, load
from experiments.common import UsageError

TOKENS, TEXTS = np.array([4, 6]), np.array(["cat", "puppy"])
STEPS = {"0_0": [10, 20], "0_1": [10, 21]}
NATS = {"0_0": [[[8.0, 12.0], [9.0, 12.0]], [[5.0, 10.0], [9.0, 10.0]]],  # joint, blind; after 10 steps, after 20
        "0_1": [[[8.0, 11.0], [8.0, 10.0]], [[10.0, 15.0], [9.0, 11.0]]]}  # fmt: skip


def runs():
    return [(name, np.array(STEPS[name]), np.array(NATS[name]), TOKENS, TEXTS) for name in NATS]


def test_conclusions():
    """Two evaluations of two seeds on two captions of four and six tokens."""
    lines = list(conclude(runs()))
    assert lines[0] == "last   0_0: joint 1.5000, blind 1.9000: -0.4000 after steps 20 and 20"
    assert lines[1] == "last   0_1: joint 2.5000, blind 2.0000: +0.5000 after steps 21 and 21"
    # helped by -1.5 and +2: deviation 1.75, times the root of 2, over 10 tokens
    assert lines[2] == ("last   all: +0.0500, standard error over 2 captions 0.2475, deviation over runs 0.6364; "
                        "50% of the captions helped")
    assert lines[3] == "lowest 0_0: joint 1.5000, blind 1.9000: -0.4000 after steps 20 and 20"
    assert lines[4] == "lowest 0_1: joint 1.9000, blind 1.8000: +0.1000 after steps 10 and 10"
    assert lines[5].startswith("lowest all: -0.1500, standard error over 2 captions 0.1768")
    assert lines[6:8] == ["step     10: -0.1000 +0.1000", "step     20: -0.4000       -"]
    assert lines[9] == "   -2.00 nats, blind    8.50,   4 tokens: cat" and lines[10].endswith("tokens: puppy")


def test_folds_hold_out_other_captions():
    first, second = runs()
    *_, lowest, _, _, _, cat, puppy, bird, frog = conclude([first, (*second[:4], np.array(["bird", "frog"]))])
    assert lowest.startswith("lowest all: -0.1500, standard error over 4 captions")  # -3 nats of 20 tokens
    assert [line.split(": ")[1] for line in (cat, puppy, bird, frog)] == ["cat", "puppy", "bird", "frog"]


def test_runs_of_a_folder(tmp_path):
    """In the order of their names; one that ended early is compared where it ended."""
    with pytest.raises(UsageError, match="no run there; train one without --compare"):
        load(tmp_path)
    for (name, steps, nats, tokens, texts), n in zip(runs(), (2, 1)):
        np.savez(tmp_path / f"{name}.npz", steps=steps[:n], nats_EAN=nats[:n], tokens_N=tokens, texts=texts)
    whole, short = load(tmp_path)
    assert (whole[0], short[0]) == ("0_0", "0_1") and list(short[4]) == list(TEXTS)
    np.testing.assert_array_equal(whole[2], NATS["0_0"])
    np.testing.assert_array_equal(short[2], NATS["0_1"][:1])
    lines = list(conclude([whole, short]))
    assert lines[0].endswith("after steps 20 and 20") and lines[1].endswith("after steps 10 and 10")
    assert lines[6:8] == ["step     10: -0.1000 +0.1000", "step     20: -0.4000       -"]

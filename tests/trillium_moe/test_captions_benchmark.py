"""What benchmarks/captions.py keeps of runs and concludes from them."""

import numpy as np
import pytest

from benchmarks.captions import conclude, load
from experiments.common import UsageError

NATS = np.array([[[8.0, 12.0], [9.0, 12.0], [8.0, 11.0], [8.0, 10.0]],
                 [[5.0, 10.0], [9.0, 10.0], [10.0, 15.0], [9.0, 11.0]]])  # joint 0, blind 0, joint 1, blind 1


def test_conclusions():
    """Two evaluations on two captions of four and six tokens."""
    lines = list(conclude([10, 20], NATS, np.array([4, 6]), ["cat", "puppy"]))
    assert lines[0] == ("lowest joint 1.7000, blind 1.8500: -0.1500 by seed -0.4000 +0.1000, deviation 0.3536; "
                        "standard error over captions 0.1768, 50% of them helped; after steps 20 20 10 10")
    assert lines[1].startswith("last   joint 2.0000, blind 1.9500: +0.0500 by seed -0.4000 +0.5000, deviation 0.6364")
    assert lines[2] == "step     10 joint 1.9500, blind 1.9500: -0.1000 +0.1000"
    assert lines[4] == "   -2.00 nats, blind    8.50,   4 tokens: cat" and lines[5].endswith("tokens: puppy")


def test_runs_of_a_folder(tmp_path):
    """In the order that `conclude` takes, as far as the shortest run came."""
    with pytest.raises(UsageError, match="no joint_.*npz there; train it with --arm"):
        load(tmp_path)
    for number, name in enumerate(("joint_0", "blind_0", "joint_1", "blind_1")):
        with pytest.raises(UsageError, match="there"):
            load(tmp_path)
        n = 1 if name == "blind_1" else 2
        np.savez(tmp_path / f"{name}.npz", steps=[10, 20][:n], nats_EN=NATS[:n, number], tokens_N=[4, 6],
                 texts=["cat", "puppy"])
        if number == 1:
            np.testing.assert_array_equal(load(tmp_path)[1], NATS[:, :2])
            (tmp_path / "blind_0.npz").rename(tmp_path / "kept")
        if number == 2:
            (tmp_path / "kept").rename(tmp_path / "blind_0.npz")
    steps, nats_ERN, tokens_N, texts = load(tmp_path)
    assert list(steps) == [10] and list(tokens_N) == [4, 6] and list(texts) == ["cat", "puppy"]
    np.testing.assert_array_equal(nats_ERN, NATS[:1])
    np.savez(tmp_path / "blind_1.npz", steps=[11], nats_EN=NATS[:1, 3], tokens_N=[4, 6], texts=["cat", "puppy"])
    with pytest.raises(UsageError, match="evaluated after other steps"):
        load(tmp_path)

"""Runs side by side in benchmarks/captions.py: what they share, what they see, what is concluded."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.captions import Programs, Stream, conclude, plain
from trillium_moe.config import (
    Config,
    DataConfig,
    DtypeConfig,
    ImagesConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    VisionConfig,
)
from trillium_moe.data.packing import Documents
from trillium_moe.data.tokenizer import ByteTokenizer
from trillium_moe.train.state import init_state
from trillium_moe.train.step import make_train_step

VISION = VisionConfig(n_layers=1, d_model=32, n_heads=2, head_dim=16, ffn_dim=32, grid=4)
MODEL = ModelConfig(n_layers=2, vision=VISION, moe=MoEConfig(n_experts=4, k=2), scan_layers=False, remat="none",
                    dtypes=DtypeConfig(compute="float32"))
CONFIG = Config(model=plain(MODEL), data=DataConfig(seq_len=64, batch_size=2), optim=OptimConfig(qk_clip=0.0),
                images=ImagesConfig(share=0.5, tasks="letters", patches=64, max_patches=32))
DOCUMENTS = Documents((np.arange(4000) % 200).astype(np.uint16), np.full(40, 100))


def test_streams_of_a_seed_and_what_goes_wrong_in_them():
    draw = lambda seed: list(itertools.islice(Stream(dataclasses.replace(CONFIG, seed=seed), ByteTokenizer(), DOCUMENTS,
                                                     2), 3))
    for one, again, other in zip(draw(0), draw(0), draw(1)):
        assert all(np.array_equal(one[name], again[name]) for name in one)
        assert not np.array_equal(one["patches"], other["patches"])
    small = dataclasses.replace(CONFIG, images=dataclasses.replace(CONFIG.images, tasks="svg"))
    with pytest.raises(ValueError, match="data.seq_len"):
        next(Stream(small, ByteTokenizer(), DOCUMENTS, 2))


@pytest.mark.slow
def test_runs_side_by_side_are_the_runs_alone():
    """Two seeds, two arms, two steps in one program: the losses and parameters of four runs of the trainer's step."""
    programs = Programs(CONFIG, ByteTokenizer(), DOCUMENTS, 2)
    keys = jnp.stack([jax.random.key(seed) for seed in (0, 1)])
    batches = [list(itertools.islice(Stream(dataclasses.replace(CONFIG, seed=seed), ByteTokenizer(), DOCUMENTS, 2), 2))
               for seed in (0, 1)]
    state = programs.init(keys)
    for pair in zip(*batches):
        state, metrics = programs.train(state, jax.tree.map(lambda *x: np.stack(x), *pair))
    step, init = make_train_step(CONFIG), jax.jit(lambda key: init_state(CONFIG, key))
    for run, (seed, blind) in enumerate(itertools.product((0, 1), (False, True))):
        alone = init(keys[seed])
        for batch in batches[seed]:
            shown = batch | {"patches": np.zeros_like(batch["patches"])} if blind else batch
            alone, own = step(alone, shown)
        np.testing.assert_allclose(metrics["train/loss"][run], own["train/loss"], rtol=1e-4)
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(alone.params)):
            np.testing.assert_allclose(a[run], b, atol=2e-4)
    assert abs(float(metrics["train/loss"][0] - metrics["train/loss"][1])) > 1e-5  # the pictures are seen


def test_conclusions():
    """Two evaluations of joint 0, blind 0, joint 1, blind 1 on two captions of four and six tokens."""
    nats = np.array([[[8.0, 12.0], [9.0, 12.0], [8.0, 11.0], [8.0, 10.0]],
                     [[5.0, 10.0], [9.0, 10.0], [10.0, 15.0], [9.0, 11.0]]])
    lines = list(conclude([10, 20], nats, np.array([4, 6]), ["cat", "puppy"]))
    assert lines[0] == ("lowest joint 1.7000, blind 1.8500: -0.1500 by seed -0.4000 +0.1000, deviation 0.3536; "
                        "standard error over captions 0.1768, 50% of them helped; after steps 20 20 10 10")
    assert lines[1].startswith("last   joint 2.0000, blind 1.9500: +0.0500 by seed -0.4000 +0.5000, deviation 0.6364")
    assert lines[2] == "step     10 joint 1.9500, blind 1.9500: -0.1000 +0.1000"
    assert lines[4] == "   -2.00 nats, blind    8.50,   4 tokens: cat" and lines[5].endswith("tokens: puppy")

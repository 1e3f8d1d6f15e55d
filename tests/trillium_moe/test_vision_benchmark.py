"""The arms of benchmarks/vision.py: what they share and what they differ in."""

import dataclasses
import itertools

import numpy as np

from benchmarks.vision import arm_config, compare
from trillium_moe.config import Config, DataConfig, ImagesConfig, ModelConfig, VisionConfig
from trillium_moe.data.packing import Documents
from trillium_moe.data.pipeline import make_pipeline
from trillium_moe.data.tokenizer import ByteTokenizer

CONFIG = Config(model=ModelConfig(vision=VisionConfig(n_layers=1)), data=DataConfig(seq_len=64, batch_size=4),
                images=ImagesConfig(share=0.5, tasks="letters", patches=64, max_patches=32))


def test_arms_read_the_same_text_and_see_different_pictures():
    documents = Documents((np.arange(4000) % 200).astype(np.uint16), np.full(40, 100))
    batches = {arm: make_pipeline(arm_config(CONFIG, arm), "train", tokenizer=ByteTokenizer(), documents=documents,
                                  threads=0) for arm in ("joint", "blind", "text")}
    for joint, blind, text in itertools.islice(zip(*map(iter, batches.values())), 3):
        words = ~joint["features"].any(axis=1)
        assert words.sum() == len(text["tokens"]) == 2 and "patches" not in text
        for name, value in text.items():
            np.testing.assert_array_equal(joint[name][words], value)
        assert joint["patches"].any() and not blind["patches"].any()
        for name in set(joint) - {"patches"}:
            np.testing.assert_array_equal(joint[name], blind[name])
    assert arm_config(CONFIG, "text").model == dataclasses.replace(
        CONFIG.model, vision=dataclasses.replace(CONFIG.model.vision, n_layers=0))


def test_differences_are_taken_seed_by_seed():
    run = lambda loss, **more: {"heldout/loss": loss, "seconds": 1.0, **more}
    found = {"joint": [run(1.0, **{"vision/captions_loss": 2.0}), run(3.0, **{"vision/captions_loss": 2.5})],
             "blind": [run(1.5, **{"vision/captions_loss": 2.2}), run(4.5, **{"vision/captions_loss": 2.7})],
             "text": [run(0.5), run(2.5)]}
    lines = list(compare(found))
    assert len(lines) == 5
    assert "minus joint: +1.0000  by seed +0.5000 +1.5000  deviation 0.7071" in lines[2]
    assert "2.4500  minus joint: +0.2000  by seed +0.2000 +0.2000" in lines[3]
    assert "minus joint: -0.5000" in lines[4]

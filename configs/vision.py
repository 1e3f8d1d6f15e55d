"""Text and pictures in one stream from the first step: --config=configs/vision.py:scale=tiny

    scale   tiny (two CPU cores, printed and handwritten digits and shapes), small (a GPU: words, charts, code, ...), or
            trillium_2t8, the released dimensions, for experiments.params and experiments.compile

A constant share of the rows holds pictures, from the first step to the last; every other field is in
trillium_moe/config.py.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # config_flags loads this file from anywhere

from configs import scales
from trillium_moe.config import (
    Config,
    ConfigError,
    DataConfig,
    ImagesConfig,
    OptimConfig,
    TrainConfig,
    VisionConfig,
    check_choice,
)
from trillium_moe.config_files import to_config_dict


def tiny() -> Config:
    """0.7M parameters: one layer of linear and one of full attention, bytes, rows of 256 tokens.

    Learning from pictures takes many steps before it takes a large language model, so every step is small: two layers,
    eight experts, four rows, nothing computed twice.
    """
    vision = VisionConfig(n_layers=3, d_model=64, n_heads=2, head_dim=32, ffn_dim=256, grid=8, pos_std=0.2)
    base = scales.tiny()
    moe = replace(base.moe, n_experts=8, k=2)
    model = replace(base, n_layers=2, moe=moe, vision=vision, remat="none", scan_layers=False)
    return Config(
        name="tiny-vision",
        model=model,
        data=DataConfig(seq_len=256, batch_size=4),
        images=ImagesConfig(share=0.875, tasks="numbers:6,digits,shapes:7", patches=112, max_patches=16),
        optim=OptimConfig(lr=2e-3),  # at 1e-2 the tower tells no shapes apart (docs/results.md)
        train=TrainConfig(steps=3600, eval_every=1200, checkpoint_every=1800, log_every=20),
    )


def small() -> Config:
    """About 36M parameters; bytes, so that a word it never saw is read letter by letter; rows of 1,024 tokens."""
    vision = VisionConfig(n_layers=6, d_model=256, n_heads=4, head_dim=64, ffn_dim=1024, grid=16)
    model = replace(scales.small(), vocab_size=272, vision=vision)
    return Config(
        name="small-vision",
        model=model,
        data=DataConfig(seq_len=1024, batch_size=16, tokenizer="byte"),
        images=ImagesConfig(share=0.5, tasks="words:4,lines,shapes,charts,boards,svg,numbers", patches=1536,
                            max_patches=144),
        optim=OptimConfig(lr=3e-3),
        train=TrainConfig(steps=2000, eval_every=500, checkpoint_every=500),
    )


def trillium_2t8() -> Config:
    """Kimi K3 whole: pictures of up to 65,536 patches, 16,384 tokens."""
    vision = VisionConfig(n_layers=27, d_model=1024, n_heads=12, head_dim=128, ffn_dim=4096, grid=64, frames=4)
    return Config(
        name="trillium_2t8-vision",
        model=replace(scales.trillium_2t8(), vision=vision),
        data=DataConfig(seq_len=32_768, batch_size=128, tokenizer="bpe"),
        images=ImagesConfig(share=0.1, tasks="captions", path="captions/*.parquet", patches=65_536, max_patches=65_536),
        optim=OptimConfig(lr=scales.RECIPES["trillium_2t8"][0]),
        train=TrainConfig(steps=10_000),
    )


SCALES = {f.__name__: f for f in (tiny, small, trillium_2t8)}


def get_config(options: str = ""):
    """The run as a ConfigDict; see the module's docstring for `options`."""
    key, equals, scale = (options or "scale=tiny").partition("=")
    check_choice("option", key, ("scale",))
    if not equals:
        raise ConfigError(f"config option {options!r}: write scale=VALUE")
    check_choice("scale", scale, tuple(SCALES))
    return to_config_dict(SCALES[scale]())

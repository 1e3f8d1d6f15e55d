"""What the sweeps share: a pre-training config as base, on bytes, and options of their own after the colon.

    scale, stage, shrink    as in configs/pretrain.py
    seeds                   how many seeds every arm gets
    steps                   optimizer steps of every run
    rows                    rows of the stage's window per step

Bytes at every scale: no tokenizer to train for each run, and losses of all sizes are in one unit.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a sweep file may be loaded from anywhere

from configs import pretrain
from trillium_moe.config import Config, ConfigError, check_choice, from_config_dict

OWN = ("seeds", "steps", "rows")


def base(options: str = "", **defaults: int | str) -> tuple[Config, tuple[int, ...]]:
    """(config, seeds) of `scale=small,seeds=3`, over `defaults`, over those of `pretrain`."""
    given = {key: str(value) for key, value in defaults.items()}
    for item in filter(None, options.split(",")):
        key, equals, value = item.partition("=")
        check_choice("option", key, (*OWN, *pretrain.DEFAULTS))
        if not equals:
            raise ConfigError(f"config option {item!r}: write {key}=VALUE")
        given[key] = value
    own = {key: _count(key, given.pop(key)) for key in OWN if key in given}
    config = from_config_dict(pretrain.get_config(",".join(f"{k}={v}" for k, v in given.items())))
    steps = own.get("steps", config.train.steps)
    config = replace(
        config,
        name=f"{given.get('scale', 'tiny')} ablation",
        model=replace(config.model, vocab_size=272),
        data=replace(config.data, tokenizer="byte", batch_size=own.get("rows", config.data.batch_size)),
        train=replace(config.train, steps=steps, log_every=1, eval_every=0, eval_batches=16,
                      checkpoint_every=max(50, steps // 4), keep=1, sample_tokens=0, alarm_violation=0.0,
                      alarm_dead=0.0),
    )
    return config, tuple(range(own.get("seeds", 3)))


def _count(key: str, value: str) -> int:
    if not value.isdigit() or int(value) == 0:
        raise ConfigError(f"config {key}={value!r}: must be a whole number of 1 or more")
    return int(value)

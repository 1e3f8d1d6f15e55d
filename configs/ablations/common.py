"""What the sweeps share: a pre-training config as base, on bytes, and options of their own after the colon.

    scale, stage, shrink    as in configs/pretrain.py
    seeds                   how many seeds every arm gets
    steps                   optimizer steps of every run
    rows                    rows of the stage's window per step
    keep                    checkpoints kept of a run; 0 writes none, and a run that is killed starts anew
    dtype                   of activations: float32 or bfloat16, which the GPU kernels take; by default the scale's

Bytes at every scale: no tokenizer to train for each run, and losses of all sizes are in one unit.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a sweep file may be loaded from anywhere

from configs import pretrain
from trillium_moe.config import Config, ConfigError, check_choice
from trillium_moe.config_files import from_config_dict

OWN = ("seeds", "steps", "rows", "keep")


def base(options: str = "", **defaults: int | str) -> tuple[Config, tuple[int, ...]]:
    """(config, seeds) of `scale=small,seeds=3`, over `defaults`, over those of `pretrain`."""
    given = {key: str(value) for key, value in defaults.items()}
    for item in filter(None, options.split(",")):
        key, equals, value = item.partition("=")
        check_choice("option", key, (*OWN, "dtype", *pretrain.DEFAULTS))
        if not equals:
            raise ConfigError(f"config option {item!r}: write {key}=VALUE")
        given[key] = value
    dtype = given.pop("dtype", "")
    own = {key: _count(key, given.pop(key), least=key != "keep") for key in OWN if key in given}
    config = from_config_dict(pretrain.get_config(",".join(f"{k}={v}" for k, v in given.items())))
    steps, dtypes = own.get("steps", config.train.steps), config.model.dtypes
    config = replace(
        config,
        name=f"{given.get('scale', 'tiny')} ablation",
        model=replace(config.model, vocab_size=272, dtypes=replace(dtypes, compute=dtype or dtypes.compute)),
        data=replace(config.data, tokenizer="byte", batch_size=own.get("rows", config.data.batch_size)),
        train=replace(config.train, steps=steps, log_every=1, eval_every=0, eval_batches=16, keep=own.get("keep", 1),
                      checkpoint_every=max(50, steps // 4), sample_tokens=0, alarm_violation=0.0, alarm_dead=0.0),
    )
    return config, tuple(range(own.get("seeds", 3)))


def _count(key: str, value: str, least: int) -> int:
    if not value.isdigit() or int(value) < least:
        raise ConfigError(f"config {key}={value!r}: must be a whole number of {least:d} or more")
    return int(value)


def pick(options: str, key: str, default: str = "") -> tuple[str, str]:
    """(the other options, the value of an option that a sweep has for itself)."""
    items = [item.partition("=") for item in options.split(",")]
    others = ",".join("".join(item) for item in items if item[0] != key)
    return others, next((value for name, _, value in items if name == key), default)

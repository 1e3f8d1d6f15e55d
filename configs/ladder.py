"""One stage of the context ladder as a run of its own, for experiments.train on many hosts and experiments.compile:

  --config=configs/ladder.py:scale=medium,stage=64k,tokens=400000000000,start=gs://bucket/ladder/8k

    scale, shrink   as in configs/pretrain.py; shrink is 1 here
    stage           the stage; the ladder goes from 8k to it and on to 1m
    tokens          of the whole ladder
    mix, rate       as the flags of experiments.curriculum
    start           the directory of the stage before
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # config_flags loads this file from anywhere

from dataclasses import replace

from configs import pretrain, stages
from trillium_moe.config import ConfigError, check_choice
from trillium_moe.config_files import from_config_dict, to_config_dict

DEFAULTS = {"scale": "small", "stage": "8k", "shrink": "1", "tokens": "0", "mix": "pretrain", "rate": "continue",
            "start": "before"}


def get_config(options: str = ""):
    """The stage's run as a ConfigDict; see the module's docstring for `options`."""
    given = dict(DEFAULTS)
    for item in filter(None, options.split(",")):
        key, equals, value = item.partition("=")
        check_choice("option", key, tuple(DEFAULTS))
        if not equals:
            raise ConfigError(f"config option {item!r}: write {key}=VALUE")
        given[key] = value
    if not given["tokens"].isdigit():
        raise ConfigError(f"config tokens={given['tokens']!r}: must be a whole number; 0 for the scale's own")
    base = from_config_dict(pretrain.get_config(f"scale={given['scale']},shrink={given['shrink']}"))
    ladder = stages.ladder(base, tuple(stages.STAGES), tokens=int(given["tokens"]), mixtures=given["mix"],
                           rate=given["rate"])
    check_choice("stage", given["stage"], tuple(ladder))
    config = ladder[given["stage"]]
    if config.train.first_step:
        config = replace(config, train=replace(config.train, start=given["start"]))
    return to_config_dict(config)

"""Pre-training: --config=configs/pretrain.py:scale=tiny,stage=8k,shrink=16

    scale   a function of configs/scales.py: tiny, small, medium, large, kimi_linear_48b, trillium_2t8
    stage   a context stage of configs/stages.py: 8k, 64k, 256k, 1m
    shrink  divides the stage's window, for small machines
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # config_flags loads this file from anywhere

from configs import scales, stages
from trillium_moe.config import Config, ConfigError, DataConfig, OptimConfig, TrainConfig, check_choice
from trillium_moe.config_files import to_config_dict

DEFAULTS = {"scale": "tiny", "stage": "8k", "shrink": "16"}


def parse(options: str) -> dict[str, str]:
    """`a=1,b=2` over DEFAULTS."""
    out = dict(DEFAULTS)
    for item in filter(None, options.split(",")):
        key, equals, value = item.partition("=")
        check_choice("option", key, tuple(DEFAULTS))
        if not equals:
            raise ConfigError(f"config option {item!r}: write {key}=VALUE")
        out[key] = value
    return out


def get_config(options: str = ""):
    """The run as a ConfigDict; see the module's docstring for `options`."""
    given = parse(options)
    scale, stage = given["scale"], given["stage"]
    check_choice("scale", scale, tuple(scales.SCALES))
    if not given["shrink"].isdigit():
        raise ConfigError(f"config shrink={given['shrink']!r}: must be a whole number of 1 or more")
    seq_len = stages.window(stage, int(given["shrink"]))
    lr, rows = scales.RECIPES[scale]
    bpe = scale != "tiny"
    model = scales.SCALES[scale]()
    return to_config_dict(
        Config(
            name=f"{scale}-{stage}",
            model=model,
            data=DataConfig(
                seq_len=seq_len,
                batch_size=min(rows, stages.STAGES[stage].rows),
                tokenizer="bpe" if bpe else "byte",
                bpe_vocab=min(model.vocab_size, 32_768),
            ),
            optim=OptimConfig(lr=lr),
            train=TrainConfig(steps=200 if scale == "tiny" else 10_000),
        )
    )

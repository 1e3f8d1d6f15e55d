"""Recall with a state of fixed size: --config=configs/ablations/recall.py:task=mqar,mixer=kda,length=256,lr=5e-4

The published protocol (Kimi Linear, arXiv 2510.26692, section 5.1): two layers of two heads of 128, at most 20,000
steps, the best of four learning rates, lengths 256 to 2048.

    task     mqar | palindrome | stack
    mixer    kda: a decay for every channel | gdn: the gated delta rule, one decay for a head | mla: attention, rotary
    length   tokens of a sequence
    lr       5e-5 | 1e-4 | 5e-4 | 1e-3 in the paper

The loss is that of the answers alone. Accuracy: experiments.eval --suite=long --tasks=TASK --lengths=LENGTH.
"""

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # config_flags loads this file from anywhere

from trillium_moe.config import (
    Config,
    ConfigError,
    DataConfig,
    DtypeConfig,
    KDAConfig,
    MixtureConfig,
    MLAConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    check_choice,
)
from trillium_moe.config_files import to_config_dict

DEFAULTS = {"task": "mqar", "mixer": "kda", "length": "256", "lr": "5e-4", "steps": "20000"}
SYMBOLS = {"mqar": 8192, "palindrome": 256, "stack": 256}
MIXERS = {
    "kda": {"mla_layers": (-1,)},
    "gdn": {"mla_layers": (-1,), "kda": KDAConfig(n_heads=2, head_dim=128, decay_per="head")},
    "mla": {"kda_per_mla": 0},
}


def model(task: str, mixer: str) -> ModelConfig:
    """Two layers of one mixer, each with a dense FFN."""
    base = ModelConfig(
        vocab_size=272 + SYMBOLS[task], d_model=256, n_layers=2, n_dense_layers=2, ffn_dim=512, residual="none",
        activation="swiglu", scan_layers=False, remat="none", dtypes=DtypeConfig(compute="float32"),
        kda=KDAConfig(n_heads=2, head_dim=128),
        mla=MLAConfig(n_heads=2, q_lora_rank=0, kv_lora_rank=256, nope_dim=64, rope_dim=64, v_dim=128, position="rope"),
    )  # fmt: skip
    return replace(base, **MIXERS[mixer])


def get_config(options: str = ""):
    """The run as a ConfigDict; see the module's docstring for `options`."""
    given = dict(DEFAULTS)
    for item in filter(None, options.split(",")):
        key, equals, value = item.partition("=")
        check_choice("option", key, tuple(DEFAULTS))
        if not equals:
            raise ConfigError(f"config option {item!r}: write {key}=VALUE")
        given[key] = value
    task, mixer = given["task"], given["mixer"]
    check_choice("task", task, tuple(SYMBOLS))
    check_choice("mixer", mixer, tuple(MIXERS))
    try:
        length, lr, steps = int(given["length"]), float(given["lr"]), int(given["steps"])
    except ValueError:
        raise ConfigError(f"config option {options!r}: length and steps are whole numbers, lr is a number") from None
    mixture = MixtureConfig(text=0.0, synthetic=1.0, tasks=(task,), split=0.0)
    return to_config_dict(
        Config(
            name=f"{task}-{mixer}-{length}",
            model=model(task, mixer),
            data=DataConfig(seq_len=length, batch_size=64, mixture=mixture),
            optim=OptimConfig(name="adamw", lr=lr, warmup=0.05, weight_decay=0.1, beta2=0.98),
            train=TrainConfig(steps=steps, log_every=50, eval_every=0, eval_batches=1, checkpoint_every=2000,
                              sample_tokens=0),
        )
    )

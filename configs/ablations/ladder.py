"""One question at three sizes: configs/ablations/ladder.py:question=residual

    question   a file of this folder whose arms hold at every width (default residual)
    widths     1+2+4: model widths in units of 64; depth, heads and ranks follow (default), steps grow with the width
"""

import dataclasses
from pathlib import Path

from configs.ablations.common import base
from trillium_moe.config import ConfigError, check_choice
from trillium_moe.sweep.plan import Sweep, chain, load_sweep, named, product

QUESTIONS = ("activation", "balancing", "decay", "mixer", "residual")


def size(m: int, steps: int, lr: float):
    """Width 64 m. m = 2 is `tiny`."""
    return named(f"width {64 * m}", "rung", **{
        "model.d_model": 64 * m, "model.n_layers": 1 + 4 * m if m < 4 else 13, "model.ffn_dim": 192 * m,
        "model.kda.n_heads": m, "model.kda.head_dim": 64 if m > 1 else 32,
        "model.mla.n_heads": m, "model.mla.q_lora_rank": 24 * m, "model.mla.kv_lora_rank": 16 * m,
        "model.mla.nope_dim": 64 if m > 1 else 32, "model.mla.rope_dim": 16, "model.mla.v_dim": 64 if m > 1 else 32,
        "model.moe.expert_dim": max(24 * m, 64) if m > 2 else 24 * m, "model.moe.latent_dim": 32 * m,
        "train.steps": steps * m, "optim.lr": lr * (2 / m) ** 0.5,
    })


def get_sweep(options: str = "") -> Sweep:
    given = dict(item.partition("=")[::2] for item in filter(None, options.split(",")))
    question, widths = given.pop("question", "residual"), given.pop("widths", "1+2+4")
    check_choice("question", question, QUESTIONS)
    if not all(m.isdigit() and int(m) for m in widths.split("+")):
        raise ConfigError(f"config widths={widths!r}: write whole numbers with + between, such as 1+2+4")
    rest = ",".join(f"{k}={v}" for k, v in given.items())
    config, seeds = base(rest, steps=100)
    asked = load_sweep(f"{Path(__file__).parent / question}.py:{rest}")
    sizes = chain(*(size(int(m), config.train.steps, config.optim.lr) for m in widths.split("+")))
    return dataclasses.replace(
        asked, question=f"{asked.question}: three sizes", base=config, arms=product(sizes, asked.arms), seeds=seeds)

"""Reinforcement learning: --config=configs/rl.py:env=read_page,objective=k25,scale=cpu

    env        an environment, or several joined by "+": read_page, lookup, flaky, drift, calculator, aggregate, ...
    objective  k25, grpo, dr_grpo, dapo, gspo, cispo, k15, reinforce
    scale      cpu: minutes on two cores; gpu: wider, more trajectories a rollout
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # config_flags loads this file from anywhere

from trillium_moe.config import (
    ConfigError,
    DtypeConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    check_choice,
)
from trillium_moe.config_files import to_config_dict
from trillium_moe.rl.config import OBJECTIVES, ObjectiveConfig, RLConfig, RolloutConfig, SFTConfig, TaskConfig

# One line of index and marked pages: what small models learn within minutes. With four calls, trying pages finds the
# right one of 8 in 41% (with repeats) or 50% of the tasks. Three hops, one call to spare.
TASKS = {"read_page": "read_page:entries=0:lines=1:values=64:budget=4", "lookup": "lookup:budget=4"}

DEFAULTS = {"env": "read_page", "objective": "k25", "scale": "cpu"}


def model(scale: str) -> ModelConfig:
    """Two or four layers, KDA and MLA in turn. Rows are short: on a CPU the recurrence compiles far faster than its
    chunked form and runs as fast."""
    layers, dense = {"cpu": (2, 2), "gpu": (4, 1)}[scale]  # experts multiply what a CPU has to compile
    width = 64
    kernel = {"cpu": "reference", "gpu": "xla"}[scale]
    return ModelConfig(
        vocab_size=480, d_model=width, n_layers=layers, kda_per_mla=1, n_dense_layers=dense, ffn_dim=2 * width,
        block_size=2, scan_layers=scale == "gpu", remat="layer" if scale == "gpu" else "none",
        kda=KDAConfig(n_heads=2, head_dim=16, implementation=kernel),
        mla=MLAConfig(n_heads=2, q_lora_rank=0, kv_lora_rank=32, nope_dim=16, rope_dim=16, v_dim=16,
                      implementation="xla"),
        moe=MoEConfig(n_experts=8, k=2, expert_dim=32, latent_dim=32, n_shared=1, implementation="xla",
                      router_implementation="xla"),
        dtypes=DtypeConfig(compute="float32"),
    )  # fmt: skip


def get_config(options: str = ""):
    """The run as a ConfigDict; see the module's docstring for `options`."""
    given = dict(DEFAULTS)
    for item in filter(None, options.split(",")):
        key, equals, value = item.partition("=")
        check_choice("option", key, tuple(DEFAULTS))
        if not equals:
            raise ConfigError(f"config option {item!r}: write {key}=VALUE")
        given[key] = value
    check_choice("scale", given["scale"], ("cpu", "gpu"))
    check_choice("objective", given["objective"], OBJECTIVES)
    cpu = given["scale"] == "cpu"
    return to_config_dict(
        RLConfig(
            name=f"{given['env']}-{given['objective']}",
            updates=120 if cpu else 100,
            rows=8 if cpu else 32,
            eval_every=10,
            model=model(given["scale"]),
            sft=SFTConfig(steps=400 if cpu else 600, answers=0.7 if cpu else 0.6,
                          optim=OptimConfig(name="adamw", lr=4e-3, schedule="wsd", warmup=0.05)),
            optim=OptimConfig(name="adamw", lr=2e-3, schedule="wsd", decay=0.0, warmup=0.01, weight_decay=0.0),
            task=TaskConfig(envs=tuple(TASKS.get(e, e) for e in given["env"].split("+")), call_cost=0.005),
            rollout=RolloutConfig(groups=16 if cpu else 32, chunks=(8, 16, 24)),
            # Before the policy can follow what the index says, a call of it is a call lost: without the pull towards
            # the start, which never unlearns trying, it is gone within 40 updates and with it what there was to find.
            objective=ObjectiveConfig(name=given["objective"], credit="turn", baseline="turn", kl=0.06, kl_anneal=200),
        )
    )

"""The command line of reinforcement learning: what is wrong is one line."""

from pathlib import Path

import pytest

from experiments import rl
from trillium_moe.config_files import from_config_dict
from trillium_moe.rl.config import RLConfig

RL = f"--config={Path(__file__).parents[2]}/configs/rl.py"


@pytest.mark.parametrize("argv, message", [
    ((RL,), "flag --workdir is missing"),
    ((RL + ":env=read_pages", "--workdir=x"), "did you mean 'read_page'?"),
    ((RL + ":objective=grpoo", "--workdir=x"), "did you mean 'grpo'?"),
    ((RL + ":scale=tpu", "--workdir=x"), "config scale='tpu': must be one of cpu, gpu"),
    ((RL, "--workdir=x", "--config.objective.tua=1"), "unknown key; did you mean --config.objective.tau?"),
    ((RL, "--workdir=x", "--config.rollout.pause=0"), "config rollout.pause=0.0: must lie in (0, 1]"),
    ((RL, "--workdir=x", "--config.row=64"), "config row=64: must hold a trajectory of rollout.max_tokens=192"),
    ((RL, "--workdir=x", "--config.task.noise=0.9"), "config task.noise=0.9: must lie in [0, 0.5]"),
    ((RL, "--workdir=x", "--config.model.vocab_size=300"), "config model.vocab_size=300: must be at least 476"),
    ((RL, "--workdir=x", "--seeds=a"), "flag --seeds=a: must be whole numbers"),
])  # fmt: skip
def test_wrong_command_lines(argv, message, capsys):
    assert rl.main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err and out == ""


@pytest.mark.parametrize("options", ["", "scale=gpu", "env=read_page+lookup+flaky+drift,objective=grpo,scale=gpu"])
def test_configs_resolve(options):
    from configs.rl import get_config

    config = from_config_dict(get_config(options), RLConfig)
    assert len(config.task.envs) == (4 if "+" in options else 1)
    assert from_config_dict(get_config(options).to_dict(), RLConfig) == config


def test_the_benchmark_builds_its_arms():
    from benchmarks.rl import EFFORTS, LONG, config_of

    config = config_of("env=flaky", task={"efforts": tuple(EFFORTS)}, teachers=("a", "b"))
    assert config.task.efforts == ("low", "high", "max") and config.teachers == ("a", "b")
    long = config_of("", task={"envs": (f"{LONG}:filler=11000",)}, row=90_112, rollout={"max_tokens": 90_112})
    assert long.row == long.rollout.max_tokens

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


def test_the_benchmark_builds_its_arms(tmp_path):
    from benchmarks.rl import ARMS, ENVS, config_of

    arms = {arm: config_of(arm, tmp_path, updates=60) for arm in ARMS}
    assert all(c.updates == 60 and not c.sft_only for arm, c in arms.items() if arm != "effort")
    assert arms["long"].row == arms["long"].rollout.max_tokens > 2 * 33_000 > 1 << 16
    assert arms["low"].effort.tau < arms["high"].effort.tau < arms["max"].effort.tau
    assert arms["grpo-lag4"].objective.name == "grpo" and arms["grpo-lag4"].rollout.lag == 4
    assert arms["distilled"].task.efforts == ("low", "high", "max") and len(arms["distilled"].teachers) == 3
    for arm, c in arms.items():  # what it begins with is a run of the same model, of an arm that there is
        for folder in filter(None, (c.start, *c.teachers)):
            begins = folder.removeprefix(f"{tmp_path}/").split("/")[0]
            assert arms[begins].model == c.model and arm not in ENVS

"""Joining processes: what the environment says, and flags that contradict one another."""

import pytest

from experiments import train
from experiments.common import command
from trillium_moe.config import ConfigError
from trillium_moe.parallel.runtime import initialize, is_cluster

CLUSTERS = [{"SLURM_STEP_NUM_TASKS": "16"}, {"OMPI_COMM_WORLD_SIZE": "2"}, {"JAX_COORDINATOR_ADDRESS": "host:1"},
            {"TPU_WORKER_HOSTNAMES": "a,b"}, {"MEGASCALE_COORDINATOR_ADDRESS": "host"}]


@pytest.mark.parametrize("environ", CLUSTERS, ids=lambda e: next(iter(e)))
def test_environments_with_several_processes(environ):
    assert is_cluster(environ | {"JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize("environ", [{}, {"SLURM_STEP_NUM_TASKS": "1"}, {"TPU_WORKER_HOSTNAMES": "localhost"}],
                         ids=str)
def test_environments_with_one(environ):
    assert not is_cluster(environ | {"JAX_PLATFORMS": "cpu"})


def test_alone_nothing_is_joined(monkeypatch):
    monkeypatch.setattr("jax.distributed.initialize", lambda *a, **k: pytest.fail("nobody to join"))
    for environ in CLUSTERS:
        for name in environ:
            monkeypatch.delenv(name, raising=False)
    initialize()


@pytest.mark.parametrize("flags, message", [
    ({"coordinator": "a:1"}, "give all three, or none"),
    ({"coordinator": "a:1", "num_processes": 2}, "give all three, or none"),
    ({"num_processes": 2, "process_id": 0}, "give all three, or none"),
    ({"coordinator": "a:1", "num_processes": 2, "process_id": 2}, "process_id=2: must be less than num_processes=2"),
])
def test_flags_that_cannot_work(flags, message):
    with pytest.raises(ConfigError, match=message):
        initialize(**flags)


def test_the_command_line_says_so_too(tmp_path, capsys):
    argv = ["--config=configs/pretrain.py", f"--workdir={tmp_path}", "--coordinator=a:1"]
    assert command(train.__doc__, train.define, train.run, argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "give all three" in err and err.count("\n") == 1

"""Two processes with 4 devices each: train, lose one, resume bit for bit, restore in one process with 8."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from tests.integration.test_resume import CONFIG, ROOT, final_state, lines
from trillium_moe.train.metrics import read_metrics

pytestmark = pytest.mark.slow

STEPS, EVERY = 60, 20
OVERRIDES = CONFIG | {"data.batch_size": 8, "train.steps": STEPS, "train.checkpoint_every": EVERY,
                      "train.eval_every": EVERY, "mesh.data": 4, "mesh.context": 2, "train.sample_tokens": 0}
HEARTBEAT = 10


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(workdir, cache, processes=2, devices=4, port=None, ids=None, timeout=120):
    env = os.environ | {
        "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(cache),
        "XLA_FLAGS": f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}",
    }  # fmt: skip
    port = port or free_port()
    flags = [f"--config.{key}={value}" for key, value in OVERRIDES.items()]
    out = []
    for i in range(processes) if ids is None else ids:
        several = [f"--coordinator=localhost:{port}", f"--num_processes={processes}", f"--process_id={i}",
                   f"--init_timeout={timeout}", f"--heartbeat_timeout={HEARTBEAT}"] if processes > 1 else []
        command = [sys.executable, "-m", "experiments.train", "--config=configs/pretrain.py", "--json",
                   f"--workdir={workdir}", *flags, *several]
        out.append(subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE))
    return out


def finish(processes):
    results = [p.communicate(timeout=600) for p in processes]
    for process, (_, err) in zip(processes, results):
        assert process.returncode == 0, err[-4000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in results]


def wait_for_step(processes, workdir, step):
    while not any(line["step"] >= step for line in read_metrics(workdir)):
        for process in processes:
            assert process.poll() is None, process.communicate()[1][-4000:]
        time.sleep(0.02)


def leaves(workdir):
    restored = final_state(workdir)
    assert restored.step == STEPS
    return [np.asarray(x) for x in jax.tree.leaves(restored.state)], restored.data_state


def test_two_processes_train_die_resume_and_become_one(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    whole, broken, one = root / "whole", root / "broken", root / "one"
    results = finish(start(whole, root / "cache"))
    assert [r["step"] for r in results] == [STEPS, STEPS]
    assert results[0]["train/loss"] == results[1]["train/loss"]  # both saw the same metrics, one wrote them
    assert [line["step"] for line in lines(whole)] == list(range(1, STEPS + 1))
    assert (whole / "report.html").exists()

    processes = start(broken, root / "cache")
    wait_for_step(processes, broken, EVERY + 5)
    processes[1].kill()
    killed = time.monotonic()
    processes[0].communicate(timeout=6 * HEARTBEAT)
    assert processes[0].returncode != 0 and time.monotonic() - killed < 3 * HEARTBEAT
    processes[1].communicate()
    shutil.copytree(broken, one)

    finish(start(broken, root / "cache"))
    (a, data_a), (b, data_b) = leaves(whole), leaves(broken)
    assert data_a == data_b and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    assert lines(whole) == lines(broken)

    # the same checkpoint in one process with all 8 devices: same data order, same program, other transport
    finish(start(one, root / "cache", processes=1, devices=8))
    c, data_c = leaves(one)
    assert data_c == data_a
    for x, y in zip(a, c, strict=True):
        np.testing.assert_allclose(y, x, rtol=0, atol=1e-3 * max(1e-6, np.abs(x).max()))
    assert [line["step"] for line in lines(one)] == list(range(1, STEPS + 1))
    np.testing.assert_allclose([line["train/loss"] for line in lines(one)],
                               [line["train/loss"] for line in lines(whole)], rtol=1e-4)


def test_sigterm_stops_all_at_the_same_step(tmp_path):
    processes = start(tmp_path / "run", tmp_path / "cache")
    wait_for_step(processes, tmp_path / "run", 3)
    processes[1].send_signal(signal.SIGTERM)
    results = finish(processes)
    assert results[0]["step"] == results[1]["step"] < STEPS and not results[0]["finished"]


def test_a_missing_process_is_one_clear_error(tmp_path):
    process, = start(tmp_path / "run", tmp_path / "cache", ids=[1], timeout=4)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "error: process 1 of 2 at localhost:" in err and "did not find the others within 4 s" in err, err[-3000:]

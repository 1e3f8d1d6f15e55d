"""Promise 1: N steps, kill -9, restore, N steps == 2 N steps. Real processes, a real model, every leaf and metric."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from trillium_moe.config_files import load_config
from trillium_moe.train import checkpoint
from trillium_moe.train.metrics import array_steps, is_timing, read_arrays, read_metrics
from trillium_moe.train.state import init_state

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 240
CONFIG = {
    "model.n_layers": 2, "model.d_model": 16, "model.ffn_dim": 32, "model.block_size": 1, "model.scan_layers": False,
    "model.remat": "none", "model.kda.n_heads": 1, "model.kda.head_dim": 8, "model.mla.n_heads": 1,
    "model.mla.q_lora_rank": 8, "model.mla.kv_lora_rank": 8, "model.mla.nope_dim": 8, "model.mla.rope_dim": 4,
    "model.mla.v_dim": 8, "model.moe.n_experts": 4, "model.moe.k": 2, "model.moe.expert_dim": 8,
    "model.moe.latent_dim": 8, "data.seq_len": 32, "data.batch_size": 2, "data.source": "text",
    "data.path": f"{ROOT}/trillium_moe/**/*.py", "train.steps": STEPS, "train.log_every": 1, "train.eval_every": 60,
    "train.eval_batches": 2, "train.checkpoint_every": 60, "train.keep": 2, "train.sample_tokens": 8,
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    # One compilation for all processes, and a quick one: what is compared is runs, not optimisation levels.
    return os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("xla")), "JAX_PLATFORMS": "cpu",
                         "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
                         "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def start(workdir, environment):
    overrides = [f"--config.{key}={value}" for key, value in CONFIG.items()]
    return subprocess.Popen([sys.executable, "-m", "experiments.train", "--config=configs/pretrain.py", "--json",
                             f"--workdir={workdir}", *overrides],
                            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


def wait_for_step(process, workdir, step):
    while not any(line["step"] >= step for line in read_metrics(workdir)):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.005)


def final_state(workdir):
    return checkpoint.restore(workdir, jax.eval_shape(lambda: init_state(load_config(workdir))))


def lines(workdir):
    return [{name: value for name, value in line.items() if not is_timing(name)} for line in read_metrics(workdir)]


def test_killed_and_stopped_run_equals_an_uninterrupted_one(tmp_path, environment):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result, _ = finish(start(whole, environment))
    assert result["finished"] and result["step"] == STEPS

    process = start(broken, environment)
    wait_for_step(process, broken, 80)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed_at = lines(broken)[-1]["step"]
    assert killed_at < STEPS

    process = start(broken, environment)
    wait_for_step(process, broken, killed_at + 10)
    process.send_signal(signal.SIGTERM)
    stopped, err = finish(process)
    assert not stopped["finished"] and killed_at < stopped["step"] < STEPS
    assert f"stopped by SIGTERM after step {stopped['step']}" in err

    result, _ = finish(start(broken, environment))
    assert result["finished"]

    a, b = final_state(whole), final_state(broken)
    assert a.step == b.step == STEPS and a.data_state == b.data_state
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(a.state)]
    differ = [name for name, x, y in zip(names, jax.tree.leaves(a.state), jax.tree.leaves(b.state))
              if not np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)]
    assert differ == [] and len(names) > 50
    assert lines(whole) == lines(broken)
    assert array_steps(whole) == array_steps(broken)
    for step in array_steps(whole):
        ours, theirs = read_arrays(whole, step)[1], read_arrays(broken, step)[1]
        assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in ours)
    assert (whole / "sample.txt").read_text() == (broken / "sample.txt").read_text()
    assert (broken / "report.html").exists()

    # the other commands read the same run
    def run(name, *flags):
        done = subprocess.run([sys.executable, "-m", f"experiments.{name}", "--json", f"--workdir={broken}", *flags],
                              cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    measured = run("eval")
    assert measured["step"] == STEPS and measured["batches"] == 2
    assert measured["heldout/bits_per_byte"] == lines(whole)[-1]["heldout/bits_per_byte"]
    text = run("generate", "--prompt=import ", "--tokens=8", "--seed=1")
    assert text["prompt"] == "import " and isinstance(text["text"], str)
    assert lines(whole)[-1]["train/loss"] < lines(whole)[0]["train/loss"]

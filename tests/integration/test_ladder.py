"""A ladder of three windows, killed inside the third stage and started again, ends with the same bits."""

import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.integration.test_resume import CONFIG, ROOT, final_state, lines, wait_for_step
from trillium_moe.train import checkpoint

pytestmark = pytest.mark.slow

# the tests' own cache of programs (`tests/conftest.py`)
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}
STAGES = ("8k", "64k", "256k")
OWN = {"data.seq_len": 64, "data.batch_size": 8, "train.checkpoint_every": 5, "train.keep": 3, "train.sample_tokens": 0,
       "train.eval_every": 0}
FLAGS = ["--stages=8k,64k,256k", "--steps=6,6,40", "--mix=recall", "--floor=1", "--tasks=needle", "--answers=4",
         "--eval_tokens=4096", "--eval_rows=2", "--eval_chunk=64", "--longest=512", "--generate=1"]


def start(workdir):
    overrides = [f"--config.{key}={value}" for key, value in (CONFIG | OWN).items() if key != "train.steps"]
    # the repository's own modules are one package of some hundred thousand bytes: long documents for every stage
    return subprocess.Popen([sys.executable, "-m", "experiments.curriculum", "--config=configs/pretrain.py", "--json",
                             f"--workdir={workdir}", *FLAGS, *overrides],
                            cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process):
    out, err = process.communicate(timeout=1800)  # three windows to compile, on a machine that may be busy
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1]), err


def test_killed_in_the_third_stage(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result, said = finish(start(whole))
    assert result["finished"] and [s["window"] for s in result["stages"]] == [64, 512, 2048]
    assert [s["steps"] for s in result["stages"]] == [6, 6, 40]
    assert "needle at" in said and (whole / "ladder.html").exists() and "| 256k | needle |" in (
        whole / "table.md").read_text()

    process = start(broken)
    wait_for_step(process, broken / "256k", 20)
    process.send_signal(signal.SIGKILL)
    process.wait()
    saved = checkpoint.steps(broken / "256k")
    assert saved and saved[-1] < 52 and not (broken / "256k" / "gate.json").exists()
    done = (broken / "64k" / "gate.json").stat().st_mtime_ns
    result, _ = finish(start(broken))
    assert result["finished"] and (broken / "64k" / "gate.json").stat().st_mtime_ns == done  # not run again

    for name in STAGES:
        a, b = final_state(whole / name), final_state(broken / name)
        assert a.step == b.step and a.data_state == b.data_state
        for x, y in zip(jax.tree.leaves(a.state), jax.tree.leaves(b.state)):
            assert np.array_equal(x, y)
        assert lines(whole / name) == lines(broken / name)
        cells = [json.loads((folder / name / "long.json").read_text())["cells"] for folder in (whole, broken)]
        assert cells[0] == cells[1]
    shares = lines(whole / "256k")[-1]
    assert sum(shares[f"data/share_{kind}"] for kind in ("text", "long", "replay", "joined", "synthetic")) == (
        pytest.approx(1))

    # a stage whose predecessor is gone
    (broken / "256k" / "gate.json").unlink()
    for path in (broken / "64k" / "checkpoints", broken / "256k" / "checkpoints"):
        path.rename(path.with_name("gone"))
    process = start(broken)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2 and "64k' holds no checkpoint; train first" in err.splitlines()[-1]

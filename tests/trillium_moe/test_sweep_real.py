"""A sweep of real models, killed as a machine is killed: with SIGKILL, launcher and workers alike."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from trillium_moe.sweep.execute import read_outcome, work
from trillium_moe.sweep.plan import load_sweep
from trillium_moe.train import loop

SWEEP = """
from configs.ablations.common import base
from dataclasses import replace
from trillium_moe.config import DtypeConfig, KDAConfig, MLAConfig, ModelConfig, MoEConfig, MeshConfig
from trillium_moe.sweep.plan import Sweep, chain, named

def get_sweep(options=""):
    config, seeds = base("seeds=2,steps=40,rows=2,shrink=128")
    config = replace(config, model=ModelConfig(
        vocab_size=272, d_model=16, n_layers=2, ffn_dim=32, block_size=1, dtypes=DtypeConfig(compute="float32"),
        kda=KDAConfig(n_heads=1, head_dim=16),
        mla=MLAConfig(n_heads=1, q_lora_rank=0, kv_lora_rank=16, nope_dim=16, rope_dim=8, v_dim=16),
        moe=MoEConfig(n_experts=4, k=2, expert_dim=16, latent_dim=16, n_shared=1)),
        data=replace(config.data, batch_size=1), train=replace(config.train, checkpoint_every=5, eval_batches=2),
        mesh=MeshConfig(data=1))
    return Sweep("q", config, chain(named("as it is"), named("bursting", **{"optim.lr": 1e9, "optim.clip_norm": 0.0})),
                 "as it is", seeds, measures=("violation_area",))
"""


pytestmark = pytest.mark.slow


def table(workdir: Path) -> list[dict]:
    rows = csv.DictReader((workdir / "runs.csv").read_text().splitlines())
    timing = ("tokens_per_second", "training_seconds", "peak_bytes", "git_commit")
    return [{k: v for k, v in row.items() if k not in timing} for row in rows]


def test_seeds_of_an_arm_share_their_compilation(tmp_path, monkeypatch):
    """And the second seed's run is the one that it would be alone."""
    (tmp_path / "sweep.py").write_text(SWEEP.replace("steps=40", "steps=3"))
    sweep = load_sweep(str(tmp_path / "sweep.py"))
    compiled = []
    listen = lambda name, *args, **kw: compiled.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        work(sweep.groups[0][:1], tmp_path / "both", say=lambda _: None)
        first = len(compiled)
        work(sweep.groups[0], tmp_path / "both", say=lambda _: None)
        assert first >= 3  # initialisation, step, evaluation
        # what is left are scalars of the loop itself, such as the key of the seed
        assert len(compiled) - first <= 2
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert [read_outcome(tmp_path / "both", r)["status"] for r in sweep.groups[0]] == ["finished"] * 2
    loop._programs.cache_clear()
    work(sweep.groups[0][1:], tmp_path / "alone", say=lambda _: None)
    lines = lambda name: _lines(tmp_path / name / sweep.groups[0][1].folder)
    assert lines("both") == lines("alone")


def _lines(folder: Path) -> list[dict]:
    from trillium_moe.train.metrics import is_timing, read_metrics

    return [{k: v for k, v in line.items() if not is_timing(k)} for line in read_metrics(folder)]


def test_killed_twice_and_resumed_gives_the_same_table(tmp_path):
    (tmp_path / "sweep.py").write_text(SWEEP)
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.getcwd()}
    start = lambda workdir: subprocess.Popen(
        [sys.executable, "-m", "experiments.sweep", f"--sweep={tmp_path}/sweep.py", f"--workdir={workdir}"], env=env,
        stdout=subprocess.DEVNULL)
    assert start(tmp_path / "whole").wait(600) == 0

    for moment in ("as_it_is/seed0", "as_it_is/seed1"):
        launcher, folder = start(tmp_path / "parts"), tmp_path / "parts" / "runs" / moment
        deadline = time.monotonic() + 300
        while not list(folder.glob("checkpoints/1*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        workers = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True).stdout.split()
        launcher.kill()  # before its worker, or it would note how that ended
        launcher.wait()
        for worker in workers:
            os.kill(int(worker), signal.SIGKILL)
        assert '"running"' in (folder / "outcome.json").read_text()
    assert start(tmp_path / "parts").wait(600) == 0
    assert table(tmp_path / "parts") == table(tmp_path / "whole")
    whole = table(tmp_path / "whole")
    assert [row["status"] for row in whole] == ["finished", "finished", "diverged", "diverged"]
    assert "diverged (2 of 2)" in (tmp_path / "parts" / "table.md").read_text()
    assert "diverged (2 of 2)" in (tmp_path / "parts" / "report.html").read_text()

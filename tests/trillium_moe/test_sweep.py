"""Plans, runs that are killed, diverge or fail, statistics and jobs."""

import contextlib
import csv
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from experiments.sweep import main
from trillium_moe.config import Config, ConfigError, TrainConfig
from trillium_moe.config_files import save_config
from trillium_moe.sweep import plan
from trillium_moe.sweep.cluster import write_job
from trillium_moe.sweep.execute import Launcher, is_done, read_outcome, work, write_outcome
from trillium_moe.sweep.gather import gather, summarise, write_tables
from trillium_moe.sweep.measures import MEASURES
from trillium_moe.sweep.plan import Sweep, chain, load_sweep, named, over, override, product, zipped
from trillium_moe.sweep.probe import PROBES
from trillium_moe.sweep.report import write_report
from trillium_moe.train import loop

from .toy import toy_task

BASE = Config(train=TrainConfig(steps=12, log_every=1, eval_every=0, checkpoint_every=4, keep=1, sample_tokens=0))


def small_sweep(**kw) -> Sweep:
    arms = chain(named("base"), named("slow", **{"optim.lr": 1e-3}))
    return Sweep("What is quick?", BASE, arms, "base", seeds=(0, 1), **kw)


# --- plans


def test_axes_combine_and_configs_follow():
    arms = product(over("model.moe.balancing", ("sign", "none")), over("optim.lr", (1e-3, 2e-3), "tuned"))
    sweep = Sweep("q", Config(), arms, "balancing=none", seeds=(3, 5))
    assert [arm.name for arm in arms] == [
        "balancing=sign, lr=0.001", "balancing=sign, lr=0.002", "balancing=none, lr=0.001", "balancing=none, lr=0.002"]
    assert [arm.family for arm in arms] == ["balancing=sign"] * 2 + ["balancing=none"] * 2
    assert len(sweep.runs) == 8 and [len(g) for g in sweep.groups] == [2] * 4
    run = sweep.runs[5]
    assert (run.seed, run.config.seed, run.config.model.moe.balancing, run.config.optim.lr) == (5, 5, "none", 1e-3)
    assert len({r.folder for r in sweep.runs}) == 8
    both = zipped(over("seed", (1, 2)), over("optim.lr", (0.1, 0.2)))
    assert [arm.overrides for arm in both] == [{"seed": 1, "optim.lr": 0.1}, {"seed": 2, "optim.lr": 0.2}]
    with pytest.raises(ValueError):
        zipped(over("seed", (1, 2)), over("optim.lr", (0.1,)))


@pytest.mark.parametrize("overrides, message", [
    ({"model.moe.balancnig": "sign"}, "model.moe.balancnig='sign': unknown key; did you mean model.moe.balancing"),
    ({"model.mo.k": 2}, "model.mo.k=2: no such key"),
    ({"model.moe": 2}, "model.moe=2: is a group of keys"),
    ({"model.kda.g_min": -50.0}, "model.kda.g_min=-50.0: must be at least"),
])
def test_bad_overrides_name_the_key(overrides, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        override(Config(), overrides)


def test_plans_that_cannot_be_read_apart_are_refused():
    with pytest.raises(ConfigError, match="sweep.baseline='bass': must be one of base; did you mean 'base'"):
        Sweep("q", BASE, named("base"), "bass")
    with pytest.raises(ConfigError, match="several arms have one name"):
        Sweep("q", BASE, chain(named("base"), named("Base!", **{"optim.lr": 1.0})), "base")
    with pytest.raises(ConfigError, match=r"sweep.seeds=\(1, 1\)"):
        Sweep("q", BASE, named("base"), "base", seeds=(1, 1))


ABLATIONS = sorted(p for p in Path("configs/ablations").glob("*.py") if p.stem not in ("__init__", "common", "recall"))


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda p: p.stem)
def test_every_ablation_is_a_valid_plan(path):
    sweep = load_sweep(f"{path}:seeds=2,steps=7")
    assert all(r.config.train.steps % 7 == 0 for r in sweep.runs) and len(sweep.seeds) == 2
    assert set(sweep.measures) <= set(MEASURES) and set(sweep.probes) <= set(PROBES)
    assert "activation_max" not in sweep.measures or "activations" in sweep.probes
    differing = {json.dumps(dataclasses.asdict(group[0].config), sort_keys=True) for group in sweep.groups}
    assert len(differing) == len(sweep.groups)  # no two arms are the same experiment


# --- runs


@pytest.fixture
def toy(monkeypatch):
    """`train` on a regression whose data depend on the seed; `on_step(run's workdir, step)` may kill it."""
    hook = {"on_step": lambda workdir, i: None, "poison": {}}

    def train(config, workdir, *, progress, report, around=contextlib.nullcontext):
        save_config(config, workdir)
        task = toy_task(hook["poison"].get(config.optim.lr), on_step=lambda i: hook["on_step"](workdir, i))
        task.batches.i = 1000 * config.seed
        if hook["poison"].get(config.optim.lr) is not None:
            task.batches.poison += 1000 * config.seed
        bits = task.evaluate
        evaluate = lambda state: {"heldout/loss": bits(state)["heldout/bits_per_byte"] * config.optim.lr}
        with around(dataclasses.replace(task, evaluate=evaluate)) as task:
            return loop.fit(config.train, workdir, task, progress=False)

    monkeypatch.setattr(loop, "train", train)
    return hook


def table(sweep, workdir) -> list[dict]:
    """runs.csv without what depends on the machine."""
    write_tables(sweep, gather(sweep, workdir), workdir)
    rows = list(csv.DictReader((Path(workdir) / "runs.csv").read_text().splitlines()))
    timing = ("tokens_per_second", "training_seconds", "peak_bytes")
    return [{k: v for k, v in row.items() if k not in timing} for row in rows]


class Killed(BaseException):
    """What SIGKILL is to a process: nothing after it runs."""


def test_killed_twice_and_resumed_gives_the_same_table(toy, tmp_path):
    sweep = dataclasses.replace(small_sweep(measures=("grad_norm_max",)), seeds=(1,))
    assert work(sweep.runs, tmp_path / "whole", say=lambda _: None)
    reached = []

    def kill(workdir, i):
        reached.append((str(workdir), i))
        if len(reached) in (8, 22):  # inside the first run, after its checkpoint of step 4; inside the other
            raise Killed

    toy["on_step"] = kill
    for _ in range(2):
        with pytest.raises(Killed):
            work(sweep.runs, tmp_path / "parts", say=lambda _: None)
    assert [read_outcome(tmp_path / "parts", r)["status"] for r in sweep.runs].count("running") == 1
    before = len(reached)
    assert work(sweep.runs, tmp_path / "parts", say=lambda _: None)
    assert table(sweep, tmp_path / "parts") == table(sweep, tmp_path / "whole")
    assert len(reached) - before == 8  # what was done is not done again: the last run from its step 4
    assert reached[8][1] == 4  # the second call went on from the checkpoint, not from the start
    before = len(reached)
    assert work(sweep.runs, tmp_path / "parts", say=lambda _: None) and len(reached) == before


def test_a_diverging_run_is_a_result_and_a_failing_one_is_tried_again(toy, tmp_path):
    sweep = small_sweep()
    toy["poison"] = {1e-3: 5}

    def fail(workdir, i):
        if "base/seed1" in str(workdir) and i == 3:
            raise RuntimeError("RESOURCE_EXHAUSTED:\nout of memory")

    toy["on_step"] = fail
    said = []
    assert work(sweep.runs, tmp_path, say=said.append)
    outcomes = [read_outcome(tmp_path, r) for r in sweep.runs]
    assert [o["status"] for o in outcomes] == ["finished", "failed", "diverged", "diverged"]
    assert outcomes[1]["reason"] == "RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    assert outcomes[2]["reason"].startswith("step 6: train/loss=nan")
    assert said[1] == "base, seed 1: failed RuntimeError: RESOURCE_EXHAUSTED: out of memory"
    base, slow = summarise(sweep, gather(sweep, tmp_path))
    assert slow.verdict == "diverged (2 of 2)" and slow.mean is None
    text = write_tables(sweep, gather(sweep, tmp_path), tmp_path)
    assert "1 of 2, 1 failed" in text and "0 of 2, 2 diverged" in text and "step 6: train/loss=nan" in text

    toy["on_step"] = lambda workdir, i: None
    assert work(sweep.runs, tmp_path, say=said.append)
    assert [read_outcome(tmp_path, r)["status"] for r in sweep.runs] == ["finished"] * 2 + ["diverged"] * 2
    page = write_report(sweep, gather(sweep, tmp_path), tmp_path).read_text()
    assert "diverged (2 of 2)" in page and "step 6: train/loss=nan" in page and "4 of 4 runs" in page
    assert (tmp_path / "figures" / "loss.png").stat().st_size > 10_000
    assert "@" not in page.split("<main>")[1].split("data:image")[0]


def test_a_loss_that_ends_above_its_start_has_diverged(toy, tmp_path, monkeypatch):
    sweep = Sweep("q", BASE, named("base"), "base", seeds=(0,))
    real = loop.fit

    def worse(config, workdir, task, progress):
        step = lambda state, batch, f=task.step: (lambda s, m: (s, {**m, "train/loss": m["train/loss"] + s.step}))(
            *f(state, batch))
        return real(config, workdir, dataclasses.replace(task, step=step), progress=progress)

    monkeypatch.setattr(loop, "fit", worse)
    work(sweep.runs, tmp_path, say=lambda _: None)
    outcome = read_outcome(tmp_path, sweep.runs[0])
    assert outcome["status"] == "diverged" and "above the" in outcome["reason"]


def test_workers_that_start_together_do_not_rewrite_the_sweeps_name(tmp_path):
    """One of eight workers once read the file while another had emptied it to write it again, and refused to start."""
    note = tmp_path / "sweep.txt"
    plan.check_same_sweep("a/b.py:seeds=2", tmp_path)
    before = note.stat()
    plan.check_same_sweep("a/b.py:seeds=2", tmp_path)
    assert note.stat().st_ino == before.st_ino and note.stat().st_mtime_ns == before.st_mtime_ns
    plan.check_same_sweep("a/b.py:seeds=3", tmp_path)  # another file takes its place: a reader sees one or the other
    assert note.stat().st_ino != before.st_ino and note.read_text() == "a/b.py:seeds=3\n"
    note.write_text("")
    plan.check_same_sweep("a/b.py", tmp_path)
    with pytest.raises(ConfigError, match="holds a/b.py; name a new workdir"):
        plan.check_same_sweep("a/c.py", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.txt"]


def test_results_of_another_config_are_never_taken_for_ours(toy, tmp_path):
    sweep = small_sweep()
    work(sweep.runs[:1], tmp_path, say=lambda _: None)
    assert is_done(tmp_path, sweep.runs[0])
    other = dataclasses.replace(sweep, base=override(BASE, {"optim.momentum": 0.5}))
    with pytest.raises(ConfigError, match="seed 0 of another config; name a new workdir"):
        is_done(tmp_path, other.runs[0])


def test_a_probe_measures_the_last_model(toy, tmp_path, monkeypatch):
    """And its values are columns of the table."""
    sweep = dataclasses.replace(small_sweep(measures=("activation_max",)), probes=("weights",))
    monkeypatch.setitem(PROBES, "weights", lambda config, state, workdir: {
        "activation_max": float(state.step) * config.optim.lr})
    work(sweep.runs[:3:2], tmp_path, say=lambda _: None, probes=sweep.probes)
    base, slow = summarise(sweep, gather(sweep, tmp_path))
    assert base.average("activation_max") == pytest.approx(12 * BASE.optim.lr)
    assert slow.average("activation_max") == pytest.approx(12 * 1e-3)
    assert "and after it" in write_tables(sweep, gather(sweep, tmp_path), tmp_path)


def test_two_processes_never_train_one_run(toy, tmp_path):
    sweep = small_sweep()

    def again(workdir, i):
        if i == 2:
            with pytest.raises(ConfigError, match="another process is training 'base' seed 0"):
                work(sweep.runs[:1], tmp_path, say=lambda _: None)

    toy["on_step"] = again
    work(sweep.runs[:1], tmp_path, say=lambda _: None)
    assert read_outcome(tmp_path, sweep.runs[0])["status"] == "finished"


def test_runs_that_take_turns_step_one_after_the_other(toy, tmp_path):
    """Both have compiled, one steps to its end, then the other; results are those of runs that do not wait."""
    sweep, reached, both = small_sweep(), [], threading.Barrier(2, timeout=60)

    def on_step(workdir, i):
        reached.append((workdir.parent.name, i))
        if i == 0:
            both.wait()  # neither waits for the other's turn while it compiles
        if i == 1 and len({name for name, j in reached if j > 0}) == 2:
            # runs are processes; Orbax numbers the saves of a process, and hangs where two of its threads save at once
            while all(thread.is_alive() for thread in others):
                time.sleep(0.002)
        time.sleep(0.002)

    toy["on_step"] = on_step
    run = lambda i: work(sweep.runs[i:i + 1], tmp_path / "turns", say=lambda _: None, turn=str(tmp_path / "turn"))
    others = [threading.Thread(target=run, args=(i,)) for i in (0, 2)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    after = [name for name, i in reached if i > 0]
    steps = BASE.train.steps - 1
    assert after in ([a] * steps + [b] * steps for a, b in (("base", "slow"), ("slow", "base")))
    toy["on_step"] = lambda workdir, i: None
    work(sweep.runs, tmp_path / "turns", say=lambda _: None, turn=str(tmp_path / "turn"))  # the lock is free again
    work(sweep.runs, tmp_path / "alone", say=lambda _: None)
    assert table(sweep, tmp_path / "turns") == table(sweep, tmp_path / "alone")


def test_a_worker_takes_turns_where_the_command_says_so(toy, tmp_path):
    argv = ["--sweep=configs/ablations/main.py:seeds=1,steps=3,probe=", f"--workdir={tmp_path / 'x'}", "--only=1"]
    assert main([*argv, f"--turn={tmp_path / 'turn'}"]) == 0 and (tmp_path / "turn").exists()
    assert json.loads((tmp_path / "x/runs/residual_none/seed0/outcome.json").read_text())["status"] == "finished"


STUB = """
import json, os, pathlib, signal, sys, time
work = pathlib.Path([a for a in sys.argv if a.startswith("--workdir=")][0][10:])
only = [int(i) for i in [a for a in sys.argv if a.startswith("--only=")][0][7:].split(",")]
folders = json.loads((work / "folders.json").read_text())
for i in only:
    out = work / folders[i] / "outcome.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text('{"status": "running"}')
    with open(work / "order.txt", "a") as f:
        f.write(f"{i} {os.environ.get('XLA_PYTHON_CLIENT_MEM_FRACTION')} {os.environ.get('CUDA_VISIBLE_DEVICES')} "
                f"{sys.argv[-1]}\\n")
    if (work / f"die{i}").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    if (work / f"wait{i}").exists():
        time.sleep(60)
    (out.parent / "config.json").write_text(json.dumps({}))
    out.write_text('{"status": "finished"}')
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """A launcher whose workers are quick: (sweep, launcher's factory, what was said)."""
    sweep, said = small_sweep(), []
    (tmp_path / "stub.py").write_text(STUB)
    (tmp_path / "folders.json").write_text(json.dumps([r.folder for r in sweep.runs]))
    monkeypatch.setattr("trillium_moe.sweep.execute.is_done", lambda w, r: read_outcome(w, r)["status"] == "finished")
    make = lambda **kw: Launcher(sweep, "x.py", tmp_path, say=said.append,
                                 worker=(sys.executable, str(tmp_path / "stub.py")), **kw)
    return sweep, make, said


def test_a_worker_that_dies_costs_its_run_alone(stub, tmp_path):
    sweep, make, said = stub
    (tmp_path / "die0").touch()
    assert make().run()
    assert [read_outcome(tmp_path, r)["status"] for r in sweep.runs] == ["failed"] + ["finished"] * 3
    assert "the worker ended with signal SIGKILL" in read_outcome(tmp_path, sweep.runs[0])["reason"]
    assert said[0] == "0 of 4 runs are done; 4 to go" and any("base, seed 0: failed" in line for line in said)
    (tmp_path / "die0").unlink()
    assert make().run()
    assert [read_outcome(tmp_path, r)["status"] for r in sweep.runs] == ["finished"] * 4
    ran = [int(line.split()[0]) for line in (tmp_path / "order.txt").read_text().splitlines()]
    assert ran == [0, 1, 2, 3, 0]


def test_workers_share_memory_and_take_turns_on_each_gpu(stub, tmp_path, monkeypatch):
    sweep, make, _ = stub
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.8")
    make(parallel=2, gpus=("3", "5"), turn="/tmp/turn").run()
    lines = sorted(line.split() for line in (tmp_path / "order.txt").read_text().splitlines())
    assert [line[1] for line in lines] == ["0.400"] * 4
    assert [line[2] for line in lines] == ["3", "3", "5", "5"]  # by arm
    assert [line[3] for line in lines] == [f"--turn=/tmp/turn{gpu}" for gpu in "3355"]


def test_a_signal_stops_the_workers_and_nothing_is_lost(stub, tmp_path):
    sweep, make, said = stub
    (tmp_path / "wait1").touch()

    def stop():
        for _ in range(200):
            if read_outcome(tmp_path, sweep.runs[1])["status"] == "running":
                return os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)

    thread = threading.Thread(target=stop)
    thread.start()
    before = signal.getsignal(signal.SIGTERM)
    assert not make().run()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == before
    assert [read_outcome(tmp_path, r)["status"] for r in sweep.runs] == ["finished", "running", "missing", "missing"]
    assert "stopped by SIGTERM" in said[-1]
    (tmp_path / "wait1").unlink()
    assert make().run()
    assert [read_outcome(tmp_path, r)["status"] for r in sweep.runs] == ["finished"] * 4


def test_a_run_that_somebody_else_trains_is_left_alone(stub, tmp_path):
    sweep, make, said = stub
    write_outcome(tmp_path, sweep.runs[0], status="running")
    (tmp_path / "stub.py").write_text(STUB.replace("for i in only:", "for i in only:\n    if i == 0: sys.exit(2)"))
    make().run()
    assert read_outcome(tmp_path, sweep.runs[0])["status"] == "running"
    assert any(line.startswith("base, seed 0: left alone") for line in said)
    assert [read_outcome(tmp_path, r)["status"] for r in sweep.runs[2:]] == ["finished"] * 2


def test_a_worker_that_cannot_start_ends_the_sweep_with_an_error(stub, tmp_path):
    sweep, make, said = stub
    (tmp_path / "stub.py").write_text("raise ImportError('no jax')")
    assert make().run()
    assert {read_outcome(tmp_path, r)["reason"] for r in sweep.runs} == {"the worker did not start; see logs/"}
    assert "no jax" in (tmp_path / "logs" / "base.txt").read_text()


# --- jobs and the command line


def test_jobs_run_the_same_list(tmp_path):
    spec = "configs/ablations/decay.py:seeds=3,steps=50"
    sweep = load_sweep(spec)
    slurm = write_job("slurm", sweep, spec, tmp_path).read_text()
    assert "--array=0-4" in slurm and '--group="$SLURM_ARRAY_TASK_ID"' in slurm and f"--workdir={tmp_path}" in slurm
    command = next(line for line in slurm.splitlines() if line.startswith("exec "))
    assert f"--sweep={spec}" in shlex.split(command)
    xpk = write_job("xpk", sweep, spec, tmp_path).read_text()
    assert "seq 0 4" in xpk and "xpk workload create" in xpk and "--group=$group" in xpk
    for name in ("sweep.sbatch", "sweep-xpk.sh"):
        subprocess.run(["bash", "-n", tmp_path / name], check=True)


@pytest.mark.parametrize("argv, message", [
    ([], "flag --sweep is missing"),
    (["--sweep=configs/ablations/decai.py"], "no such file; there: .*decay"),
    (["--sweep=configs/pretrain.py"], "has no get_sweep"),
    (["--sweep=configs/ablations/decay.py:sedes=3"], "option='sedes': must be one of .*did you mean 'seeds'"),
    (["--sweep=configs/ablations/decay.py:seeds=0"], "seeds='0': must be a whole number of 1 or more"),
    (["--sweep=configs/ablations/main.py:arms=SwiGLU+residual"], "option arms='residual': must be one of .*residual"),
    (["--sweep=configs/ablations/decay.py"], "--workdir is missing"),
    (["--sweep=configs/ablations/decay.py", "--workdir=W", "--only=99"], "the sweep has 15 runs in 5 groups"),
    (["--sweep=configs/ablations/decay.py", "--workdir=W", "--turn=W/a/b"], "--turn=.*/a/b: there is no such folder"),
])
def test_bad_command_lines_are_one_line(argv, message, tmp_path, capsys):
    argv = [a.replace("W", str(tmp_path)) for a in argv]
    assert main(argv) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error:") and "\n" not in error
    import re
    assert re.search(message, error), error


def test_list_and_gather_of_nothing(tmp_path, capsys):
    spec = "configs/ablations/balancing.py:seeds=2"
    assert main([f"--sweep={spec}", "--list"]) == 0
    assert "   2  sign 1e-3, seed 0  {'model.moe.balancing': 'sign'}" in capsys.readouterr().out
    assert main([f"--sweep={spec}", f"--workdir={tmp_path}", "--gather"]) == 0
    assert "| quantile | 0 of 2, 2 missing |" in capsys.readouterr().out
    assert main(["--sweep=configs/ablations/decay.py", f"--workdir={tmp_path}", "--gather"]) == 2
    assert "holds configs/ablations/balancing.py:seeds=2; name a new workdir" in capsys.readouterr().err
    write_outcome(tmp_path, load_sweep(spec).runs[0], status="failed", reason="no memory")
    assert main([f"--sweep={spec}", f"--workdir={tmp_path}", "--gather"]) == 1
    assert "failed: quantile, seed 0: no memory" in capsys.readouterr().err

import json
import os
import signal

import jax
import numpy as np
import pytest

from trillium_moe.config import Config, ConfigError, TrainConfig
from trillium_moe.config_files import save_config
from trillium_moe.train import checkpoint
from trillium_moe.train.loop import check_same_run, fit
from trillium_moe.train.metrics import is_timing, read_arrays, read_metrics

from .toy import toy_task

CONFIG = TrainConfig(steps=12, log_every=3, eval_every=4, checkpoint_every=5, keep=2, sample_tokens=0)


def lines(workdir):
    return [{k: v for k, v in line.items() if not is_timing(k)} for line in read_metrics(workdir)]


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True), a, b)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run: (workdir, outcome)."""
    workdir = tmp_path_factory.mktemp("whole")
    return workdir, fit(CONFIG, workdir, toy_task(), progress=False)


def test_logs_evaluates_and_saves_on_schedule(whole):
    workdir, outcome = whole
    assert outcome.finished and outcome.step == 12 and int(outcome.state.step) == 12
    assert [line["step"] for line in lines(workdir)] == [1, 3, 4, 6, 8, 9, 12]
    assert [line["step"] for line in lines(workdir) if "heldout/bits_per_byte" in line] == [4, 8, 12]
    assert checkpoint.steps(workdir) == [10, 12]
    step, arrays = read_arrays(workdir)
    assert step == 12 and arrays["router/load_LE"].shape == (2, 3)


def test_metrics_belong_to_their_step(whole, tmp_path):
    """Fetching one step late must not shift a metric to its neighbour."""
    task = toy_task()
    state, expected = jax.jit(task.init)(), {}
    for i in range(12):
        state, metrics = task.step(state, next(task.batches))
        expected[i + 1] = float(metrics["train/loss"])
    assert {line["step"]: line["train/loss"] for line in lines(whole[0])} == {
        step: expected[step] for step in (1, 3, 4, 6, 8, 9, 12)}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_at_the_next_boundary_and_resumes_exactly(number, whole, tmp_path, capsys):
    send = lambda i: os.kill(os.getpid(), number) if i == 6 else None
    before = signal.getsignal(number)
    first = fit(CONFIG, tmp_path, toy_task(on_step=send), progress=False)
    assert not first.finished and first.step == 7
    assert checkpoint.steps(tmp_path)[-1] == 7
    assert "after step 7" in capsys.readouterr().err
    assert signal.getsignal(number) == before

    second = fit(CONFIG, tmp_path, toy_task(), progress=False)
    assert second.finished
    assert_equal_trees(second.state, whole[1].state)
    assert lines(tmp_path) == lines(whole[0])
    for step in (1, 4, 5, 8, 12):
        assert (tmp_path / "arrays" / f"{step:08d}.npz").exists() == (whole[0] / "arrays" / f"{step:08d}.npz").exists()


def test_crash_between_checkpoints_replays_from_the_last_one(whole, tmp_path):
    def crash(i):
        if i == 8:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fit(CONFIG, tmp_path, toy_task(on_step=crash), progress=False)
    assert lines(tmp_path)[-1]["step"] > 5  # to be truncated
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 8, "tra')  # killed while writing
    outcome = fit(CONFIG, tmp_path, toy_task(), progress=False)
    assert_equal_trees(outcome.state, whole[1].state)
    assert lines(tmp_path) == lines(whole[0])


@pytest.mark.parametrize("poison", [4, 6])  # step 5 is a checkpoint step, step 7 is not
def test_non_finite_loss_names_the_step_and_is_never_saved(poison, tmp_path):
    config = TrainConfig(steps=12, log_every=1, eval_every=0, checkpoint_every=1 if poison == 6 else 5)
    with pytest.raises(checkpoint.NonFiniteError, match=rf"^step {poison + 1}: train/loss=nan") as error:
        fit(config, tmp_path, toy_task(poison=poison), progress=False)
    assert "\n" not in str(error.value)
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, poison + 1))
    if poison == 6:
        assert checkpoint.steps(tmp_path)[-1] == 6
        restored = checkpoint.restore(tmp_path, jax.eval_shape(toy_task().init))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(restored.state))
        assert "checkpoint is of step 6" in str(error.value)
    else:
        assert checkpoint.steps(tmp_path) == []


def test_torn_newest_checkpoint_is_set_aside(whole, tmp_path, caplog):
    stop = lambda i: os.kill(os.getpid(), signal.SIGTERM) if i == 6 else None
    fit(CONFIG, tmp_path, toy_task(on_step=stop), progress=False)
    (tmp_path / "checkpoints" / "7" / "commit_success.txt").unlink()
    outcome = fit(CONFIG, tmp_path, toy_task(), progress=False)
    assert "torn" in caplog.text
    assert (tmp_path / "checkpoints" / "torn-7").exists()
    assert_equal_trees(outcome.state, whole[1].state)
    assert lines(tmp_path) == lines(whole[0])


def test_longer_run_continues(tmp_path):
    fit(TrainConfig(steps=4), tmp_path, toy_task(), progress=False)
    assert fit(TrainConfig(steps=6), tmp_path, toy_task(), progress=False).step == 6


def test_finished_run_does_nothing(whole):
    before = (whole[0] / "metrics.jsonl").read_text()
    again = fit(CONFIG, whole[0], toy_task(on_step=lambda i: pytest.fail("no step is due")), progress=False)
    assert again.finished and (whole[0] / "metrics.jsonl").read_text() == before


def test_other_config_in_the_workdir_is_named(tmp_path):
    save_config(Config(), tmp_path)
    check_same_run(Config(), tmp_path)
    check_same_run(Config(train=TrainConfig(steps=999)), tmp_path)
    with pytest.raises(ConfigError, match=r"seed=1 \(there: 0\).*name a new workdir"):
        check_same_run(Config(seed=1), tmp_path)
    (tmp_path / "checkpoints" / "60").mkdir(parents=True)
    with pytest.raises(ConfigError, match="train.steps=50: .*already done 60 steps"):
        check_same_run(Config(train=TrainConfig(steps=50)), tmp_path)


def test_every_line_is_strict_json(whole):
    for line in (whole[0] / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

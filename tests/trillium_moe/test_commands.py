"""Every wrong command line is one line: error: key, value, mend. Exit code 2, no traceback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import eval as eval_
from experiments import generate, params, report, train
from experiments.common import command
from trillium_moe.config import Config
from trillium_moe.config_files import save_config
from trillium_moe.train.checkpoint import NonFiniteError

ROOT = Path(__file__).parents[2]
PRETRAIN = f"--config={ROOT}/configs/pretrain.py"


def call(module, *argv):
    return command(module.__doc__, module.define, module.run, argv)


@pytest.mark.parametrize("module, argv, message", [
    (train, (PRETRAIN,), "flag --workdir is missing"),
    (train, ("--workdir=x", "--config.train.stpes=3"),
     "config train.stpes='3': unknown key; did you mean --config.train.steps?"),
    (train, (PRETRAIN, "--workdir=x", "--config.train.stpes=3"),
     "config train.stpes='3': unknown key; did you mean --config.train.steps?"),
    (train, (PRETRAIN, "--workdir=x", "--config.train=3"), "config train='3': unknown key"),
    (train, (PRETRAIN, "--workdir=x", "--config.train.steps=abc"),
     "config train.steps='abc': must be a whole number, like the default 300"),
    (train, (PRETRAIN, "--workdir=x", "--config.train.steps", "3.5"), "config train.steps='3.5': must be a whole"),
    (train, (PRETRAIN, "--workdir=x", "--config.optim.lr=fast"), "config optim.lr='fast': must be a number"),
    (train, (PRETRAIN, "--workdir=x", "--config.model.scan_layers=maybe"), "must be true or false"),
    (train, (PRETRAIN, "--workdir=x", "--config.train.keep=-1"), "config train.keep=-1: must be 0 or more"),
    (train, (PRETRAIN, "--workdir=x", "--wrokdir=y"), "wrokdir"),
    (train, (PRETRAIN, "--workdir=x", "extra"), "argument 'extra' is not a flag; flags are written --name=value"),
    (train, (PRETRAIN + ":scale=tinny", "--workdir=x"), "did you mean 'tiny'?"),
    (train, (f"--config={ROOT}/configs/pretran.py", "--workdir=x"), "pretrain.py?"),
    (params, (PRETRAIN + ":shrink=0",), "shrink"),
    (eval_, (), "flag --workdir is missing"),
    (eval_, ("--workdir=/no/such/run",), "flag --workdir=/no/such/run: no such directory"),
    (generate, ("--workdir=/no/such/run",), "no such directory"),
    (generate, ("--workdir=/no/such/run", "--tokens=many"), "tokens"),
    (report, ("--workdir=/no/such/run",), "no such directory"),
])
def test_wrong_command_lines(module, argv, message, capsys):
    assert call(module, *argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert out == ""


@pytest.mark.parametrize("module", [eval_, generate])
def test_run_without_checkpoint_or_config(module, tmp_path, capsys):
    assert call(module, f"--workdir={tmp_path}") == 2
    assert "holds no config.json" in capsys.readouterr().err
    save_config(Config(), tmp_path)
    assert call(module, f"--workdir={tmp_path}") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "holds no checkpoint; train first" in err and err.count("\n") == 1


def test_impossible_sampling(tmp_path, capsys):
    assert call(generate, f"--workdir={tmp_path}", "--top_p=2") == 2
    assert capsys.readouterr().err == "error: config top_p=2.0: must lie in (0, 1]\n"


def test_last_of_two_overrides_counts(capsys):
    few, many = "--config.model.moe.n_experts=8", "--config.model.moe.n_experts=16"
    totals = []
    for argv in ((few,), (many, few), (many,)):
        assert call(params, PRETRAIN, "--json", *argv) == 0
        totals.append(json.loads(capsys.readouterr().out)["total"])
    assert totals[0] == totals[1] < totals[2]


def test_a_run_that_goes_wrong_is_one_line_and_code_1(capsys):
    def fail(flags):
        raise NonFiniteError("step 7: train/loss=nan; the last good\ncheckpoint is of step 5")

    assert command("", lambda flags: None, fail, []) == 1
    assert capsys.readouterr().err == "error: step 7: train/loss=nan; the last good checkpoint is of step 5\n"


@pytest.mark.parametrize("module", [train, eval_, generate, params, report])
def test_help_names_every_flag(module, capsys):
    assert call(module, "--help") == 0
    out = capsys.readouterr().out
    assert "python -m experiments." in out and "json: print one JSON object" in out
    assert ("--workdir:" in out) == (module is not params)


def test_counts_are_the_published_ones(capsys):
    """model.md 1.3: 2.7795T parameters and 104.19B active; Kimi-Linear 49.1B and 3.11B."""
    assert call(params, PRETRAIN + ":scale=trillium_2t8", "--json") == 0
    big = json.loads(capsys.readouterr().out)
    assert list(big) == ["text", "active_text_without_input_embedding", "vision", "total"]
    assert abs(big["text"] / 2.7795e12 - 1) < 2e-5
    assert abs(big["active_text_without_input_embedding"] / 104.19e9 - 1) < 5e-5
    assert call(params, PRETRAIN + ":scale=kimi_linear_48b", "--json") == 0
    linear = json.loads(capsys.readouterr().out)
    assert round(linear["text"] / 1e9, 1) == 49.1
    assert round(linear["active_text_without_input_embedding"] / 1e9, 2) == 3.11


def test_counts_as_a_table(capsys):
    assert call(params, PRETRAIN, "--config.model.n_mtp=1") == 0
    out = capsys.readouterr().out
    assert "KDA (6 layers)" in out and "multi-token prediction" in out and "100.0%" in out


def test_report_of_a_run_that_has_just_begun(tmp_path, capsys):
    save_config(Config(), tmp_path)
    assert call(report, f"--workdir={tmp_path}", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"report": str(tmp_path / "report.html")}


def test_as_a_process():
    done = subprocess.run([sys.executable, "-m", "experiments.params", "--confg=x"], cwd=ROOT, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "error: Unknown command line flag 'confg'. Did you mean: config ?\n"

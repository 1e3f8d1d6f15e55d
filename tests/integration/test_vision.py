"""A run with pictures from training to an answer, as a user makes it."""

import json

import pytest
from PIL import Image

from experiments import eval as evaluate
from experiments import generate
from experiments.common import command
from tests.trillium_moe.test_vision_stream import CONFIG
from trillium_moe.config import Config, TrainConfig
from trillium_moe.train.loop import train
from trillium_moe.train.metrics import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    from dataclasses import replace

    workdir = tmp_path_factory.mktemp("run")
    config: Config = replace(
        CONFIG, images=replace(CONFIG.images, eval_examples=4), name="pictures",
        train=TrainConfig(steps=3, eval_batches=1, eval_every=0, checkpoint_every=0, log_every=1, sample_tokens=4))
    outcome = train(config, workdir, progress=False)
    assert outcome.finished and outcome.step == 3
    return workdir


def test_the_run_directory(workdir):
    last = read_metrics(workdir)[-1]
    for task in ("words", "count", "position", "colour"):
        assert 0 <= last[f"vision/{task}"] <= 1 and last[f"vision/{task}_chance"] > 0
    assert last["data/image_tokens"] > 0 and last["heldout/bits_per_byte"] > 0
    assert Image.open(workdir / "pictures.png").size[0] > 500
    page = (workdir / "report.html").read_text()
    assert 'alt="pictures"' in page and 'alt="vision"' in page


def test_commands(workdir, capsys):
    Image.new("RGB", (56, 56), "red").save(workdir / "a.png")
    picture = [f"--workdir={workdir}", "--prompt=colour circle? ", "--tokens=3", "--json"]
    assert command("", generate.define, generate.run, [*picture, f"--image={workdir / 'a.png'}"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["prompt"] == "colour circle? "
    assert command("", generate.define, generate.run, [*picture, f"--image={workdir / 'none.png'}"]) == 2
    assert "none.png: no such file" in capsys.readouterr().err
    assert command("", evaluate.define, evaluate.run, [f"--workdir={workdir}", "--json"]) == 0
    assert "vision/words" in json.loads(capsys.readouterr().out.splitlines()[-1])

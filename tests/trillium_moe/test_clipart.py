"""tools/clipart.py: what drawings are called, and which are the same picture."""

import sys
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

TOOLS = str(Path(__file__).parents[2] / "tools")


@pytest.fixture
def clipart(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    yield __import__("clipart")
    sys.modules.pop("clipart")


@pytest.mark.parametrize("name, words", [
    ("penguin", "penguin"), ("soft_blue_couch_01", "soft blue couch"), ("gradient-metal-gold", "gradient metal gold"),
    ("aiga_no_smoking_", "no smoking"), ("aiga", "aiga"), ("signs_and_symbols", "signs symbols"),
])  # fmt: skip
def test_words(clipart, name, words):
    assert clipart.words(name) == words


def drawing(colour, size=(120, 90), at=0):
    image = Image.new("RGBA", (200, 160))
    ImageDraw.Draw(image).ellipse((at, at, at + size[0], at + size[1]), fill=colour)
    return image


def test_a_stamp_is_left_out(clipart, tmp_path):
    """Scaled, moved and stored in another mode it looks the same; in another colour it does not."""
    files = {"stamp": drawing("red"), "same": drawing("red", (60, 45), 20), "other": drawing("blue")}
    for name, image in files.items():
        image.save(tmp_path / f"{name}.png")
    known = clipart.look(clipart.open_picture(tmp_path / "stamp.png"))[None]
    became = {name: clipart.store(tmp_path / f"{name}.png", tmp_path / "out" / f"{name}.png", known) for name in files}
    assert became == {"stamp": "known", "same": "known", "other": "stored"}
    assert Image.open(tmp_path / "out" / "other.png").size == (121, 91)  # without its transparent border


def test_without_stamps(clipart, tmp_path, capsys):
    assert clipart.main(str(tmp_path)) == 1
    assert "run `python tools/stamps.py" in capsys.readouterr().err

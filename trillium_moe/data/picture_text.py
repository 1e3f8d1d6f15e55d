"""Rendered text: fonts and words by split, and pictures of them.

Held-out text is set by Pillow, in fonts and words that no training picture has. Text to train on is put together from
cached glyphs, several times faster, and varies in what fonts differ by: weight, width, slant, spacing, turned a little,
some words with a font for every letter. So a few families stand for those that were never seen.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trillium_moe.config import check
from trillium_moe.shapes import Shaped

HELD_FONTS = ("STIXGeneral", "cmss10")  # families that no training picture is set in
_FONT_NAMES = re.compile(r"DejaVu(Sans|SansMono|Serif)(-(Bold|Oblique|Italic|BoldOblique|BoldItalic))?$|"
                         r"cm(r|b|tt|ti|ss)10$|STIXGeneral$")
MARGIN = 4  # pixels of a picture beside its text, at least
BENT, MIXED, SPACED = 0.5, 0.15, 0.3  # shares of training texts


class Fonts:
    """The fonts of a folder, by split. Every fifth is held out where none of HELD_FONTS is there."""

    def __init__(self, folder: str = ""):
        if folder:
            files = sorted(Path(folder).expanduser().glob("*.ttf"))
            check(len(files) > 1, "images.fonts", folder, "holds fewer than two *.ttf files; name a folder of fonts")
        else:
            import matplotlib

            every = Path(matplotlib.get_data_path(), "fonts", "ttf").glob("*.ttf")
            files = sorted(f for f in every if _FONT_NAMES.match(f.stem))
        held = [f for f in files if f.stem in HELD_FONTS] or files[::5]
        self.files = {True: held, False: [f for f in files if f not in held]}

    def draw(self, rng: np.random.Generator, held: bool, low: int, high: int) -> ImageFont.FreeTypeFont:
        """A font of the split, of a size of low to high pixels."""
        return font_of(self.path(rng, held), int(rng.integers(low, high + 1)))

    def path(self, rng: np.random.Generator, held: bool) -> str:
        files = self.files[held]
        return str(files[rng.integers(len(files))])


@functools.cache
def font_of(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


class Glyph(NamedTuple):
    """A letter of a font: its ink, from 0 to 255, and where it stands beside the pen on the line."""

    ink: np.ndarray  # [h, w]
    left: int
    top: int
    advance: float  # pixels


@functools.cache
def _glyph(path: str, size: int, letter: str) -> Glyph:
    font = font_of(path, size)
    left, top, right, bottom = font.getbbox(letter, anchor="ls")
    image = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(image).text((-left, -top), letter, fill=255, font=font, anchor="ls")
    return Glyph(np.asarray(image), left, top, font.getlength(letter))


@functools.cache
def words() -> dict[bool, tuple[str, ...]]:
    """Lower-case words of 3 to 8 letters from the running Python's own reference text, a tenth of them held out.

    A word's hash decides, so every version of Python holds out the same words.
    """
    text = " ".join(importlib.import_module("pydoc_data.topics").topics.values())
    found = sorted(set(re.findall(r"(?<![A-Za-z_.])[a-z]{3,8}(?![A-Za-z_(])", text)))
    held = lambda word: hashlib.sha256(word.encode()).digest()[0] < 26
    return {side: tuple(w for w in found if held(w) == side) for side in (True, False)}


def some_word(rng: np.random.Generator, held: bool) -> str:
    """A word; in training half of them are random letters, so that spelling cannot be guessed from the language."""
    if not held and rng.random() < 0.5:
        return some_letters(rng, 3, 8)
    known = words()[held]
    return known[rng.integers(len(known))]


def some_letters(rng: np.random.Generator, low: int, high: int) -> str:
    return bytes(rng.integers(97, 123, rng.integers(low, high + 1)).tolist()).decode()


def _ink(rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(paper, ink): one light, one dark, either way round."""
    levels = rng.random(7).tolist()
    pair = tuple(190 + int(66 * x) for x in levels[:3]), tuple(int(90 * x) for x in levels[3:6])
    return pair if levels[6] < 0.7 else pair[::-1]


def written(rng: np.random.Generator, lines: Sequence[str], font: ImageFont.FreeTypeFont) -> Image.Image:
    """Text on a picture that is a few pixels larger than it, at a random place."""
    paper, ink = _ink(rng)
    boxes = [font.getbbox(line) for line in lines]
    width, step = _sizes([(box[2] - box[0], box[3] - box[1]) for box in boxes])
    image = Image.new("RGB", (width, step * len(lines)), paper)
    draw = ImageDraw.Draw(image)
    for i, (line, box) in enumerate(zip(lines, boxes)):
        free = width - (box[2] - box[0]), step - (box[3] - box[1])
        x, y = (int(rng.integers(1, max(2, n))) for n in free)
        draw.text((x - box[0], i * step + y - box[1]), line, fill=ink, font=font)
    return image


def _sizes(boxes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(width of the picture, height of a line) for lines of these sizes: whole tokens."""
    whole = lambda n: 28 * -(-(n + MARGIN) // 28)
    return whole(max(w for w, _ in boxes)), whole(max(h for _, h in boxes))


def varied(rng: np.random.Generator, lines: Sequence[str], fonts: Fonts, low: int, high: int) -> Image.Image:
    """Text in fonts of the training split, at low to high pixels, and in more forms than theirs."""
    size, path = int(rng.integers(low, high + 1)), fonts.path(rng, False)
    spaced, apart, mixed, bent = rng.random(4).tolist()
    apart = (0.25 * apart - 0.05) * size if spaced < SPACED else 0.0  # pixels between letters
    set_lines, boxes = [], []
    for line in lines:
        pen, placed, left, top, right, bottom = 0.0, [], size, size, -size, -size
        for letter in line:
            ink, beside, above, advance = _glyph(fonts.path(rng, False) if mixed < MIXED else path, size, letter)
            x = round(pen) + beside
            placed.append((x, above, ink))
            left, top = min(left, x), min(top, above)
            right, bottom = max(right, x + ink.shape[1]), max(bottom, above + ink.shape[0])
            pen += max(advance + apart, 2.0)
        set_lines.append((placed, left, top))
        boxes.append((right - left, bottom - top))
    width, step = _sizes(boxes)
    image = np.zeros((step * len(lines), width), np.uint8)
    for i, ((placed, left, top), (w, h)) in enumerate(zip(set_lines, boxes)):
        across, down = rng.random(2).tolist()
        x0, y0 = 1 + int(across * (width - w - 1)) - left, i * step + 1 + int(down * (step - h - 1)) - top
        for x, y, ink in placed:
            there = image[y + y0 : y + y0 + ink.shape[0], x + x0 : x + x0 + ink.shape[1]]
            np.maximum(there, ink, out=there)
    if bent < BENT:
        image = np.asarray(transformed(rng, Image.fromarray(image)))
    return Image.fromarray(dyed(rng, image))


def transformed(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    """The picture under a random linear map about its centre: turned, slanted, shrunk."""
    a, b, c, d = rng.random(4).tolist()
    slant, x, y = 0.5 * a - 0.25, math.exp(0.18 * b - 0.03), math.exp(0.18 * c - 0.03)
    turn = (0.2 * d - 0.1) * min(1, 56 / image.width)  # a long line would leave the picture
    cos, sin = math.cos(turn), math.sin(turn)
    xx, xy, yx, yy = cos * x, cos * slant * x - sin * y, sin * x, sin * slant * x + cos * y  # new picture to the old
    w, h = image.width / 2, image.height / 2
    back = xx, xy, w - xx * w - xy * h, yx, yy, h - yx * w - yy * h
    return image.transform(image.size, Image.Transform.AFFINE, back, Image.Resampling.BILINEAR)


@functools.cache
def _depths() -> Shaped[np.ndarray, "64 256"]:
    """How dark ink of 0 to 255 is, in 64 ways: half covered pixels count for more or less, as in bolder type."""
    covered = np.arange(256.0)
    gain, more = (a.reshape(-1, 1) for a in np.meshgrid(np.linspace(1, 1.8, 8), np.linspace(-60, 60, 8)))
    return np.clip(gain * (covered - 128) + 128 + more * (1 - np.abs(covered / 127.5 - 1)), 0, 255) / 255


def dyed(rng: np.random.Generator, ink: Shaped[np.ndarray, "h w"]) -> Shaped[np.ndarray, "h w 3"]:
    """Colours for ink of 0 to 255."""
    paper, dye = (np.array(colour) for colour in _ink(rng))
    depth = _depths()[rng.integers(64), :, None]
    return np.take((paper + depth * (dye - paper)).astype(np.uint8), ink, axis=0)

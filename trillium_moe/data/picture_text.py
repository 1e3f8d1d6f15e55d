"""Rendered text: fonts and words by split, and pictures of them.

Held-out text is set by Pillow, in fonts and words that no training picture has. Text to train on is put together from
cached glyphs, several times faster, and varies in what fonts differ by: weight, width, slant, spacing, turned a little,
some words with a font for every letter. So a few families stand for those that were never seen.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
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
        return _font(self.path(rng, held), int(rng.integers(low, high + 1)))

    def path(self, rng: np.random.Generator, held: bool) -> str:
        files = self.files[held]
        return str(files[rng.integers(len(files))])


@functools.cache
def _font(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


class Glyph(NamedTuple):
    """A letter of a font: its ink, from 0 to 255, and where it stands beside the pen on the line."""

    ink: np.ndarray  # [h, w]
    left: int
    top: int
    advance: float  # pixels


@functools.cache
def _glyph(path: str, size: int, letter: str) -> Glyph:
    font = _font(path, size)
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
    light, dark = rng.integers(190, 256, 3), rng.integers(0, 90, 3)
    pair = (tuple(light.tolist()), tuple(dark.tolist()))
    return pair if rng.random() < 0.7 else pair[::-1]


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
    size, path, (how, mixed, bent, pens) = int(rng.integers(low, high + 1)), fonts.path(rng, False), _chances(rng)
    apart = pens * size if how < SPACED else 0.0
    pieces = []
    for line in lines:
        pen, placed = 0.0, []
        for letter in line:
            glyph = _glyph(fonts.path(rng, False) if mixed < MIXED else path, size, letter)
            placed.append((round(pen) + glyph.left, glyph.top, glyph.ink))
            pen += max(glyph.advance + apart, 2.0)
        pieces.append(placed)
    edges = [(min(x for x, _, _ in p), min(y for _, y, _ in p), max(x + g.shape[1] for x, _, g in p),
              max(y + g.shape[0] for _, y, g in p)) for p in pieces]
    width, step = _sizes([(right - left, bottom - top) for left, top, right, bottom in edges])
    ink = np.zeros((step * len(lines), width), np.uint8)
    for i, (placed, (left, top, right, bottom)) in enumerate(zip(pieces, edges)):
        right_by, down_by = (rng.random(2) * (width - (right - left) - 1, step - (bottom - top) - 1)).astype(int) + 1
        for x, y, glyph in placed:
            h, w = glyph.shape
            y, x = i * step + int(down_by) + y - top, int(right_by) + x - left
            np.maximum(there := ink[y : y + h, x : x + w], glyph, out=there)
    if bent < BENT:
        ink = np.asarray(_bent(rng, Image.fromarray(ink)))
    return Image.fromarray(_dyed(rng, ink))


def _chances(rng: np.random.Generator) -> tuple[float, float, float, float]:
    """Three uniform numbers, and a distance between letters as a share of the type's size."""
    a, b, c, d = rng.random(4).tolist()
    return a, b, c, 0.25 * d - 0.05


def _bent(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    """The picture under a random linear map about its centre: turned, slanted, shrunk."""
    slant, x, y, turn = rng.uniform((-0.25, -0.03, -0.03, -0.1), (0.25, 0.15, 0.15, 0.1)).tolist()
    x, y, turn = np.exp(x), np.exp(y), turn * min(1, 56 / image.width)  # a long line would leave the picture
    cos, sin, centre = np.cos(turn), np.sin(turn), np.array(image.size) / 2
    back = np.array([[cos, -sin], [sin, cos]]) @ np.array([[x, slant * x], [0, y]])  # from the new picture to the old
    shift = centre - back @ centre
    return image.transform(image.size, Image.Transform.AFFINE, (*back[0], shift[0], *back[1], shift[1]),
                           Image.Resampling.BILINEAR)


@functools.cache
def _depths() -> Shaped[np.ndarray, "64 256"]:
    """How dark ink of 0 to 255 is, in 64 ways: half covered pixels count for more or less, as in bolder type."""
    covered = np.arange(256.0)
    gain, more = (a.reshape(-1, 1) for a in np.meshgrid(np.linspace(1, 1.8, 8), np.linspace(-60, 60, 8)))
    return np.clip(gain * (covered - 128) + 128 + more * (1 - np.abs(covered / 127.5 - 1)), 0, 255) / 255


def _dyed(rng: np.random.Generator, ink: Shaped[np.ndarray, "h w"]) -> Shaped[np.ndarray, "h w 3"]:
    """Colours for ink of 0 to 255."""
    paper, dye = (np.array(colour) for colour in _ink(rng))
    depth = _depths()[rng.integers(64), :, None]
    return np.take((paper + depth * (dye - paper)).astype(np.uint8), ink, axis=0)

"""Characters and their Unicode names: some five thousand kinds of drawing, each with an exact text, in any font.

Letters and digits are drawn as often as all others together: of those there are accents, alphabets, mathematics,
music, chessmen, dice and weather.
"""

from __future__ import annotations

import functools
import unicodedata

import numpy as np
from PIL import Image, ImageDraw

from trillium_moe.data.picture_text import Fonts, dyed, font_of, transformed

SIZES = (20, 30, 44, 64, 90, 125)  # pixels
LATIN = 0.5  # share of the digits and of the letters without accents
OUTLINED = 0.3  # share of characters of at least 30 pixels that are drawn as outlines
_MARKS = "LNPS"  # first letters of the Unicode categories that leave ink: letters, numbers, punctuation, symbols
_PLAIN = tuple(map(ord, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"))


@functools.cache
def characters(path: str) -> tuple[int, ...]:
    """Code points that a font draws and that have names. Of fonts of a few hundred, letters and digits alone: TeX's
    put other characters in the place of some."""
    from matplotlib.ft2font import FT2Font

    found = sorted(FT2Font(path).get_charmap())
    if len(found) < 500:
        return tuple(c for c in _PLAIN if c in found)
    return tuple(c for c in found if unicodedata.category(chr(c))[0] in _MARKS and unicodedata.name(chr(c), ""))


def name_of(code: int) -> str:
    return unicodedata.name(chr(code)).lower()


def glyph(
    rng: np.random.Generator, fonts: Fonts, held: bool, most: int, latin: float = LATIN
) -> tuple[Image.Image, int]:
    """A character in a font of the split, turned, slanted and coloured at random, and its code point.

    Args:
      most: patches of the picture, whose sides are whole tokens.
      latin: share of digits and letters without accents.
    """
    while True:
        path = fonts.path(rng, held)
        of_font = characters(path)
        code = _PLAIN[rng.integers(len(_PLAIN))] if rng.random() < latin else of_font[rng.integers(len(of_font))]
        size = SIZES[rng.integers(len(SIZES))]
        stroke = int(rng.integers(1, 2 + size // 22)) if size >= 30 and rng.random() < OUTLINED else 0
        font = font_of(path, size)
        left, top, right, bottom = font.getbbox(chr(code), stroke_width=stroke)
        width, height = (28 * -(-(n + 2) // 28) for n in (right - left, bottom - top))
        if right > left and bottom > top and width * height // 14**2 <= most:
            break
    image = Image.new("L", (width, height))
    x, y = rng.integers(1, (width - (right - left), height - (bottom - top)))
    inner = {"stroke_width": stroke, "stroke_fill": 255} if stroke else {}
    ImageDraw.Draw(image).text((x - left, y - top), chr(code), fill=0 if stroke else 255, font=font, **inner)
    if not held:
        image = transformed(rng, image)
    return Image.fromarray(dyed(rng, np.asarray(image))), code

"""Characters and their names."""

import string
import unicodedata
from collections import Counter

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trillium_moe.config import ImagesConfig
from trillium_moe.data.picture_glyphs import SIZES, characters, glyph, name_of
from trillium_moe.data.picture_tasks import make_task
from trillium_moe.data.picture_text import HELD_FONTS, Fonts

FONTS = Fonts()
PATHS = {path.stem: str(path) for side in FONTS.files.values() for path in side}


def test_characters_of_a_font():
    """Those that leave ink and have names; of TeX's fonts, which misplace some, letters and digits."""
    found = characters(PATHS["DejaVuSans"])
    assert len(found) > 5000 and {"A", "ü", "≠", "♞", "♩", "☂"} <= set(map(chr, found))
    assert not {" ", "\u0301", "\u200b", "\t"} & set(map(chr, found))
    assert set(map(chr, characters(PATHS["cmr10"]))) == set(string.ascii_letters + string.digits)
    assert name_of(ord("≠")) == "not equal to" and name_of(ord("s")) == "latin small letter s"


def ink_of(image):
    pixels = np.asarray(image).astype(int)
    return np.abs(pixels - pixels[0, 0]).sum(-1) / max(1, np.abs(pixels - pixels[0, 0]).sum(-1).max())


def test_pictures_are_whole_tokens_with_ink_and_a_name():
    plain = 0
    for i in range(150):
        image, code = glyph(np.random.default_rng(i), FONTS, i % 3 == 0, 36)
        assert image.width % 28 == image.height % 28 == 0 and image.width * image.height <= 36 * 14**2
        assert (ink_of(image) > 0.5).sum() >= 4 and unicodedata.lookup(name_of(code)) == chr(code)
        plain += chr(code) in string.ascii_letters + string.digits
    assert 60 < plain < 120  # half, and some of the other half's


def test_signs_are_letters_and_digits_and_say_so():
    """Each of the 62 as often, whatever the fonts hold beside them; glyphs are called by name."""
    sign, name = (make_task(task, ImagesConfig(tasks=task, max_patches=36)) for task in ("signs", "glyphs"))
    found = Counter(sign(np.random.default_rng(i), i % 2 == 0).answer for i in range(1240))
    assert set(found) <= set(string.ascii_letters + string.digits) and len(found) == 62
    assert max(found.values()) < 45  # 20 expected
    assert unicodedata.lookup(name(np.random.default_rng(0), False).answer)


def test_held_out_characters_are_those_of_held_out_fonts():
    """The picture is what Pillow sets in one of the held-out fonts in one of the sizes, filled or as an outline."""
    held = [PATHS[stem] for stem in HELD_FONTS]
    for i in range(12):
        image, code = glyph(np.random.default_rng(i), FONTS, True, 64)
        ours = cropped(ink_of(image) > 0.5)
        close = [size for path in held for size in SIZES for stroke in range(8)
                 if same(ours, drawn(path, size, stroke, chr(code)))]
        assert close


def drawn(path, size, stroke, text):
    image = Image.new("L", (400, 400))
    ImageDraw.Draw(image).text((150, 150), text, fill=0 if stroke else 255, font=ImageFont.truetype(path, size),
                               stroke_width=stroke, stroke_fill=255)
    return cropped(np.asarray(image) > 127)


def same(a, b):
    """Up to a pixel at the edges, where inks of other depth end elsewhere."""
    if np.abs(np.subtract(a.shape, b.shape)).max() > 2:
        return False
    a, b = (np.asarray(Image.fromarray(x).resize((24, 24)).convert("L")).astype(float) / 255 for x in (a, b))
    return np.abs(a - b).mean() < 0.2


def cropped(ink):
    rows, columns = (np.flatnonzero(ink.any(axis)) for axis in (1, 0))
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] if len(rows) else np.zeros((0, 0), bool)

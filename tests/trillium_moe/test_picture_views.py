"""Captioned pictures in training: what a view may change, and what it must not."""

import numpy as np
import pytest
from PIL import Image

from trillium_moe.data.picture_views import view

RNG = np.random.default_rng


def test_the_same_numbers_give_the_same_view_and_others_another():
    image = Image.fromarray(RNG(0).integers(0, 256, (40, 56, 3), np.uint8))
    views = [view(RNG(i), image) for i in range(8)]
    assert view(RNG(3), image).tobytes() == views[3].tobytes()
    assert len({v.tobytes() for v in views}) == 8 and {v.size for v in views} == {(56, 40)}


@pytest.mark.parametrize("channel", range(3))
def test_colours_keep_their_names(channel):
    """Pure red, green and blue stay the strongest by far, whatever the light."""
    colour = [0, 0, 0]
    colour[channel] = 220
    for i in range(60):
        seen = view(RNG(i), Image.new("RGB", (60, 60), tuple(colour)))
        r = np.asarray(seen.convert("RGB"))[30, 30].astype(int)
        assert r[channel] > np.delete(r, channel).max() + 60


def test_nothing_is_mirrored_turned_over_or_lost():
    """Four quarters of different brightness stay where they are, and nearly all of a picture stays in the frame."""
    cells = np.repeat(np.repeat(np.array([[30, 90], [160, 230]], np.uint8), 40, 0), 40, 1)
    image = Image.fromarray(cells).convert("RGB")
    for i in range(60):
        seen = np.asarray(view(RNG(i), image).convert("RGB")).mean(-1)
        a, b, c, d = (seen[y, x] for y in (25, 55) for x in (25, 55))
        assert a < b < c < d


def test_transparent_pixels_stay_so_or_get_a_ground():
    """Half of the views keep the alpha channel; the others are opaque, on one colour that is not too dark."""
    image = Image.new("RGBA", (64, 64))
    image.paste((10, 20, 30, 255), (16, 16, 48, 48))
    views = [view(RNG(i), image) for i in range(100)]
    kept = [v for v in views if v.mode == "RGBA"]
    assert 35 < len(kept) < 65
    for v in views:
        pixels = np.asarray(v)
        if v.mode == "RGBA":
            assert not pixels[:2, :, 3].any() and pixels[32, 32, 3] == 255
        else:
            assert len(np.unique(pixels[:2].reshape(-1, 3), axis=0)) == 1 and pixels[0, 0].min() >= 70
            assert np.abs(pixels[0, 0].astype(int) - pixels[32, 32]).max() > 20

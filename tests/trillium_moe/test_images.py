"""Sizes, transparency and orientation; and thirty hostile files, each with one clear outcome."""

import io
import math
import os
import resource
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trillium_moe.config import VisionConfig
from trillium_moe.data import images
from trillium_moe.data.images import (
    ImageError,
    patches_of,
    places_of,
    read_frames,
    read_image,
    scaled_size,
    to_clip,
)

VISION = VisionConfig(n_layers=1, frames=4)


def encoded(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(width, height, channels=3, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels if channels > 1 else pixels[..., 0])


def png_chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width, height, bits=8, colour=2, data=None):
    """A PNG with a header of our choice."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    body = zlib.compress(b"\0" * 64) if data is None else data
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b"")


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([4, 16, 64, 144, 65_536]))
def test_scaled_sizes(width, height, limit):
    """Never larger than given, never more patches than allowed, no side beyond 512 patches."""
    w, h = scaled_size(width, height, limit)
    assert 1 <= w <= width and 1 <= h <= height and max(w, h) <= 512 * 14
    n = math.ceil(w / 28) * math.ceil(h / 28)
    assert 4 * n <= limit
    fits = 4 * math.ceil(width / 28) * math.ceil(height / 28) <= limit and max(width, height) <= 512 * 14
    assert (w, h) == (width, height) or not fits


@pytest.mark.parametrize("width, height, tokens", [(28, 28, 1), (29, 28, 2), (1, 1, 1), (100, 57, 12), (640, 480, 414)])
def test_tokens_are_ceil_of_28_pixels(width, height, tokens):
    clip = to_clip(noise(width, height), VISION, 65_536)
    assert images.tokens_of(width, height) == tokens == len(patches_of(clip)) // 4
    assert clip.shape == (1, 28 * math.ceil(height / 28), 28 * math.ceil(width / 28), 3)
    np.testing.assert_array_equal(clip[0, :height, :width], np.asarray(noise(width, height)))
    assert not clip[0, height:].any() and not clip[0, :, width:].any()


def test_patches_and_places():
    """Every pixel is where its patch and place say: frame, row and column of the patch, channel, row, column in it."""
    clip = np.random.default_rng(0).integers(0, 256, (2, 56, 84, 3), dtype=np.uint8)
    patches, places = patches_of(clip), places_of(2, 4, 6)
    assert patches.shape == (48, 588) and places.shape == (48, 7)
    for patch, (sample, row, column, height, width, frame, frames) in zip(patches, places):
        assert (sample, height, width, frames) == (1, 4, 6, 2)
        cut = clip[frame, 14 * row : 14 * row + 14, 14 * column : 14 * column + 14]
        np.testing.assert_array_equal(patch.reshape(3, 14, 14), cut.transpose(2, 0, 1))
    # four in a row are a 2 x 2 neighbourhood
    assert places[4:8, 1:3].tolist() == [[0, 2], [0, 3], [1, 2], [1, 3]]


def test_transparent_pixels_show_a_chessboard_at_the_final_size():
    clip = to_clip(read_image(encoded(Image.new("RGBA", (280, 280), (9, 9, 9, 0)))), VISION, 16)[0]
    assert clip.shape == (56, 56, 3)
    assert clip[0, 0].tolist() == [255] * 3 and clip[0, 8].tolist() == [180] * 3 and clip[8, 8].tolist() == [255] * 3
    half = to_clip(read_image(encoded(Image.new("RGBA", (28, 28), (0, 0, 0, 128)))), VISION, 16)[0]
    assert abs(int(half[0, 0, 0]) - 127) <= 1 and abs(int(half[0, 8, 0]) - 90) <= 1


def test_frames_become_clips_of_at_most_four():
    frames = [noise(40, 30, seed=i) for i in range(6)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    read = read_frames(data, most=6)
    assert len(read) == 6 and len(read_frames(data)) == 4
    assert [c.shape for c in images.video_clips(read, VISION, 64)] == [(4, 56, 56, 3), (2, 56, 56, 3)]
    with pytest.raises(ImageError, match="a clip of 5 frames; model.vision.frames=4"):
        to_clip(frames[:5], VISION, 64)


# --- thirty hostile files: (name, bytes or None, expected size, or what the error says)


def bmp_bomb():
    header = struct.pack("<IiiHHIIiiII", 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 60, 0, 0, 54) + header + b"\0" * 6


def oriented():
    image = Image.new("RGB", (30, 60), "blue")
    exif = image.getexif()
    exif[0x0112] = 6  # turn by 90 degrees
    return encoded(image, "JPEG", exif=exif.tobytes())


def bad_exif():
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + b"\xff" * 40
    return encoded(Image.new("RGB", (30, 20)), "JPEG", exif=exif)


def palette(transparent):
    image = noise(40, 20).convert("P")
    return encoded(image, "PNG", **({"transparency": 3} if transparent else {}))


def wide_grey():
    ramp = np.linspace(0, 65_535, 40 * 20).reshape(20, 40).astype(np.uint16)
    return encoded(Image.fromarray(ramp))


def broken_crc():
    data = bytearray(encoded(noise(40, 20)))
    data[len(data) // 2] ^= 0xFF
    return bytes(data)


JPEG, PNG, GIF = (encoded(noise(64, 48), kind) for kind in ("JPEG", "PNG", "GIF"))
HOSTILE = {
    "empty.png": (b"", "empty"),
    "missing.png": (None, "no such file"),
    "folder": ("folder", "not a file"),
    "pipe.png": ("pipe", "not a file"),
    "text.png": (b"this is no picture", "not a picture in one of the formats PNG, JPEG"),
    "script.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a picture"),
    "page.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a picture"),
    "signature.png": (b"\x89PNG\r\n\x1a\n", "not a picture|damaged"),
    "cut.png": (PNG[: len(PNG) // 2], "damaged"),
    "cut.jpg": (JPEG[: len(JPEG) // 2], "damaged"),
    "cut.gif": (GIF[: len(GIF) // 3], "damaged"),
    "head.jpg": (JPEG[:20], "not a picture|damaged"),
    "crc.png": (broken_crc(), "damaged"),
    "zero.png": (png(0, 20), "damaged|not a picture|0 x 20"),
    "bomb.png": (png(60_000, 60_000), "60000 x 60000 pixels, more than|more than 50,000,000"),
    "million.png": (png(1_000_000, 1_000_000), "more than 50,000,000"),
    "bomb.bmp": (bmp_bomb(), "more than 50,000,000"),
    "long.png": (encoded(Image.new("L", (20_000, 3))), (20_000, 3)),
    "pixel.png": (encoded(Image.new("RGB", (1, 1))), (1, 1)),
    "short_data.png": (png(300, 300), "damaged"),
    "bad_zlib.png": (png(30, 30, data=b"not zlib at all"), "damaged"),
    "bad_bits.png": (png(30, 30, bits=5), "not a picture|damaged"),
    "palette.png": (palette(False), (40, 20)),
    "transparent.png": (palette(True), (40, 20)),
    "cmyk.jpg": (encoded(Image.new("CMYK", (40, 20), (0, 255, 255, 0)), "JPEG"), (40, 20)),
    "grey16.png": (wide_grey(), (40, 20)),
    "float.tiff": (encoded(Image.fromarray(np.ones((20, 40), np.float32)), "TIFF"), "floating-point pixels"),
    "one_bit.png": (encoded(Image.new("1", (40, 20), 1)), (40, 20)),
    "turned.jpg": (oriented(), (60, 30)),
    "bad_exif.jpg": (bad_exif(), (30, 20)),
    "noise.bin": (np.random.default_rng(0).bytes(5000), "not a picture"),
    "trailing.png": (PNG + b"\0" * 1000, (64, 48)),
}  # fmt: skip
assert len(HOSTILE) >= 30


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file(name, tmp_path):
    """A picture, or one line that names the file; quick, and without much memory."""
    content, outcome = HOSTILE[name]
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content == "pipe":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if isinstance(outcome, tuple):
        image = read_image(path)
        assert image.size == outcome and image.mode in ("RGB", "RGBA")
        clip = to_clip(image, VISION, 64)
        assert 4 <= len(patches_of(clip)) <= 64
    else:
        with pytest.raises(ImageError, match=outcome) as caught:
            read_image(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10  # KiB: the bomb would take 10 GiB


def test_what_the_readable_ones_show(tmp_path):
    show = lambda name: np.asarray(read_image(HOSTILE[name][0]).convert("RGB"))
    assert np.abs(show("cmyk.jpg")[10, 10].astype(int) - [255, 0, 0]).max() < 12
    grey = show("grey16.png")[..., 0]
    assert grey[0, 0] == 0 and grey[-1, -1] == 255 and 120 < grey.mean() < 135  # Pillow's own would be 255 all over
    assert show("turned.jpg").shape == (30, 60, 3)


def test_too_many_bytes(monkeypatch, tmp_path):
    monkeypatch.setattr(images, "MOST_BYTES", 100)
    (tmp_path / "big.png").write_bytes(PNG)
    for source in (tmp_path / "big.png", PNG):
        with pytest.raises(ImageError, match="more than 100"):
            read_image(source, "big.png")

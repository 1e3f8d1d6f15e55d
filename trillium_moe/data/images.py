"""Pictures from files into patches: decoding, sizes, and what is refused.

Every picture becomes RGB at its own size, never enlarged: it is scaled down if it has more patches than allowed or a
side of more than 512, then padded at the right and the bottom to whole tokens, 2 x 2 patches of 14 pixels. So a picture
of H x W pixels is ceil(H / 28) x ceil(W / 28) tokens. Transparent pixels are laid over a chessboard after scaling, so
that neither black nor white drawings vanish (model.md 2.9).

A file that is no picture, is damaged, or would take too much memory is one `ImageError` that names it. Only formats
that Pillow decodes itself are read (EPS, say, would start another program).
"""

from __future__ import annotations

import functools
import io
import math
import struct
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps

from trillium_moe.config import ConfigError, VisionConfig
from trillium_moe.shapes import Int

Clip = UInt8[np.ndarray, "frames height width 3"]

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")
MOST_BYTES = 64 << 20  # of a file
MOST_PIXELS = 50_000_000  # of a file's picture: decoding takes up to 8 bytes a pixel
MOST_SIDE = 512  # patches
CHESS, DARK, LIGHT = 8, 180, 255  # squares, in pixels, and their greys


class ImageError(ConfigError):
    """A picture that cannot be read: one line that names it and says why."""


def read_image(source: str | Path | bytes, name: str = "") -> Image.Image:
    """The first frame of an image file, decoded: mode RGB, or RGBA if it has transparent pixels, upright.

    Args:
      source: a path, or the file's bytes, which `name` names in errors.
    Raises:
      ImageError: for whatever is not a whole picture in one of FORMATS, or too large.
    """
    name = name or (str(source) if not isinstance(source, bytes) else "image")
    return _decode(_bytes_of(source, name), name, 1)[0]


def read_frames(source: str | Path | bytes, name: str = "", most: int = 4) -> list[Image.Image]:
    """Up to `most` frames of an animated file, as `read_image`, all of the size of the first."""
    name = name or (str(source) if not isinstance(source, bytes) else "image")
    return _decode(_bytes_of(source, name), name, most)


def _bytes_of(source: str | Path | bytes, name: str) -> bytes:
    if isinstance(source, bytes):
        data = source
    else:
        try:
            path = Path(source)
            if not path.is_file():  # a pipe or a device would be read for ever
                raise ImageError(f"image {name}: {'not a file' if path.exists() else 'no such file'}")
            if path.stat().st_size > MOST_BYTES:
                raise ImageError(f"image {name}: {path.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
            data = path.read_bytes()
        except (OSError, ValueError) as error:
            if isinstance(error, ImageError):
                raise
            raise ImageError(f"image {name}: cannot be read ({error})") from None
    if not data:
        raise ImageError(f"image {name}: empty")
    if len(data) > MOST_BYTES:
        raise ImageError(f"image {name}: {len(data):,} bytes, more than {MOST_BYTES:,}")
    return data


def _decode(data: bytes, name: str, most: int) -> list[Image.Image]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own warning of large pictures; ours is an error
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width < 1 or height < 1:
                    raise ImageError(f"image {name}: {width} x {height} pixels")
                if width * height > MOST_PIXELS:
                    raise ImageError(f"image {name}: {width} x {height} pixels, more than {MOST_PIXELS:,}")
                frames = []
                for i in range(min(most, getattr(image, "n_frames", 1) if most > 1 else 1)):
                    if i:
                        image.seek(i)
                    frames.append(_rgb(image, name))
                return [f if f.size == frames[0].size else f.resize(frames[0].size) for f in frames]
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        raise ImageError(f"image {name}: not a picture in one of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise ImageError(f"image {name}: more than {MOST_PIXELS:,} pixels") from None
    except MemoryError:
        raise ImageError(f"image {name}: too large for this machine's memory") from None
    # what Pillow's decoders raise for broken files; none of them is a fault of ours
    except (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, AttributeError, OverflowError,
            ZeroDivisionError, RuntimeError, NotImplementedError, struct.error, zlib.error) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ImageError(f"image {name}: damaged ({reason})") from None


def _rgb(image: Image.Image, name: str) -> Image.Image:
    """One frame as RGB or RGBA, turned as its EXIF orientation says."""
    image.load()
    image = ImageOps.exif_transpose(image)
    mode = image.mode
    if mode.startswith("I;16") or mode == "I":  # 16 bits of grey; Pillow would cut values off at 255
        grey = np.asarray(image).astype(np.int64)
        if grey.min() < 0 or grey.max() > 65_535:
            raise ImageError(f"image {name}: grey values beyond 16 bits")
        return Image.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")
    if mode == "F":
        raise ImageError(f"image {name}: floating-point pixels, whose range is not known; save it with 8 or 16 bits")
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return image if image.getextrema()[3][0] < 255 else image.convert("RGB")
    return image.convert("RGB")


def scaled_size(width: int, height: int, max_patches: int, patch: int = 14) -> tuple[int, int]:
    """(width, height) in pixels, never enlarged, whose padded picture has at most `max_patches` patches."""
    unit = 2 * patch
    most_side = MOST_SIDE * patch
    padded = lambda w, h: 4 * math.ceil(w / unit) * math.ceil(h / unit)
    if padded(width, height) <= max_patches and max(width, height) <= most_side:
        return width, height
    scale = min(1.0, most_side / width, most_side / height, (max_patches * patch**2 / (width * height)) ** 0.5)
    while True:
        size = max(1, int(width * scale)), max(1, int(height * scale))
        if padded(*size) <= max_patches or max(size) <= unit:
            return size
        scale *= 0.99


def tokens_of(width: int, height: int, patch: int = 14) -> int:
    """Tokens of a picture that is not scaled: ceil(H / 28) x ceil(W / 28) at patches of 14 pixels."""
    return math.ceil(width / (2 * patch)) * math.ceil(height / (2 * patch))


def to_clip(image: Image.Image | Sequence[Image.Image], vision: VisionConfig, max_patches: int) -> Clip:
    """Frames at the size that the model reads, padded with black to whole tokens.

    Args:
      image: a picture, or up to vision.frames frames of one size, which share one picture's tokens.
    """
    frames = [image] if isinstance(image, Image.Image) else list(image)
    if not 1 <= len(frames) <= vision.frames:
        raise ImageError(f"a clip of {len(frames)} frames; model.vision.frames={vision.frames}")
    size = scaled_size(*frames[0].size, max_patches // len(frames), vision.patch)
    unit = 2 * vision.patch
    width, height = (unit * math.ceil(side / unit) for side in size)
    out = np.zeros((len(frames), height, width, 3), np.uint8)
    for plane, frame in zip(out, frames):
        if frame.size != size:
            frame = frame.resize(size, Image.Resampling.BICUBIC)
        plane[: size[1], : size[0]] = np.asarray(_opaque(frame))
    return out


def video_clips(frames: Sequence[Image.Image], vision: VisionConfig, max_patches: int) -> list[Clip]:
    """A video as clips of at most vision.frames frames, each as many tokens as one picture."""
    n = vision.frames
    return [to_clip(frames[i : i + n], vision, max_patches) for i in range(0, len(frames), n)]


def _opaque(image: Image.Image) -> Image.Image:
    if image.mode != "RGBA":
        return image.convert("RGB")
    y, x = np.indices((image.height, image.width)) // CHESS
    board = Image.fromarray(np.where((x + y) % 2 == 0, LIGHT, DARK).astype(np.uint8)).convert("RGB")
    board.paste(image, mask=image.getchannel("A"))
    return board


def patches_of(clip: Clip, patch: int = 14) -> UInt8[np.ndarray, "P pixels"]:
    """Patches in the order of `model.vision`: by frame, 2 x 2 neighbourhood, row, column; each [3, patch, patch]."""
    t, height, width, _ = clip.shape
    h, w = height // (2 * patch), width // (2 * patch)
    cut = clip.reshape(t, h, 2, patch, w, 2, patch, 3)
    return cut.transpose(0, 1, 4, 2, 5, 7, 3, 6).reshape(-1, 3 * patch**2)


@functools.cache
def places_of(frames: int, height: int, width: int) -> Int[np.ndarray, "P 7"]:
    """Where each patch of `patches_of` stands, for a clip of height x width patches: the columns of
    `model.vision.Images.place`, sample 1. Not to be written to."""
    frame, i, j, a, b = np.indices((frames, height // 2, width // 2, 2, 2), np.int32).reshape(5, -1)
    full = lambda value: np.full(len(frame), value, np.int32)
    return np.stack([full(1), 2 * i + a, 2 * j + b, full(height), full(width), frame, full(frames)], axis=1)

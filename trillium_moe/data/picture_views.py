"""A picture never seen twice the same: what a captioned picture looks like in training.

Nearer or farther, a little turned and stretched, in other light, and what is transparent before another ground. Nothing
is mirrored: many pictures hold letters, and a mirrored b is a d. Colours keep their names: no hue is turned.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

NEAR, FAR = 1.2, 0.75  # scale of the picture in its frame
STRETCH = 0.12  # log of the ratio of the sides
TURN = 0.26  # radians either way
PATTERN = 0.5  # share of views whose transparent pixels stay so: `images.to_clip` lays them over its chessboard
LUMA = np.array([0.299, 0.587, 0.114])  # of red, green and blue (ITU-R BT.601)


def view(rng: np.random.Generator, image: Image.Image) -> Image.Image:
    """The picture seen anew: mode RGBA or RGB, of the same size. What lies outside of it is transparent."""
    moved = image.convert("RGBA").transform(image.size, Image.Transform.AFFINE, _back(rng, *image.size),
                                            Image.Resampling.BILINEAR)
    seen = moved.convert("RGB").convert("RGB", _light(rng))
    alpha = moved.getchannel("A")
    if rng.random() < PATTERN:
        seen.putalpha(alpha)
        return seen
    level, tint = rng.uniform(110, 255), rng.uniform(-40, 40, 3)
    ground = Image.new("RGB", image.size, tuple(int(c) for c in np.clip(level + tint, 0, 255)))
    ground.paste(seen, mask=alpha)
    return ground


def _back(rng: np.random.Generator, width: int, height: int) -> tuple[float, ...]:
    """The affine map from places of the view to places of the picture, as Pillow takes it."""
    scale = math.exp(rng.uniform(math.log(FAR), math.log(NEAR)))
    stretch, turn = math.exp(rng.uniform(-STRETCH, STRETCH) / 2), rng.uniform(-TURN, TURN)
    x, y = scale * stretch, scale / stretch
    cos, sin = math.cos(turn), math.sin(turn)
    xx, xy, yx, yy = cos / x, sin / x, -sin / y, cos / y
    # the centre may lie anywhere as long as the smaller of frame and picture stays within the larger one, roughly
    free_x, free_y = abs(1 - 1 / x) * width / 2, abs(1 - 1 / y) * height / 2
    dx, dy = width / 2 + rng.uniform(-free_x, free_x), height / 2 + rng.uniform(-free_y, free_y)
    w, h = width / 2, height / 2
    return xx, xy, dx - xx * w - xy * h, yx, yy, dy - yx * w - yy * h


def _light(rng: np.random.Generator) -> tuple[float, ...]:
    """Saturation, contrast, brightness and a tint as a 3 x 4 matrix."""
    saturation, contrast = rng.uniform(0.6, 1.4), rng.uniform(0.7, 1.3)
    offset = 128 * (1 - contrast) + rng.uniform(-30, 30) + rng.uniform(-8, 8, 3)
    mix = contrast * (saturation * np.eye(3) + (1 - saturation) * LUMA)
    return tuple(np.concatenate([mix, offset[:, None]], axis=1).ravel().tolist())

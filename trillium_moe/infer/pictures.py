"""Pictures of a prompt: from files or the bytes of a request to what the engine puts in place of placeholders."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from trillium_moe.config import Config, check
from trillium_moe.data.images import to_clip
from trillium_moe.data.pictures import encode_clips

MOST_TOKENS = 16_384  # features of a prompt's pictures: four million pixels and more


class Pictures(NamedTuple):
    """The pictures of one prompt, in order."""

    patches: np.ndarray  # [P, pixels] uint8
    place: np.ndarray  # [P, 7] int32, see `model.vision.Images`
    features: np.ndarray  # [n]: number of the feature of each placeholder
    at: np.ndarray  # [n]: places of the placeholders among the prompt's tokens

    def padded(self) -> tuple[np.ndarray, np.ndarray]:
        """[1, P', ...] patches and places, P' a power of two: few shapes, few compilations."""
        n = 1 << (len(self.patches) - 1).bit_length()
        pad = lambda x: np.pad(x, ((0, n - len(x)), (0, 0)))[None]
        return pad(self.patches), pad(self.place)

    def named(self, tokens: np.ndarray) -> np.ndarray:
        """The tokens, each placeholder replaced by a negative number that depends on all pictures and its place."""
        digest = hashlib.sha256(self.patches.tobytes() + self.place.tobytes()).digest()
        out = np.array(tokens, np.int32)
        rng = np.random.default_rng(int.from_bytes(digest[:16]))
        out[self.at] = -1 - rng.integers(0, 2**31 - 1, len(self.at), dtype=np.int64).astype(np.int32)
        return out


def show(
    config: Config | None, image_id: int, parts: Sequence[Sequence[int] | Image.Image]
) -> tuple[list[int], Pictures | None]:
    """Token ids of a prompt with a placeholder for every feature of its pictures, and the pictures.

    Args:
      config: of the model; None if it is not to be shown pictures.
      image_id: the placeholder token.
      parts: token ids and pictures, in order. Pictures are scaled as those of training were (images.max_patches).

    Raises:
      ConfigError: if the model has no vision, or the pictures are more than MOST_TOKENS tokens.
    """
    ids, at, clips = [], [], []
    for part in parts:
        if not isinstance(part, Image.Image):
            ids += [int(i) for i in part]
            continue
        check(config is not None and config.model.vision.n_layers > 0, "model.vision.n_layers", 0,
              "this model was trained without pictures")
        vision = config.model.vision
        clips.append(to_clip(part, vision, config.images.max_patches))
        n = clips[-1].shape[1] * clips[-1].shape[2] // (2 * vision.patch) ** 2
        at += range(len(ids), len(ids) + n)
        ids += [image_id] * n
        check(len(at) <= MOST_TOKENS, "images", len(clips), f"more than {MOST_TOKENS:,} tokens of pictures")
    if not clips:
        return ids, None
    patches, place, features = encode_clips(clips, config.model.vision.patch)
    return ids, Pictures(patches, place, features, np.array(at))

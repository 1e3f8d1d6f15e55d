"""Logits of a checkpoint in a released layout: python -m experiments.logits --hf=DIR --tokens=ids.npy --out=logits.npy

Reads config.json and *.safetensors (Kimi-K3 or Kimi-Linear as released, or Kimi-Linear as in the transformers library;
bfloat16, float32 or MXFP4 experts) and writes float32 logits [B,T,V] of the given token ids. --image=FILE,.. shows
pictures to a checkpoint with a vision tower.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from absl import flags

from experiments.common import UsageError, command


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("hf", None, "directory with config.json and *.safetensors", flag_values=values)
    flags.DEFINE_string("tokens", None, "token ids, an integer array [T] or [B,T] (.npy)", flag_values=values)
    flags.DEFINE_string("out", None, "where the float32 logits go (.npy)", flag_values=values)
    flags.DEFINE_string("image", None, "pictures, comma separated; their features take the places of the placeholder "
                        "tokens, in order", flag_values=values)
    flags.DEFINE_integer("max_patches", 16_384, "patches of a picture; larger ones are scaled down", lower_bound=4,
                         flag_values=values)
    flags.DEFINE_enum("compute", "float32", ["float32", "bfloat16"], "dtype of weights, activations and matmul "
                      "operands", flag_values=values)
    flags.DEFINE_enum("experts", "dense", ["dense", "mxfp4"], "routed experts in memory; mxfp4 leaves them packed",
                      flag_values=values)


def read_tokens(path: str, vocab_size: int) -> np.ndarray:
    """int32 [B,T]. Raises UsageError for anything that is not token ids of the vocabulary."""
    if not Path(path).is_file():
        raise UsageError(f"flag --tokens={path}: no such file; name an .npy array of token ids")
    try:
        tokens = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise UsageError(f"flag --tokens={path}: not an .npy array ({str(error).split('. ')[0]})") from None
    if not isinstance(tokens, np.ndarray):
        raise UsageError(f"flag --tokens={path}: an .npz archive; name an .npy array of token ids")
    if tokens.ndim not in (1, 2) or not np.issubdtype(tokens.dtype, np.integer) or tokens.size == 0:
        raise UsageError(f"flag --tokens={path}: must hold integers [T] or [B,T], not {tokens.dtype} {tokens.shape}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UsageError(f"flag --tokens={path}: ids must lie in [0, {vocab_size}), the checkpoint's vocabulary")
    return np.atleast_2d(tokens).astype(np.int32)


def writable(path: str) -> Path:
    """The file of --out, its folder made. Raises UsageError, before anything is computed, if it cannot be written."""
    out = Path(path)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.open("ab").close()
    except OSError as error:
        raise UsageError(f"flag --out={path}: cannot be written ({error.strerror}); name a file") from None
    return out


def run(values: flags.FlagValues) -> dict:
    for name in ("hf", "tokens", "out"):
        if not values[name].value:
            raise UsageError(f"flag --{name} is missing; see --help")
    import jax
    from flax import nnx

    from trillium_moe.config import DtypeConfig
    from trillium_moe.interop import hf
    from trillium_moe.model.context import Context

    dtypes = DtypeConfig(param=values.compute, compute=values.compute)
    config, model = hf.load(values.hf, dtypes, experts_format=values.experts)
    tokens_BT = read_tokens(values.tokens, config.vocab_size)
    images = read_images(values, config, tokens_BT) if values.image else None
    out = writable(values.out)
    graphdef, state = nnx.split(model)

    @jax.jit
    def forward(state, tokens, images):
        model = nnx.merge(graphdef, state)
        return model.logits(model.hidden(tokens, Context(), images)[0])

    logits_BTV = forward(state, tokens_BT, images)
    with out.open("wb") as file:  # by its name as given: np.save would add .npy
        np.save(file, np.asarray(logits_BTV, np.float32))
    print(f"{values.out}: float32 logits {logits_BTV.shape}")
    return {"out": values.out, "shape": list(logits_BTV.shape)}


def read_images(values: flags.FlagValues, config, tokens_BT: np.ndarray):
    """The pictures, for placeholder tokens of one row. Raises UsageError where the two do not fit."""
    from trillium_moe.data.images import read_image, to_clip
    from trillium_moe.data.pictures import encode_clips
    from trillium_moe.interop.safetensors import read_json
    from trillium_moe.model.vision import Images

    if not config.vision.n_layers:
        raise UsageError(f"flag --image={values.image}: the checkpoint of --hf has no vision_config")
    mark = read_json(Path(values.hf) / "config.json").get("media_placeholder_token_id")
    clips = [to_clip(read_image(Path(p), p), config.vision, values.max_patches) for p in values.image.split(",")]
    patches, place, numbers = encode_clips(clips, config.vision.patch)
    at = np.flatnonzero(tokens_BT[0] == mark)
    if len(tokens_BT) != 1 or len(at) != len(numbers):
        raise UsageError(f"flag --image={values.image}: needs one row of tokens with {len(numbers)} of the placeholder "
                         f"{mark}; --tokens has {len(tokens_BT)} rows, and {len(at)} in the first")
    features = np.zeros(tokens_BT.shape, np.int32)
    features[0, at] = numbers + 1
    return Images(patches[None], place[None], features)


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))

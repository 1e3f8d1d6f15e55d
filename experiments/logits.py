"""Logits of a checkpoint in a released layout: python -m experiments.logits --hf=DIR --tokens=ids.npy --out=logits.npy

Reads config.json and *.safetensors (Kimi-K3 or Kimi-Linear as released, or Kimi-Linear as in the transformers library;
bfloat16, float32 or MXFP4 experts) and writes float32 logits [B,T,V] of the given token ids.
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
    flags.DEFINE_enum("compute", "float32", ["float32", "bfloat16"], "dtype of weights, activations and matmul "
                      "operands", flag_values=values)
    flags.DEFINE_enum("experts", "dense", ["dense", "mxfp4"], "routed experts in memory; mxfp4 leaves them packed",
                      flag_values=values)


def read_tokens(path: str, vocab_size: int) -> np.ndarray:
    """int32 [B,T]. Raises UsageError for anything that is not token ids of the vocabulary."""
    if not Path(path).is_file():
        raise UsageError(f"flag --tokens={path}: no such file; name an .npy array of token ids")
    tokens = np.load(path)
    if tokens.ndim not in (1, 2) or not np.issubdtype(tokens.dtype, np.integer) or tokens.size == 0:
        raise UsageError(f"flag --tokens={path}: must hold integers [T] or [B,T], not {tokens.dtype} {tokens.shape}")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UsageError(f"flag --tokens={path}: ids must lie in [0, {vocab_size}), the checkpoint's vocabulary")
    return np.atleast_2d(tokens).astype(np.int32)


def run(values: flags.FlagValues) -> dict:
    for name in ("hf", "tokens", "out"):
        if not values[name].value:
            raise UsageError(f"flag --{name} is missing; see --help")
    import jax
    from flax import nnx

    from trillium_moe.config import DtypeConfig
    from trillium_moe.interop import hf

    dtypes = DtypeConfig(param=values.compute, compute=values.compute)
    config, model = hf.load(values.hf, dtypes, experts_format=values.experts)
    tokens_BT = read_tokens(values.tokens, config.vocab_size)
    graphdef, state = nnx.split(model)
    logits_BTV = jax.jit(lambda state, tokens: nnx.merge(graphdef, state)(tokens)[0])(state, tokens_BT)
    Path(values.out).parent.mkdir(parents=True, exist_ok=True)
    np.save(values.out, np.asarray(logits_BTV, np.float32))
    print(f"{values.out}: float32 logits {logits_BTV.shape}")
    return {"out": values.out, "shape": list(logits_BTV.shape)}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))

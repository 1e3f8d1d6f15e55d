"""Reads the golden data: numbers computed by other people's code, each folder with a README that says how."""

import functools
import json
from pathlib import Path

import ml_dtypes  # noqa: F401  teaches numpy bfloat16
import numpy as np
from safetensors import safe_open

ROOT = Path(__file__).parent / "golden"


def arrays(*path: str) -> dict[str, np.ndarray]:
    """All tensors of a safetensors file."""
    with safe_open(ROOT.joinpath(*path), framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def meta(*path: str):
    """A JSON file."""
    return json.loads(ROOT.joinpath(*path).read_text())


def error(value, expected) -> float:
    """Largest absolute error over largest absolute value."""
    expected = np.asarray(expected, np.float64)
    return float(np.abs(np.asarray(value, np.float64) - expected).max() / max(np.abs(expected).max(), 1e-300))


@functools.cache
def model(name: str, dtypes, experts_format: str = "dense"):
    """(config, graphdef, parameters, router bias) of a golden checkpoint."""
    from flax import nnx

    from trillium_moe.interop import hf

    config, model = hf.load(ROOT / name, dtypes, experts_format=experts_format)
    return (config, *nnx.split(model, nnx.Param, ...))


def pieces(stored, value: np.ndarray) -> dict:
    """(path, index) -> piece of that parameter in a stored tensor, as `interop.layout` says."""
    cut = lambda part: value.reshape(part.view)[part.take] if part.take else value.reshape(part.view)
    return {(part.path, part.at): cut(part).transpose(part.perm) for part in stored.parts}

"""Safetensors directories: headers checked before a byte of data is read, tensors read and written one at a time.

A file is the length of a JSON header (8 bytes, little endian), the header, the data. The `safetensors` package maps
whole files; here exactly the bytes of one tensor are in memory, and headers alone are enough to plan an import.

Nothing is ever unpickled or executed: pickled weights (.bin, .pt, ..) and code beside them are refused or not opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trillium_moe.config import ConfigError

DTYPES = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F32": np.float32, "F64": np.float64, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill")
MAX_HEADER = 100_000_000  # bytes, as in the reference implementation


class Entry(NamedTuple):
    """Where one tensor lies."""

    file: Path
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    start: int  # byte of the file
    nbytes: int

    def read(self) -> np.ndarray:
        """The tensor, in memory of its own."""
        flat = np.fromfile(self.file, np.uint8, self.nbytes, offset=self.start)
        if flat.size != self.nbytes:
            raise ConfigError(f"{self.file}: cut short while it was read; copy it again")
        return flat.view(DTYPES[self.dtype]).reshape(self.shape)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file, in the order of their data.

    Raises:
      ConfigError: if the file is not safetensors, or truncated, or if its header does not describe its data exactly.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little") if len(start) == 8 else -1
        if start[:2] in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") and length > MAX_HEADER:
            raise ConfigError(f"{path}: is pickled, whatever its name says; pickles can run code and are never opened")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ConfigError(f"{path}: not a safetensors file, or truncated ({size} bytes); copy it again")
        text = file.read(length)
    return parse_header(text, size - 8 - length, path)


def parse_header(text: bytes, data_bytes: int, path: Path) -> dict[str, Entry]:
    """Entries of a header, whose tensors must fill `data_bytes` without a gap. Raises ConfigError as `read_header`."""
    def once(pairs):
        out = dict(pairs)
        if len(out) != len(pairs):
            raise ValueError("a name occurs twice")
        return out

    def fail(why):
        raise ConfigError(f"{path}: corrupted header: {why}; copy the file again")

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        fail(" ".join(str(error).split())[:120])
    if not isinstance(header, dict):
        fail("not a JSON object")
    header.pop("__metadata__", None)
    offset, entries = 8 + len(text), []
    for name, value in header.items():
        value = value if isinstance(value, dict) else {}
        dtype, shape, span = (value.get(key) for key in ("dtype", "shape", "data_offsets"))
        whole = lambda xs: isinstance(xs, list) and all(type(x) is int and 0 <= x < 1 << 62 for x in xs)
        if not (isinstance(dtype, str) and dtype in DTYPES and whole(shape) and whole(span) and len(span) == 2):
            fail(f"{name[:80]!r} needs a known dtype, a shape and data_offsets")
        nbytes = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        if span[1] - span[0] != nbytes:
            fail(f"{name[:80]!r} has {span[1] - span[0]} bytes for {dtype}{shape}")
        entries.append((span[0], span[1], name, Entry(path, dtype, tuple(shape), offset + span[0], nbytes)))
    entries.sort(key=lambda e: e[:2])
    ends = [0, *(e[1] for e in entries)]
    for end, (begin, _, name, _) in zip(ends, entries):
        if begin != end:
            fail(f"{name[:80]!r} begins at byte {begin} of the data, not at {end}")
    if ends[-1] != data_bytes:
        what = "truncated" if ends[-1] > data_bytes else "longer than its header says"
        raise ConfigError(f"{path}: {what}: {data_bytes} bytes of data, the header describes {ends[-1]}; copy it again")
    return {name: entry for _, _, name, entry in entries}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ConfigError if the file is missing or holds anything else."""
    if not path.is_file():
        raise ConfigError(f"{path.parent}: no {path.name}; name the directory of a released checkpoint")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({' '.join(str(error).split())[:120]})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold a JSON object")
    return value


def read_directory(directory: Path) -> dict[str, Entry]:
    """All tensors of a checkpoint: of the files that its index names, or of model.safetensors.

    Raises:
      ConfigError: for a bad file (`read_header`), pickled weights, an index that names files outside the directory, or
        an index and files that disagree.
    """
    pickled = sorted(p.name for p in directory.iterdir() if p.suffix.lower() in PICKLED) if directory.is_dir() else []
    if pickled:
        raise ConfigError(f"{directory}: holds {pickled[0]}; pickles can run code and are never opened: name a "
                          "directory with safetensors alone")
    listed: dict[str, str] | None = None
    if (directory / INDEX).exists():
        listed = read_json(directory / INDEX).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(isinstance(f, str) for f in listed.values()):
            raise ConfigError(f"{directory / INDEX}: needs a weight_map from tensor names to file names")
        names = sorted(set(listed.values()))
    else:
        names = [SINGLE]
    for name in names:
        plain = name == Path(name).name and name not in ("", ".", "..") and not set(name) & set("/\\\0:")
        if not (plain and name.endswith(".safetensors")):
            raise ConfigError(f"{directory / INDEX}: names {name[:80]!r}; only .safetensors files of the directory "
                              "itself are read")
    absent = [name for name in names if not (directory / name).is_file()]
    if absent:
        raise ConfigError(f"{directory}: {shorten(absent)} missing; name the directory of a complete checkpoint")
    tensors: dict[str, Entry] = {}
    for name in names:
        found = read_header(directory / name)
        twice = found.keys() & tensors.keys()
        if twice:
            other = tensors[min(twice)].file.name
            raise ConfigError(f"{directory / name}: holds {min(twice)}, which {other} holds too")
        tensors |= found
    if listed is not None:
        wrong = [f"{n} is not in {f}" for n, f in listed.items() if n not in tensors or tensors[n].file.name != f]
        wrong += [f"{n} is not listed" for n in tensors if n not in listed]
        if wrong:
            raise ConfigError(f"{directory / INDEX}: does not fit the files: {shorten(wrong)}")
    return tensors


def shorten(items: list[str], most: int = 20, between: str = "; ") -> str:
    """The items, of many the first."""
    return between.join(items[:most]) + (f"{between}and {len(items) - most} more" if len(items) > most else "")


# --- writing


class Planned(NamedTuple):
    """A tensor yet to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


def split(tensors: Iterable[Planned], shard_bytes: int) -> list[list[Planned]]:
    """The tensors, in order, in shards of at most that many bytes (or of one larger tensor)."""
    shards: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return shards


def shard_names(n: int) -> list[str]:
    return [SINGLE] if n == 1 else [f"model-{i + 1:05}-of-{n:05}.safetensors" for i in range(n)]


def header_bytes(tensors: list[Planned]) -> bytes:
    """Length and header of a file of these tensors, padded so that data begin at a multiple of 8."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        nbytes = Planned(name, dtype, shape).nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def index_of(shards: list[list[Planned]]) -> dict[str, Any]:
    """The index of shards named by `shard_names`."""
    names = shard_names(len(shards))
    return {"metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard)},
            "weight_map": {t.name: file for shard, file in zip(shards, names) for t in shard}}

"""Captioned pictures of files: a folder with captions in JSON lines, or Parquet with the pictures' bytes.

    *.jsonl    a line a picture: {"image": "cat.png", "text": "A cat."}; file names are relative to the JSONL file
    *.parquet  a row a picture: its bytes (or {"bytes": ...}, as Hugging Face datasets store it) and its text

Names of fields and columns are images.image_key and images.text_key. A picture's name, by its hash, decides whether it
is held out.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from trillium_moe.config import ConfigError, ImagesConfig, check
from trillium_moe.data.images import ImageError, read_image, scaled_size
from trillium_moe.data.picture_views import view


class Captioned(NamedTuple):
    """A picture that was not read yet."""

    name: str
    source: Any  # path, or (parquet file, row group, row)
    text: str


def find_captions(config: ImagesConfig, key: str = "path") -> list[Captioned]:
    """All captioned pictures of `images.path`, or of another field, in the order of their names.

    Raises:
      ConfigError: for a glob without files, a file that is neither JSONL nor Parquet, or a missing field.
    """
    paths, field = getattr(config, key), f"images.{key}"
    tasks = "the task `named` needs" if key == "named" else "the tasks `captions` and `folders` need"
    check(paths != "", field, paths, f"{tasks} *.jsonl or *.parquet files here; run `make data`")
    out = []
    for pattern in filter(None, (p.strip() for p in paths.split(","))):
        files = sorted(glob.glob(str(Path(pattern).expanduser()), recursive=True))
        check(bool(files), field, pattern, "matches no file; run `make data`, or give a path or a glob, quoted")
        for file in files:
            kind = Path(file).suffix
            check(kind in (".jsonl", ".parquet"), field, file, "must be *.jsonl or *.parquet")
            out += (_jsonl if kind == ".jsonl" else _parquet)(file, config)
    check(len(out) > 1, field, paths, "holds fewer than two captioned pictures")
    return sorted(out, key=lambda c: c.name)


def _jsonl(file: str, config: ImagesConfig) -> list[Captioned]:
    out = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"config images.path={file!r}: line {number} is not JSON ({error})") from None
        for key, name in ((config.image_key, "image_key"), (config.text_key, "text_key")):
            ok = isinstance(record, dict) and isinstance(record.get(key), str)
            check(ok, f"images.{name}", key, f"{file} line {number} has no such text")
        out.append(Captioned(record[config.image_key], Path(file).parent / record[config.image_key],
                             record[config.text_key]))
    return out


def _parquet(file: str, config: ImagesConfig) -> list[Captioned]:
    table = _open_parquet(file)
    for key, name in ((config.image_key, "image_key"), (config.text_key, "text_key")):
        check(key in table.schema_arrow.names, f"images.{name}", key,
              f"{file} has no such column; it has {', '.join(table.schema_arrow.names)}")
    out = []
    for group in range(table.num_row_groups):
        texts = table.read_row_group(group, columns=[config.text_key])[config.text_key].to_pylist()
        out += [Captioned(f"{Path(file).name}#{group}.{i}", (file, group, i), text or "")
                for i, text in enumerate(texts)]
    return out


@functools.lru_cache(maxsize=4)
def _open_parquet(file: str):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("config images.path: *.parquet needs pyarrow; pip install 'trillium-moe[parquet]'") from None
    try:
        return pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"config images.path={file!r}: not a Parquet file ({error})") from None


@functools.lru_cache(maxsize=8)
def _group(file: str, group: int, key: str):
    return _open_parquet(file).read_row_group(group, columns=[key])[key]


def read_captioned(item: Captioned, image_key: str) -> Image.Image:
    """The picture. Raises ImageError naming it."""
    if not isinstance(item.source, tuple):
        return read_image(item.source, str(item.source))
    file, group, row = item.source
    value = _group(file, group, image_key)[row].as_py()
    value = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(value, bytes):
        raise ImageError(f"image {item.name}: {image_key} holds no bytes")
    return read_image(value, item.name)


def split_captions(items: Sequence[Captioned], held: bool, fold: int = 0, folds: int = 10) -> list[Captioned]:
    """One side of the split; a picture is held out in one fold of `folds`. Neither side is ever empty: of the hashes,
    counted from where the fold begins, the least is held out and the greatest is not."""
    begin = fold * 2**64 // folds
    hashes = [int.from_bytes(hashlib.sha256(f"caption:{c.name}".encode()).digest()[:8]) for c in items]
    hashes = [(h - begin) % 2**64 for h in hashes]
    low, high = min(hashes), max(hashes)
    out = lambda h: h == low or (h < 2**64 // folds and h != high)
    return [c for c, h in zip(items, hashes) if out(h) == held]


def make_captions(config: ImagesConfig, name: str = "captions"):
    """The task `captions`: a picture at random, and its caption. `named`: the same of the files of images.named.
    `folders`: the folders that a picture of images.path lies in."""
    from trillium_moe.data.picture_tasks import Example

    items = find_captions(config, "named" if name == "named" else "path")
    if name == "folders":
        folders = [PurePath(item.name).parent.parts for item in items]
        check(len(set(folders)) > 1, "images.tasks", name, "needs pictures in more than one folder")
        common = len(os.path.commonprefix(folders))
        items = [item._replace(text=" ".join(parts[common:])) for item, parts in zip(items, folders)]
        items = [item for item in items if item.text]
    sides = {held: split_captions(items, held, config.fold, config.folds) for held in (True, False)}
    prompt = {"captions": "caption: ", "named": "name: ", "folders": "folder? "}[name]

    @functools.lru_cache(maxsize=1024)
    def picture(held: bool, i: int) -> Image.Image:
        image = read_captioned(sides[held][i], config.image_key)
        return image.resize(scaled_size(*image.size, config.max_patches), Image.Resampling.BICUBIC)  # small: it is kept

    def task(rng: np.random.Generator, held: bool) -> Example:
        i = int(rng.integers(len(sides[held])))
        image = picture(held, i)
        return Example((image if held else view(rng, image),), prompt, sides[held][i].text, name)

    task.everything = lambda held: (  # type: ignore[attr-defined]
        Example((picture(held, i),), prompt, sides[held][i].text, name) for i in range(len(sides[held])))
    return task

"""Where documents come from: files read at random, and their split into train and held-out.

    stdlib       the *.py files of the running Python's standard library, without tests: 12 MB on every machine
    text         each file one document; of a *.jsonl file each line, in field text_key
    arrayrecord  each record: UTF-8 text, or JSON with field text_key where a file's first record is a JSON object
    parquet      each row, in column text_key

Files are found by glob, `~` and object stores (gs://, s3://) included, and sorted by their name below the glob's fixed
part, so that a moved directory is the same source. Bytes that are not UTF-8 become U+FFFD.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from jaxtyping import UInt64

from trillium_moe.config import ConfigError, DataConfig, check
from trillium_moe.data.packing import mix64
from trillium_moe.shapes import Bool, Int

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "__pycache__"}


@dataclass(frozen=True)
class File:
    """A file of a source."""

    name: str  # path below the fixed part of the glob, "/" as separator
    path: str
    kind: str  # text, jsonl, arrayrecord or parquet
    size: int  # bytes
    mtime: int  # seconds
    count: int  # documents


class Source(Sequence):  # of str; not Sequence[str], of which run-time checks would read samples
    """Documents, read from their files on access. Reading in order is the fast way: files stay open in between.

    Attributes:
      files: the files, sorted by name.
      text_key: the field or column that holds the text.
    """

    def __init__(self, files: Sequence[File], text_key: str = "", index: Int[np.ndarray, "D"] | None = None):
        """`index` restricts the source to those documents, numbered over all files."""
        self.files, self.text_key, self._index = tuple(files), text_key, index
        self._ends = np.cumsum([f.count for f in files], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._index) if self._index is not None else int(self._ends[-1])

    def _locate(self, i: int) -> tuple[File, int]:
        if not 0 <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        i = i if self._index is None else int(self._index[i])
        f = int(np.searchsorted(self._ends, i, side="right"))
        return self.files[f], i - int(self._ends[f]) + self.files[f].count

    def __getitem__(self, i: int) -> str:
        file, record = self._locate(i)
        return _open(file.path, file.kind, self.text_key)[record]

    def name(self, i: int) -> str:
        """Stable name of a document: its file's, with `#record` where the file holds several."""
        file, record = self._locate(i)
        return file.name if file.kind == "text" else f"{file.name}#{record}"

    @property
    def num_bytes(self) -> int:
        """Size on disk, in bytes; for part of a file, its share by number of documents."""
        return sum(f.size for f in self.files) * len(self) // int(self._ends[-1])

    @functools.cached_property
    def manifest(self) -> str:
        """Hash of all that says which documents these are: names, sizes, times of change, field and selection."""
        digest = hashlib.sha256(self.text_key.encode())
        for f in self.files:
            digest.update(f"\n{f.name}\t{f.kind}\t{f.size}\t{f.mtime}\t{f.count}".encode())
        digest.update(b"" if self._index is None else self._index.tobytes())
        return digest.hexdigest()

    def split(self, heldout: float) -> tuple[Source, Source]:
        """(train, held-out): disjoint, together everything, decided by a hash of each name alone.

        Whole files are held out, so that neighbours in a file stay on one side; where a file would be more than the
        share asked for (fewer than 1 / heldout files of many records), single records are. Neither side is ever
        empty: the document or file with the least hash is held out and the one with the greatest is not.

        Args:
          heldout: share held out, between 0 and 1.
        Raises:
          ConfigError: if there is a single document.
        """
        check(len(self) > 1, "data.path", self.files[0].path,
              "holds a single document; a train and a held-out split need at least two files or records")
        # salted: by the plain hash one 700 KB file would be 58% of the bytes held out from the standard library
        seeds = [int.from_bytes(hashlib.sha256(f"split:{f.name}".encode()).digest()[:8]) for f in self.files]
        if all(f.count == 1 for f in self.files) or len(self.files) * heldout >= 1:
            held = _smallest(np.array(seeds, np.uint64), heldout)
            parts = [[f for f, h in zip(self.files, held) if h == side] for side in (False, True)]
            return Source(parts[0], self.text_key), Source(parts[1], self.text_key)
        hashes = [mix64(np.arange(f.count, dtype=np.uint64) ^ np.uint64(seed)) for f, seed in zip(self.files, seeds)]
        held = _smallest(np.concatenate(hashes), heldout)
        return (Source(self.files, self.text_key, np.flatnonzero(~held)),
                Source(self.files, self.text_key, np.flatnonzero(held)))


def _smallest(hashes: UInt64[np.ndarray, "n"], share: float) -> Bool[np.ndarray, "n"]:
    """Which 64-bit hashes lie in the lowest `share` of their range; always one at least, and never all."""
    held = hashes < np.uint64(int(share * 2.0**64))
    held[np.argmin(hashes)] = True
    held[np.argmax(hashes)] = False
    return held


def make_source(data: DataConfig) -> Source:
    """The source that `data.source` and `data.path` name, train and held-out together.

    Raises:
      ConfigError: if a glob matches no file, or no file holds a document, or the text field is missing.
    """
    if data.source == "stdlib":
        return Source(_stdlib_files())
    found = {}
    for pattern in filter(None, (p.strip() for p in data.path.split(","))):
        matches = _glob(pattern)
        check(bool(matches), "data.path", data.path, f"{pattern!r} matches no file; give a path or a glob, quoted")
        found |= {str(path): name for name, path in matches}
    files = []
    for path, name in sorted(found.items(), key=lambda item: (item[1], item[0])):
        kind = "jsonl" if data.source == "text" and path.endswith(".jsonl") else data.source
        stat = epath.Path(path).stat()
        if stat.length:
            count = 1 if kind == "text" else len(_open(path, kind, data.text_key))
            files.append(File(name, path, kind, stat.length, int(stat.mtime), count))
    files = [f for f in files if f.count]
    check(bool(files), "data.path", data.path, "every file found is empty; give files that hold text")
    return Source(files, data.text_key)


def _glob(pattern: str) -> list[tuple[str, epath.Path]]:
    """(name below the fixed part of the pattern, path) of every file that matches. Local globs may hold `**`."""
    parts = pattern.split("/")
    fixed = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts) - 1)
    rest = "/".join(parts[fixed:])
    try:
        root = epath.Path("/".join(parts[:fixed]) or ("/" if pattern.startswith("/") else ".")).expanduser()
        if not root.exists():
            return []
    except (KeyError, ImportError) as error:  # an unknown scheme, or its library is missing
        raise ConfigError(f"config data.path={pattern!r}: this kind of storage cannot be opened ({error})") from None
    # epath refuses `**`, which an object store would answer with thousands of requests
    matches = root.glob(rest) if "://" in pattern else map(epath.Path, Path(root).glob(rest))
    return [(str(path.relative_to(root)), path) for path in matches if not path.is_dir()]


def _stdlib_files() -> list[File]:
    """The standard library's modules, without what differs between machines of one Python version."""
    root, files = sysconfig.get_paths()["stdlib"], []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in _SKIPPED]
        for name in names:
            path = os.path.join(folder, name)
            stat = os.stat(path)
            # _sysconfigdata_* records how this interpreter was built, sitecustomize is the distributor's
            if name.endswith(".py") and stat.st_size and not name.startswith(("_sysconfigdata", "sitecustomize")):
                relative = os.path.relpath(path, root).replace(os.sep, "/")
                files.append(File(relative, path, "text", stat.st_size, int(stat.st_mtime), 1))
    check(bool(files), "data.source", "stdlib", f"Python {platform.python_version()} has no library source in {root}; "
          "install it, or set data.source=text and data.path")
    return sorted(files, key=lambda f: f.name)


class _Text:
    """The one document of a text file."""

    def __init__(self, path: str, text_key: str):
        self.path = epath.Path(path)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> str:
        return self.path.read_bytes().decode("utf-8", "replace")


class _JsonLines:
    """The lines of a JSON-lines file, found by their offsets (8 bytes of memory a line)."""

    def __init__(self, path: str, text_key: str):
        self.path, self.text_key = path, text_key
        self.file = epath.Path(path).open("rb")
        offsets, position = [], 0
        for line in self.file:
            if line.strip():
                offsets.append(position)
            position += len(line)
        self.offsets = np.array(offsets, np.int64)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, i: int) -> str:
        self.file.seek(int(self.offsets[i]))
        try:
            record = json.loads(self.file.readline().decode("utf-8", "replace"))
        except ValueError as error:
            raise ConfigError(f"config data.path={self.path!r}: document {i} is not JSON ({error}); mend the line, or "
                              "rename the file from .jsonl to read it as one text") from None
        return _field(record, self.text_key, f"{self.path} document {i}")


class _ArrayRecords:
    """The records of an ArrayRecord file."""

    def __init__(self, path: str, text_key: str):
        from array_record.python.array_record_module import ArrayRecordReader

        self.path, self.text_key = path, text_key
        self.reader = ArrayRecordReader(path)
        # without asking, a truncated file is an empty one
        check(self.reader.ok(), "data.path", path, "not an ArrayRecord file, or cut short; write it again")
        self.json = len(self) > 0 and isinstance(_parse(self._read(0)), dict)

    def __len__(self) -> int:
        return self.reader.num_records()

    def _read(self, i: int) -> bytes:
        try:
            return self.reader.read([i])[0]
        except RuntimeError as error:
            raise ConfigError(f"config data.path={self.path!r}: record {i} is damaged ({error})") from None

    def __getitem__(self, i: int) -> str:
        record = self._read(i)
        if not self.json or not self.text_key:
            return record.decode("utf-8", "replace")
        return _field(_parse(record), self.text_key, f"{self.path} record {i}")


class _Parquet:
    """One column of a Parquet file; the last row group read is kept."""

    def __init__(self, path: str, text_key: str):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise ConfigError(
                "config data.source='parquet': needs pyarrow; pip install 'trillium-moe[parquet]'") from None
        try:
            self.file = pyarrow.parquet.ParquetFile(epath.Path(path).open("rb"))
        except pyarrow.ArrowInvalid as error:
            raise ConfigError(f"config data.path={path!r}: not a Parquet file ({error})") from None
        names = self.file.schema_arrow.names
        check(text_key in names, "data.text_key", text_key, f"{path} has no such column; it has {', '.join(names)}")
        metadata = self.file.metadata
        self.ends = np.cumsum([metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)], dtype=np.int64)
        self.group = functools.lru_cache(maxsize=1)(
            lambda g: self.file.read_row_group(g, columns=[text_key])[text_key])

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, i: int) -> str:
        g = int(np.searchsorted(self.ends, i, side="right"))
        column = self.group(g)
        value = column[i - int(self.ends[g]) + len(column)].as_py()
        return "" if value is None else value if isinstance(value, str) else bytes(value).decode("utf-8", "replace")


_READERS = {"text": _Text, "jsonl": _JsonLines, "arrayrecord": _ArrayRecords, "parquet": _Parquet}


@functools.lru_cache(maxsize=4)  # thousands of shards must not stay open
def _open(path: str, kind: str, text_key: str) -> Any:
    return _READERS[kind](path, text_key)


def _parse(record: bytes) -> Any:
    """The record's JSON value, or None if it is not JSON."""
    try:
        return json.loads(record.decode("utf-8", "replace"))
    except ValueError:
        return None


def _field(record: Any, text_key: str, where: str) -> str:
    """`record[text_key]`, or a ConfigError that says what is there instead."""
    found = ", ".join(map(str, record)) if isinstance(record, dict) else f"a {type(record).__name__}"
    ok = isinstance(record, dict) and isinstance(record.get(text_key), str)
    check(ok, "data.text_key", text_key, f"{where} has no such text; it has {found}")
    return record[text_key]


def order0_entropy(documents: Iterable[str]) -> float:
    """Entropy of the byte histogram, in bits per byte: what a model that ignores all context can reach.

    A trained model must be below it on the same documents. The histogram is that of these documents, so it costs
    the model nothing to know it.
    """
    counts = np.zeros(256, np.int64)
    for text in documents:
        counts += np.bincount(np.frombuffer(text.encode("utf-8", "replace"), np.uint8), minlength=256)
    p = counts[counts > 0] / max(1, counts.sum())
    return -math.fsum(p * np.log2(p))

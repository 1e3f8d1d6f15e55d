"""Batches as pure functions of (seed, batch number), and an iterator over them that can be saved and resumed.

Batch b is rows b B .. (b + 1) B - 1 of the stream in `packing`, whatever the host count; a host reads those that its
devices hold. A run's data order depends on the seed, source, tokenizer, seq_len and packing, and on nothing else.

How it scales. Row i can only be found when the length of every document is known, so the source is tokenised once.
Small sources stay in memory. Larger ones are written, one document at a time, to a token file (2 bytes a token for
vocabularies up to 65,536, else 4: about half the text) which is then memory-mapped, together with their lengths; both
are kept under a hash of the source and the tokenizer, so later runs, seeds and row lengths start at once. Memory is
then 8 bytes a document, and 16 more for the order of an epoch: 100 million documents (400 GB of text) need 2.4 GB a
host and hours of tokenising on one host. Make the token file once on a disk that all hosts see ($TRILLIUM_CACHE). A
source that is still growing, or that cannot be stored twice, does not fit this design.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grain
import numpy as np
from etils import epath
from tqdm import tqdm

from trillium_moe.config import Config, check, check_choice
from trillium_moe.data.examples import Kit
from trillium_moe.data.mixture import MixtureRows
from trillium_moe.data.packing import ConcatRows, Documents, FirstFitRows, Row
from trillium_moe.data.pictures import MixedRows, with_pictures
from trillium_moe.data.sources import Source, make_source
from trillium_moe.data.tokenizer import ByteTokenizer, Tokenizer, make_tokenizer
from trillium_moe.shapes import Shaped

Batch = dict[str, Shaped[np.ndarray, "B ..."]]

# Rows that an endless split counts: more than any run reads, and grain adds to lengths in 64-bit integers.
ENDLESS = 1 << 48

_ROWS = {"concat": ConcatRows, "first_fit": FirstFitRows}


def tokenize(texts: Iterable[str], tokenizer: Tokenizer, folder: Path | None = None, total: int | None = None
             ) -> Documents:
    """Tokenises every text and ends it with the end-of-document token; texts without tokens are left out.

    Args:
      tokenizer: `encode` gives ids, or (ids, mask) for every text: True where a token may be a target. The end of the
        document is a target if the token before it is.
      folder: an existing folder to write tokens.bin, lengths.npy and mask.bin to; None keeps them in memory.
      total: number of texts, for the progress bar that a folder brings.
    Raises:
      ValueError: if no text has a token, or only some have a mask.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    tokens = open(folder / "tokens.bin", "w+b") if folder else io.BytesIO()
    mask = open(folder / "mask.bin", "w+b") if folder else io.BytesIO()
    lengths, masked = [], 0
    with ThreadPoolExecutor() as pool:  # BPE releases the interpreter lock; results keep their order
        progress = tqdm(texts, desc="tokenising", unit="doc", total=total, disable=folder is None)
        for chunk in itertools.batched(progress, 64):
            for out in pool.map(tokenizer.encode, chunk):
                ids, allowed = out if isinstance(out, tuple) else (out, None)
                if len(ids) == 0:
                    continue
                lengths.append(len(ids) + 1)
                tokens.write(np.append(ids, tokenizer.eos_id).astype(dtype).tobytes())
                if allowed is not None:
                    masked += 1
                    mask.write(np.append(allowed, allowed[-1]).astype(bool).tobytes())
    if masked not in (0, len(lengths)):
        raise ValueError(f"{masked} of {len(lengths)} documents carry a mask; give one to all or to none")
    if not lengths:
        raise ValueError("no document holds a token")
    if folder is None:
        return Documents(np.frombuffer(tokens.getbuffer(), dtype), np.array(lengths, np.int64),
                         np.frombuffer(mask.getbuffer(), bool) if masked else None)
    tokens.close()
    mask.close()
    if not masked:
        (folder / "mask.bin").unlink()
    np.save(folder / "lengths.npy", np.array(lengths, np.int64))
    return _map(folder, dtype)


def _map(folder: Path, dtype: Any) -> Documents:
    """The documents that `tokenize` wrote."""
    mask = folder / "mask.bin"
    return Documents(np.memmap(folder / "tokens.bin", dtype, "r"), np.load(folder / "lengths.npy"),
                     np.memmap(mask, bool, "r") if mask.exists() else None)


def load_documents(source: Source, tokenizer: Tokenizer, cache_dir: str | os.PathLike = "") -> Documents:
    """The source's documents, tokenised: in memory if that takes a second or so, else from the token cache.

    Args:
      cache_dir: a local folder; "" for $TRILLIUM_CACHE, or else ~/.cache/trillium_moe. Any of it may be deleted.
    """
    limit = 256 << 20 if isinstance(tokenizer, ByteTokenizer) else 1 << 20  # bytes; BPE reads 1 to 2 MB a second
    if source.num_bytes <= limit:
        return tokenize(source, tokenizer)
    root = Path(cache_dir or os.environ.get("TRILLIUM_CACHE", "") or "~/.cache/trillium_moe").expanduser()
    folder = root / hashlib.sha256(f"{source.manifest} {tokenizer.fingerprint}".encode()).hexdigest()[:32]
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix="part-", dir=root))
        try:
            tokenize(source, tokenizer, part, len(source))
            part.rename(folder)
        except OSError:
            if not folder.exists():  # else another process made the same folder first
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return _map(folder, np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Batches of one split. `pipeline[b]` is batch b, `iter(pipeline)` starts at the first, `len` counts them.

    A batch is a dict of [rows of this host, T] arrays, as `packing` describes them. The training split has no end; the
    held-out split is read once, its last batch filled up with empty rows.

    Attributes:
      rows: the rows by number, over all hosts.
      batch_size: rows per batch, over all hosts.
      local: which rows of every batch this process reads, in order.
      threads: 1 prepares the next batches in the background, 0 does not.
      stream: hash of all that the rows depend on.
    """

    rows: ConcatRows | FirstFitRows | MixtureRows | MixedRows
    tokenizer: Tokenizer
    batch_size: int
    local: tuple[int, ...]
    threads: int
    stream: str
    dataset: grain.MapDataset = field(init=False)  # of batches, for further grain transformations

    def __post_init__(self):
        n = len(self.local)
        dataset = grain.MapDataset.range(len(self) * n).map(self._row).batch(n)
        object.__setattr__(self, "dataset", dataset)

    def __len__(self) -> int:
        if self.rows.epochs:
            return -(-len(self.rows) // self.batch_size)
        return ENDLESS // self.batch_size

    def _row(self, i: int) -> Row:
        """Row i of those that this process reads."""
        batch, i = divmod(i, len(self.local))
        index = batch * self.batch_size + self.local[i]
        return self.rows[index] if index < len(self.rows) else self.rows.empty()

    def __getitem__(self, batch: int) -> Batch:
        if not 0 <= batch < len(self):
            raise IndexError(f"batch {batch} of {len(self)}")
        return self.dataset[batch]

    def __iter__(self) -> BatchIterator:
        return BatchIterator(self)

    def epoch(self, batch: int) -> float:
        """Passes over the source completed before batch `batch`."""
        return batch * self.batch_size / self.rows.rows_per_epoch


class BatchIterator(Iterator[Batch]):
    """Batches in order, with a position that can be saved.

    The state is two JSON values and the same on every host, so it may be restored on another number of hosts or, where
    it falls on a batch boundary, with another batch size.
    """

    def __init__(self, pipeline: Pipeline):
        self._pipeline = pipeline
        self._batches = None
        self._seek(0)

    def _seek(self, batch: int) -> None:
        self.close()
        self._next = batch
        # two batches ahead hide a slow disk; more would only hold memory
        options = grain.ReadOptions(num_threads=self._pipeline.threads, prefetch_buffer_size=2 * self._pipeline.threads)
        self._batches = iter(self._pipeline.dataset[batch:].to_iter_dataset(options))

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._next += 1
        return batch

    def get_state(self) -> dict[str, int | str]:
        """Position after the last batch returned, whatever is prefetched."""
        return {"next_row": self._next * self._pipeline.batch_size, "stream": self._pipeline.stream}

    def set_state(self, state: dict[str, int | str]) -> None:
        """Continues where `state` was taken.

        Raises:
          ConfigError: if the state is of another stream (other files, tokenizer, seed, seq_len, packing), which would
            silently repeat and skip data, or the position is not a multiple of the batch size.
        """
        check(state["stream"] == self._pipeline.stream, "data", state["stream"],
              f"the saved position is of another data stream (this one is {self._pipeline.stream}); restore the files "
              "and the seed, tokenizer, seq_len, packing, segments and heldout it was saved with, or start a new run")
        batch, rest = divmod(state["next_row"], self._pipeline.batch_size)
        check(rest == 0, "data.batch_size", self._pipeline.batch_size,
              f"must divide the {state['next_row']} rows already read; keep the batch size or one that divides it")
        self._seek(batch)

    def close(self) -> None:
        """Stops prefetching."""
        if self._batches is not None:
            self._batches.close()


def make_pipeline(
    config: Config,
    split: str,
    workdir: epath.PathLike = "",
    *,
    tokenizer: Tokenizer | None = None,
    documents: Documents | None = None,
    host: int = 0,
    hosts: int = 1,
    local: Sequence[int] | None = None,
    threads: int = 1,
    cache_dir: str | os.PathLike = "",
) -> Pipeline:
    """The batches of a split.

    Args:
      split: train (no end, order from config.seed) or heldout (one pass, an order of its own that no seed changes,
        rows of all documents mixed: the first few batches are a fair sample).
      workdir: the run directory, where a trained tokenizer is kept.
      tokenizer, documents: made from the config if not given. A tokenizer whose `encode` returns (ids, mask) turns
        off the loss of parts of documents.
      host, hosts: read the host-th of `hosts` equal blocks of rows of every batch.
      local: instead of them, the rows of every batch to read, as `parallel.runtime.local_rows` finds them.
      threads: 0 or 1 background threads.
      cache_dir: where large sources keep their tokens, see `load_documents`.
    Raises:
      ConfigError: for a source, tokenizer, vocabulary or batch size that does not fit.
    """
    check_choice("split", split, ("train", "heldout"))
    data = config.data
    check(local is not None or data.batch_size % hosts == 0, "data.batch_size", data.batch_size,
          f"must be a multiple of the {hosts} hosts")
    if not 0 <= host < hosts:
        raise ValueError(f"host {host} of {hosts}")
    if local is None:
        local = range(host * data.batch_size // hosts, (host + 1) * data.batch_size // hosts)
    tokenizer = tokenizer or make_tokenizer(data, workdir)
    check(tokenizer.vocab_size <= config.model.vocab_size, "model.vocab_size", config.model.vocab_size,
          f"must be at least the {tokenizer.vocab_size} of data.tokenizer={data.tokenizer!r}")
    source = None
    if documents is None:
        source = make_source(data).split(data.heldout)[split == "heldout"]
        documents = load_documents(source, tokenizer, cache_dir)
    seed, epochs = (config.seed, 0) if split == "train" else (0, 1)
    if split == "train" and data.mixture.on:
        rows = _mixture(config, documents, tokenizer, source)
    else:
        rows = _ROWS[data.packing](documents, data.seq_len, seed, segments=data.segments, pad_id=tokenizer.pad_id,
                                   epochs=epochs)
    packing = f"{len(rows)} rows of {data.mixture}" if isinstance(rows, MixtureRows) else data.packing
    stream = _stream(rows, packing, tokenizer)
    if config.model.vision.n_layers:
        rows, stream = with_pictures(config, split, rows, tokenizer, stream)
    return Pipeline(rows, tokenizer, data.batch_size, tuple(local), threads, stream)


def _mixture(config: Config, documents: Documents, tokenizer: Tokenizer, source: Source | None) -> MixtureRows:
    """The rows of a run whose data are a mixture."""
    data, train = config.data, config.train
    check(data.packing == "concat" and data.segments, "data.mixture", data.mixture,
          "needs data.packing='concat' and data.segments=True; its kinds decide both")
    names = None
    if source is not None:
        names = [source.name(i) for i in range(len(source))]
        if len(names) != len(documents):  # texts without tokens were left out
            names = [name for name, text in zip(names, source) if len(tokenizer.encode(text))]
    kit = Kit(tokenizer, documents, config.model.vocab_size, dense=True)
    n_rows = (train.steps - train.first_step) * data.batch_size
    return MixtureRows(data.mixture, documents, kit, data.seq_len, config.seed, n_rows, names)


def _stream(rows: ConcatRows | FirstFitRows | MixtureRows, packing: str, tokenizer: Tokenizer) -> str:
    """Hash of what the rows depend on: the documents (their lengths and first tokens) and the way they are packed."""
    key = (packing, rows.seq_len, rows.seed, rows.segments, rows.epochs, tokenizer.fingerprint)
    digest = hashlib.sha256(repr(key).encode())
    digest.update(np.ascontiguousarray(rows.documents.lengths))
    digest.update(zlib.crc32(rows.documents.tokens[:1 << 24]).to_bytes(4))  # all of it would read a large file whole
    return digest.hexdigest()[:16]

"""Documents into rows of equal length, by pure functions of (seed, row number).

Every row is a dict of [T] arrays, T = seq_len:

    tokens       int32    what the model reads
    targets      int32    the next token; pad_id where there is none
    segment_ids  int32    1, 2, ... for the documents of the row, 0 for padding; 1 throughout with segments=False
    weights      float32  weight of the loss of predicting `targets`: 1, or 0 for padding, masked tokens and, with
                          segments=True, for the end of a document, whose next token belongs to another one

A document's last token is its end-of-document token. With segments=True each document token but the first is a target
exactly once per epoch, also where a document is cut: the last position of a row predicts the token that opens the next
row. No token is lost or repeated.

`ConcatRows` and `FirstFitRows` are random-access sequences (`grain.MapDataset.source` takes either): row i costs the
same at any i, so resuming needs one number. Both shuffle whole rows as well as documents, since consecutive rows of a
concatenated stream come from the same document, and a batch of them would be one file.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import no_type_check

import numpy as np
from jaxtyping import UInt, UInt64

from trillium_moe.shapes import Bool, Int, Shaped

Row = dict[str, Shaped[np.ndarray, "_ ..."]]  # [T] arrays, and what pictures bring
Piece = tuple[int, int, int]  # document, its first token taken, one past the last

_DOCUMENTS, _ROWS = 0, 1  # what a permutation is of, as the last part of its key


@no_type_check  # innermost loop: checked at run time, the tests would spend most of their time here
def mix64(x: int | UInt64[np.ndarray, "n"]) -> int | UInt64[np.ndarray, "n"]:
    """The output function of splitmix64 (Steele et al. 2014): a bijection of 64-bit words without visible structure.

    Takes an int or a uint64 array. Plain arithmetic, unlike a library's generator, is the same in every version.
    """
    word = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & word
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & word
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & word
    return x ^ (x >> 31)


def permute(index: int | UInt64[np.ndarray, "n"], n: int, *key: int) -> int | UInt64[np.ndarray, "n"]:
    """Where the permutation of range(n) chosen by `key` sends `index` (an int, or a uint64 array).

    A Feistel network on the smallest even number of bits that holds n, applied until the value falls below n (cycle
    walking: Black and Rogaway 2002). O(1) memory: a shuffle of a billion rows costs nothing to set up.
    """
    half = max(2, ((n - 1).bit_length() + 1) // 2)  # bits; at 2 the network already mixes well enough for tiny n
    seed = 0
    for part in key:
        seed = mix64(seed ^ (part & ((1 << 64) - 1)))
    out = _feistel(index, half, seed)
    if not isinstance(out, np.ndarray):
        while out >= n:
            out = _feistel(out, half, seed)
        return out
    while (outside := out >= n).any():
        out[outside] = _feistel(out[outside], half, seed)
    return out


@no_type_check
def _feistel(x: int | UInt64[np.ndarray, "n"], half: int, seed: int) -> int | UInt64[np.ndarray, "n"]:
    """A bijection of 2 * half bits: six rounds (left, right) -> (right, left ^ f(right))."""
    low = (1 << half) - 1
    left, right = x >> half, x & low
    for r in range(6):
        left, right = right, left ^ (mix64(right ^ mix64(seed + r)) & low)
    return (left << half) | right


@dataclass(frozen=True, eq=False)
class Documents:
    """Tokenised documents, end to end, in memory or memory-mapped. Each ends with the end-of-document token."""

    tokens: UInt[np.ndarray, "N"]  # uint16 or uint32
    lengths: Int[np.ndarray, "D"]  # tokens of each document, all positive
    mask: Bool[np.ndarray, "N"] | None = None  # False: never a target (a prompt, a placeholder)

    def __post_init__(self):
        if len(self.lengths) == 0 or self.lengths.min() < 1 or self.lengths.sum() != len(self.tokens):
            raise ValueError("lengths must be positive and sum to the number of tokens")
        if self.mask is not None and len(self.mask) != len(self.tokens):
            raise ValueError(f"{len(self.mask)} mask values for {len(self.tokens)} tokens")

    @functools.cached_property
    def starts(self) -> Int[np.ndarray, "D"]:
        """Position of each document's first token."""
        return np.cumsum(self.lengths) - self.lengths

    def __len__(self) -> int:
        return len(self.lengths)


def build_row(documents: Documents, pieces: Iterable[Piece], seq_len: int, segments: bool, pad_id: int) -> Row:
    """The row that `pieces` make, in order.

    Args:
      pieces: at most seq_len + 1 tokens; the last of seq_len + 1 is only a target. Each piece is its own segment.
      segments: whether documents are kept apart; if not, the end of one predicts the start of the next in the row.
    """
    spans = [slice(int(documents.starts[d]) + a, int(documents.starts[d]) + b) for d, a, b in pieces]
    lengths = [s.stop - s.start for s in spans]
    ids = np.full(seq_len + 1, pad_id, np.int32)
    segment_ids = np.zeros(seq_len + 1, np.int32)
    allowed = np.zeros(seq_len + 1, bool)
    n = sum(lengths)
    ids[:n] = np.concatenate([documents.tokens[s] for s in spans])
    segment_ids[:n] = np.repeat(np.arange(1, len(spans) + 1), lengths)
    allowed[:n] = True if documents.mask is None else np.concatenate([documents.mask[s] for s in spans])
    joined = segment_ids[1:] > 0
    if segments:
        joined &= segment_ids[1:] == segment_ids[:-1]
    else:
        segment_ids = np.minimum(segment_ids, 1)
    return {
        "tokens": ids[:-1],
        "targets": np.where(joined, ids[1:], pad_id).astype(np.int32),
        "segment_ids": segment_ids[:-1],
        "weights": (joined & allowed[1:]).astype(np.float32),
    }


def empty_row(seq_len: int, pad_id: int) -> Row:
    """A row of padding."""
    ids = np.full(seq_len, pad_id, np.int32)
    return {"tokens": ids, "targets": ids.copy(), "segment_ids": np.zeros(seq_len, np.int32),
            "weights": np.zeros(seq_len, np.float32)}


class ConcatRows:
    """Concatenate and split: epochs of documents form one stream, row k of it is tokens [kT, (k+1)T).

    Documents are shuffled by (seed, epoch). A row may begin in one epoch and end in the next, so nothing is dropped
    where seq_len does not divide an epoch. Rows that begin in one epoch are visited in an order shuffled by
    (seed, epoch). Memory: 16 bytes per document and epoch in use.

    Args:
      epochs: how many; 0 for no end. The last row of a finite stream is padded.
    """

    def __init__(self, documents: Documents, seq_len: int, seed: int, *, segments: bool = True, pad_id: int = 0,
                 epochs: int = 0):
        self.documents, self.seq_len, self.seed = documents, seq_len, seed
        self.segments, self.pad_id, self.epochs = segments, pad_id, epochs
        self.n_tokens = len(documents.tokens)
        self._epoch = functools.lru_cache(maxsize=2)(self._epoch)

    @property
    def rows_per_epoch(self) -> float:
        return self.n_tokens / self.seq_len

    def __len__(self) -> int:
        return _ceil(self.epochs * self.n_tokens, self.seq_len) if self.epochs else sys.maxsize

    def empty(self) -> Row:
        """A row of padding."""
        return empty_row(self.seq_len, self.pad_id)

    def _epoch(self, epoch: int) -> tuple[Int[np.ndarray, "D"], Int[np.ndarray, "D"]]:
        """The documents of an epoch in order, and where each ends in the epoch."""
        d = len(self.documents)
        order = permute(np.arange(d, dtype=np.uint64), d, self.seed, epoch, _DOCUMENTS).astype(np.int64)
        return order, np.cumsum(self.documents.lengths[order])

    def pieces(self, row: int) -> list[Piece]:
        """The documents' parts in row `row` of the stream, and the one token after it."""
        position, pieces = row * self.seq_len, []
        stop = position + self.seq_len + 1
        if self.epochs:
            stop = min(stop, self.epochs * self.n_tokens)
        while position < stop:
            epoch, offset = divmod(position, self.n_tokens)
            order, ends = self._epoch(epoch)
            i = int(np.searchsorted(ends, offset, side="right"))
            doc, left = int(order[i]), int(ends[i]) - offset
            take = min(left, stop - position)
            first = int(self.documents.lengths[doc]) - left
            pieces.append((doc, first, first + take))
            position += take
        return pieces

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        epoch = index * self.seq_len // self.n_tokens
        first, end = (_ceil(e * self.n_tokens, self.seq_len) for e in (epoch, epoch + 1))
        row = first + permute(index - first, end - first, self.seed, epoch, _ROWS)
        return build_row(self.documents, self.pieces(row), self.seq_len, self.segments, self.pad_id)


@dataclass(frozen=True, eq=False)
class Plan:
    """Which piece of which document goes to which row; row r holds pieces[row_starts[r]:row_starts[r + 1]]."""

    pieces: Int[np.ndarray, "P 3"]  # document, first token, one past the last
    row_starts: Int[np.ndarray, "starts"]

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def row(self, r: int) -> list[Piece]:
        return [tuple(p) for p in self.pieces[self.row_starts[r]:self.row_starts[r + 1]].tolist()]


def plan_first_fit(lengths: Int[np.ndarray, "D"], order: Int[np.ndarray, "D"], seq_len: int, window: int = 64) -> Plan:
    """First-fit packing of whole documents, taken in `order`, from their lengths alone.

    A document longer than a row fills rows of its own, and only its rest is packed. A document goes to the first of at
    most `window` open rows that holds it; when all are open and none does, the fullest is closed.
    """
    rows: list[list[Piece]] = []
    open_rows: list[tuple[int, list[Piece]]] = []  # free tokens, pieces
    for doc in order.tolist():
        length = int(lengths[doc])
        whole = length - length % seq_len
        rows.extend([(doc, start, start + seq_len)] for start in range(0, whole, seq_len))
        rest = length - whole
        if not rest:
            continue
        piece = (doc, whole, length)
        for i, (free, row) in enumerate(open_rows):
            if free >= rest:
                row.append(piece)
                open_rows[i] = (free - rest, row)
                break
        else:
            if len(open_rows) == window:
                open_rows.remove(min(open_rows, key=lambda entry: entry[0]))
            row = [piece]
            rows.append(row)
            open_rows.append((seq_len - rest, row))
    pieces = np.array([piece for row in rows for piece in row], np.int64).reshape(-1, 3)
    return Plan(pieces, np.cumsum([0] + [len(row) for row in rows]))


class FirstFitRows:
    """Whole documents placed first-fit into padded rows.

    The plan is made once, from documents shuffled by the seed; each epoch visits its rows in an order shuffled by
    (seed, epoch). One plan for all epochs keeps the number of rows per epoch constant, so row i is found without
    planning the epochs before it. Memory: about 24 bytes per document; ten times that while the plan is made, in a
    Python loop of a few microseconds per document.
    """

    def __init__(self, documents: Documents, seq_len: int, seed: int, *, segments: bool = True, pad_id: int = 0,
                 epochs: int = 0, window: int = 64):
        self.documents, self.seq_len, self.seed = documents, seq_len, seed
        self.segments, self.pad_id, self.epochs = segments, pad_id, epochs
        d = len(documents)
        order = permute(np.arange(d, dtype=np.uint64), d, seed, _DOCUMENTS).astype(np.int64)
        self.plan = plan_first_fit(documents.lengths, order, seq_len, window)

    @property
    def rows_per_epoch(self) -> float:
        return float(len(self.plan))

    def __len__(self) -> int:
        return self.epochs * len(self.plan) if self.epochs else sys.maxsize

    def empty(self) -> Row:
        """A row of padding."""
        return empty_row(self.seq_len, self.pad_id)

    def pieces(self, row: int) -> list[Piece]:
        """The pieces of planned row `row`, and the one token after it if its document goes on."""
        *rest, (doc, start, stop) = self.plan.row(row)
        # only a piece that fills its row stops before its document does
        return [*rest, (doc, start, min(stop + 1, int(self.documents.lengths[doc])))]

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        epoch, i = divmod(index, len(self.plan))
        row = permute(i, len(self.plan), self.seed, epoch, _ROWS)
        return build_row(self.documents, self.pieces(row), self.seq_len, self.segments, self.pad_id)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)

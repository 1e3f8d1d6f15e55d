"""Rows of a mixture: which kind of row stands at which index, by a pure function of (seed, index).

    text       documents end to end, as `ConcatRows` cuts them
    long       documents of at least half a window; the files of one package, in order, count as one document
    replay     rows of a shorter window, side by side and apart: what earlier stages read
    joined     documents end to end that may see one another, with end-of-document tokens between them
    synthetic  tasks of `synthetic`, one or several to a row, each a segment of its own

Weights are shares of the rows. Over the first `ramp` of a run they move linearly from those of the stage before; tasks
come in after `synthetic_from` of it, until then the other kinds share their weight. The kind of row i is found by the
golden-ratio sequence i phi mod 1, whose first n values fill every interval to within O(log n): shares are met to a
fraction of a percent over a few hundred rows, and every batch has nearly the same composition.
"""

from __future__ import annotations

import functools

import numpy as np

from trillium_moe.config import KINDS, MixtureConfig, check
from trillium_moe.data.examples import Draw, Kit
from trillium_moe.data.packing import ConcatRows, Documents, Row, mix64
from trillium_moe.data.synthetic import make
from trillium_moe.shapes import Float, Int

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd
_BLOCK = 1 << 14  # rows whose kinds are found at once


def weights_at(config: MixtureConfig, progress: Float[np.ndarray, "n"]) -> Float[np.ndarray, "n kinds"]:
    """Share of each of KINDS at points of a run (0 its first row, 1 past its last), each row summing to 1."""
    now = np.array([getattr(config, kind) for kind in KINDS])
    now = now / now.sum()
    before = np.array(config.before) / sum(config.before) if config.before else now
    t = np.minimum(progress / config.ramp, 1)[:, None] if config.ramp else np.ones((len(progress), 1))
    weights = (1 - t) * before + t * now
    early = progress < config.synthetic_from
    if now[:-1].sum() > 0:
        weights[early, -1] = 0
    return weights / weights.sum(1, keepdims=True)


class MixtureRows:
    """The rows of one run. Like `packing.ConcatRows`: random access, and the same rows at any batch size or host count.

    Args:
      names: of the documents, `folder/file`: documents of one folder are a package. None: each is one of its own.
      n_rows: rows of the run.
    Raises:
      ConfigError: if long rows are asked for and no document or package is long.
    """

    epochs = 1  # for `Pipeline`: a finite stream

    def __init__(self, config: MixtureConfig, documents: Documents, kit: Kit, seq_len: int, seed: int, n_rows: int,
                 names: list[str] | None = None):
        self.config, self.documents, self.kit = config, documents, kit
        self.seq_len, self.seed, self.n_rows, self.pad_id = seq_len, seed, n_rows, kit.tokenizer.pad_id
        self.segments = True
        self._offset = mix64(seed ^ seq_len)
        concat = functools.partial(ConcatRows, seed=seed, pad_id=self.pad_id)
        short = config.replay_window or seq_len
        check(seq_len % short == 0, "data.mixture.replay_window", short, f"must divide data.seq_len={seq_len}")
        self._streams = {"text": concat(documents, seq_len), "replay": concat(documents, short),
                         "joined": concat(documents, seq_len, segments=False)}
        if config.long:
            long = packages(documents, names, seq_len // 2)
            check(long is not None, "data.mixture.long", config.long, f"no document or package holds {seq_len // 2} "
                  "tokens, half a window; set it to 0, or give longer documents")
            self._streams["long"] = concat(long, seq_len)
        self._counts = [np.zeros(len(KINDS), np.int64)]  # rows of each kind before each block, as far as was asked
        self._kinds = functools.lru_cache(maxsize=8)(self._kinds)

    def __len__(self) -> int:
        return self.n_rows

    @property
    def rows_per_epoch(self) -> float:
        return len(self.documents.tokens) / self.seq_len

    def _kinds(self, block: int) -> Int[np.ndarray, "n"]:
        """Kinds of a block of rows, as indices into KINDS."""
        i = np.arange(block * _BLOCK, (block + 1) * _BLOCK, dtype=np.uint64)
        x = (i * np.uint64(GOLDEN) + np.uint64(self._offset)) / 2.0**64
        edges = np.cumsum(weights_at(self.config, i / self.n_rows), 1)
        return np.minimum((x[:, None] >= edges).sum(1), len(KINDS) - 1)

    def _before(self, index: int) -> Int[np.ndarray, "kinds"]:
        """Rows of each kind before a row."""
        block, i = divmod(index, _BLOCK)
        while len(self._counts) <= block:
            whole = np.bincount(self._kinds(len(self._counts) - 1), minlength=len(KINDS))
            self._counts.append(self._counts[-1] + whole)
        return self._counts[block] + np.bincount(self._kinds(block)[:i], minlength=len(KINDS))

    def kind(self, index: int) -> tuple[str, int]:
        """The kind of a row, and its number among the rows of that kind."""
        block, i = divmod(index, _BLOCK)
        kind = int(self._kinds(block)[i])
        return KINDS[kind], int(self._before(index)[kind])

    def shares(self, stop: int) -> dict[str, float]:
        """Realised share of every kind among the first `stop` rows."""
        return {kind: float(n) / stop for kind, n in zip(KINDS, self._before(stop))}

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        kind, i = self.kind(index)
        if kind == "synthetic":
            return self._synthetic(i, index < self.config.short_until * self.n_rows)
        if kind != "replay":
            return self._streams[kind][i]
        n = self.seq_len // self._streams["replay"].seq_len
        return side_by_side([self._streams["replay"][i * n + j] for j in range(n)])

    def _synthetic(self, i: int, short: bool) -> Row:
        """A row: one example, or (config.split) 2^j of them, all sizes down to config.shortest being as likely.

        A short row has as many as fit: recall is learned from short examples first.
        """
        draw = Draw(self.seed, self.seq_len, i)
        sizes = max(1, self.seq_len // self.config.shortest).bit_length()
        parts = 1 << draw.below(sizes) if draw.uniform() < self.config.split else 1
        parts = 1 << sizes - 1 if short else parts
        rows = []
        for j in range(parts):
            name = self.config.tasks[draw.below(len(self.config.tasks))]
            size = self.seq_len // parts
            example = make(name, self.kit, size + 1, self.seed, i, j)
            ids = np.full(size + 1, self.pad_id, np.int32)
            ids[: len(example.tokens)] = example.tokens
            weights = np.zeros(size, np.float32)
            for answer in example.answers:
                weights[answer.start - 1 : answer.stop - 1] = self.config.answer_weight
            there = (np.arange(size) < len(example.tokens)).astype(np.int32)
            rows.append({"tokens": ids[:-1], "targets": np.where(weights > 0, ids[1:], self.pad_id).astype(np.int32),
                         "segment_ids": there, "weights": weights})
        return side_by_side(rows)


def side_by_side(rows: list[dict]) -> dict:
    """Rows joined into one longer row, their segments kept apart."""
    out = {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}
    last = np.cumsum([0] + [int(row["segment_ids"].max()) for row in rows[:-1]])
    ids = [np.where(row["segment_ids"] > 0, row["segment_ids"] + n, 0) for row, n in zip(rows, last)]
    return {**out, "segment_ids": np.concatenate(ids).astype(np.int32)}


def packages(documents: Documents, names: list[str] | None, least: int) -> Documents | None:
    """The documents of each folder joined, in order; those of at least `least` tokens, or None."""
    folders = [name.rpartition("/")[0] or name for name in names] if names else list(range(len(documents)))
    starts = [0, *(i for i in range(1, len(folders)) if folders[i] != folders[i - 1])]
    lengths = np.add.reduceat(documents.lengths, starts)
    ends = np.cumsum(lengths)
    kept = [i for i in range(len(lengths)) if lengths[i] >= least]
    if not kept:
        return None
    cut = lambda x: np.concatenate([x[ends[i] - lengths[i] : ends[i]] for i in kept])
    mask = None if documents.mask is None else cut(documents.mask)
    return Documents(cut(documents.tokens), lengths[kept], mask)

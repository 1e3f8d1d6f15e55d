"""Rows with pictures in the stream: placeholders expanded, patches packed beside the tokens they stand for.

A document is the pictures' placeholders, `<|image|>` once for every feature, then the prompt, the answer and the end of
the document, perhaps with more prompts, answers and ends after them. Only answers and ends carry loss. Picture and text
are one segment, so the linear attention carries its state from one to the other. A row of the picture stream draws
documents from (seed, row) until the next one would not fit its tokens or its patches; it has, beside the arrays of
`packing`,

    patches   uint8 [P, 3 patch^2]   every picture's patches, `model.vision.Images`
    place     int32 [P, 7]           where they stand
    features  int32 [T]              for a placeholder, 1 + the number of its feature; 0 for text

and a row of text has the same arrays, empty: batches of any mixture are of one shape and run one program.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from trillium_moe.config import Config, ImagesConfig, VisionConfig, check
from trillium_moe.data.images import patches_of, places_of, to_clip
from trillium_moe.data.packing import Documents, Row, build_row
from trillium_moe.data.picture_tasks import Example, Task, make_task, task_weights
from trillium_moe.data.tokenizer import Tokenizer
from trillium_moe.model.vision import FRAME, SAMPLE

TRIES = 3  # documents in a row that may not fit before a row is closed


class Encoded(NamedTuple):
    """One document with pictures."""

    ids: np.ndarray  # [n] int32, with the end-of-document token
    loss: np.ndarray  # [n] bool: which tokens are targets
    patches: np.ndarray  # [p, pixels] uint8
    place: np.ndarray  # [p, 7], samples numbered from 1
    features: np.ndarray  # [n]: 1 + number of the feature, 0 for text
    task: str = ""


def encode_clips(clips: Sequence[np.ndarray], patch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(patches, place, features): the last are the numbers of the features that become tokens, those of each clip's
    first frame."""
    patches = [patches_of(clip, patch) for clip in clips]
    place = np.concatenate([places_of(len(c), c.shape[1] // patch, c.shape[2] // patch) for c in clips])
    place[:, SAMPLE] = np.repeat(np.arange(1, len(clips) + 1), [len(p) for p in patches])
    return np.concatenate(patches), place, np.flatnonzero(place[::4, FRAME] == 0).astype(np.int32)


def encode(example: Example, tokenizer: Tokenizer, vision: VisionConfig, images: ImagesConfig) -> Encoded:
    """The document of an example."""
    clips = [to_clip(picture, vision, images.max_patches) for picture in example.pictures]
    patches, place, found = encode_clips(clips, vision.patch)
    if images.blind:
        patches = np.zeros_like(patches)
    parts = [(np.full(len(found), tokenizer.specials["<|image|>"]), False)]
    for prompt, answer in ((example.prompt, example.answer), *example.more):
        parts += [(tokenizer.encode(prompt), False), (np.append(tokenizer.encode(answer), tokenizer.eos_id), True)]
    ids = np.concatenate([part for part, _ in parts]).astype(np.int32)
    loss = np.repeat([is_target for _, is_target in parts], [len(part) for part, _ in parts])
    features = np.zeros(len(ids), np.int32)
    features[: len(found)] = found + 1
    return Encoded(ids, loss, patches, place, features, example.task)


class Room(NamedTuple):
    """Size of a row."""

    seq_len: int
    patches: int
    pixels: int  # of a patch

    def holds(self, n_tokens: int, n_patches: int) -> bool:
        return n_tokens <= self.seq_len and n_patches <= self.patches


def build_picture_row(documents: Sequence[Encoded], room: Room, pad_id: int) -> Row:
    """The row that holds the documents, in order, each a segment of its own."""
    patches, place = no_pictures(room)
    features = np.zeros(room.seq_len, np.int32)
    tokens = Documents(np.concatenate([d.ids for d in documents]).astype(np.uint32),
                       np.array([len(d.ids) for d in documents]), np.concatenate([d.loss for d in documents]))
    row = build_row(tokens, [(i, 0, len(d.ids)) for i, d in enumerate(documents)], room.seq_len, True, pad_id)
    at = token = sample = 0
    for d in documents:
        n = len(d.patches)
        patches[at : at + n], place[at : at + n] = d.patches, d.place
        place[at : at + n, SAMPLE] += sample
        features[token : token + len(d.ids)] = np.where(d.features > 0, d.features + at // 4, 0)
        at, token, sample = at + n, token + len(d.ids), int(place[:, SAMPLE].max())
    return row | {"patches": patches, "place": place, "features": features}


def no_pictures(room: Room) -> tuple[np.ndarray, np.ndarray]:
    """Empty patches and places."""
    return np.zeros((room.patches, room.pixels), np.uint8), np.zeros((room.patches, 7), np.int32)


class Drawer:
    """Documents of the tasks that a config names."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self.config, self.tokenizer = config, tokenizer
        weights = task_weights(config.images)
        self.tasks: dict[str, Task] = {name: make_task(name, config.images) for name in weights}
        self.edges = np.cumsum(list(weights.values())) / sum(weights.values())

    def example(self, rng: np.random.Generator, held: bool) -> Example:
        """One of the mixture."""
        name = list(self.tasks)[int(np.searchsorted(self.edges, rng.random(), side="right"))]
        return self.tasks[name](rng, held)

    def encode(self, example: Example) -> Encoded:
        return encode(example, self.tokenizer, self.config.model.vision, self.config.images)


class PictureRows:
    """The endless picture stream of the training split: row r is a pure function of (seed, r)."""

    def __init__(self, config: Config, tokenizer: Tokenizer):
        self.drawer, self.room = Drawer(config, tokenizer), room_of(config)
        self.seed, self.pad_id = config.seed, tokenizer.pad_id

    def __getitem__(self, index: int) -> Row:
        documents, tokens, patches, failed = [], 0, 0, 0
        rng = np.random.default_rng([self.seed, index])
        while failed < TRIES:
            document = self.drawer.encode(self.drawer.example(rng, False))
            n, p = len(document.ids), len(document.patches)
            check(self.room.holds(n, p), "data.seq_len", self.room.seq_len, "raise it or images.patches: "
                  f"a document of the task {document.task!r} has {n} tokens and {p} patches")
            if not self.room.holds(tokens + n, patches + p):
                failed += 1
                continue
            documents.append(document)
            tokens, patches = tokens + n, patches + p
        return build_picture_row(documents, self.room, self.pad_id)


class PooledRows:
    """`PictureRows` drawn ahead by other processes: reading row r has the next ones drawn meanwhile.

    Drawing takes milliseconds a row and holds the interpreter lock; a fast device would wait for it.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, workers: int):
        # fresh processes: a fork of one that runs JAX's threads can hang
        self.pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start, (config, tokenizer))
        self.ahead, self.rows = 8 * workers, {}

    def __getitem__(self, index: int) -> Row:
        for i in range(index, index + self.ahead):
            if i not in self.rows:
                self.rows[i] = self.pool.submit(_row, i)
        for i in [i for i in self.rows if i < index]:
            del self.rows[i]
        return self.rows.pop(index).result()


def _start(config: Config, tokenizer: Tokenizer) -> None:
    global _rows  # of this process
    _rows = PictureRows(config, tokenizer)


def _row(index: int) -> Row:
    return _rows[index]


class MixedRows:
    """Rows of text with rows of pictures among them, evenly: of the first n rows, floor(n share) hold pictures.

    The rows of either stream keep their order, so that a run without pictures reads the same text.
    """

    def __init__(self, text: Any, pictures: PictureRows | PooledRows | None, share: float, room: Room):
        self.text, self.pictures, self.room = text, pictures, room
        self.share = Fraction(str(share)) if pictures is not None else Fraction(0)
        self.seq_len, self.pad_id, self.epochs = text.seq_len, text.pad_id, text.epochs

    @property
    def rows_per_epoch(self) -> float:
        """Rows of the mixture in which the text is read once."""
        return self.text.rows_per_epoch / float(1 - self.share)

    def __len__(self) -> int:
        return len(self.text) if self.epochs else sys.maxsize

    def __getitem__(self, index: int) -> Row:
        before = int(index * self.share)
        if int((index + 1) * self.share) > before:
            return self.pictures[before]
        return self._wordy(self.text[index - before])

    def empty(self) -> Row:
        """A row of padding."""
        return self._wordy(self.text.empty())

    def _wordy(self, row: Row) -> Row:
        patches, place = no_pictures(self.room)
        return row | {"patches": patches, "place": place, "features": np.zeros(self.seq_len, np.int32)}


def room_of(config: Config) -> Room:
    return Room(config.data.seq_len, config.images.patches, config.model.vision.pixels)


def with_pictures(config: Config, split: str, text: Any, tokenizer: Tokenizer, stream: str) -> tuple[MixedRows, str]:
    """The rows of a model with vision, and the hash of what they depend on.

    The held-out split is text alone, comparable with that of a text model; pictures have their own suite,
    `trillium_moe.evals.vision`.
    """
    room = room_of(config)
    if split != "train" or not config.images.share:
        return MixedRows(text, None, 0.0, room), stream
    workers = config.images.workers
    pictures = PooledRows(config, tokenizer, workers) if workers else PictureRows(config, tokenizer)
    kept = replace(config.images, workers=0)
    key = hashlib.sha256(f"{stream} {kept} {config.model.vision.patch}".encode()).hexdigest()[:16]
    return MixedRows(text, pictures, config.images.share, room), key

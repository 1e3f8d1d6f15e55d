"""Whether a model uses its window: tasks by length, needles by depth, and what text gains from its context.

An answer is right if every one of its tokens is the likeliest one, given the right ones before it (teacher-forced).
Some are also generated: after the prompt the model writes freely, and what it writes must begin with the answer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int, UInt
from scipy.stats import beta

from trillium_moe.config import ConfigError, ModelConfig, check, check_choice
from trillium_moe.data.examples import Example, Kit
from trillium_moe.data.packing import Documents
from trillium_moe.data.synthetic import TASKS, WITH_DEPTH, make
from trillium_moe.data.tokenizer import Tokenizer
from trillium_moe.evals.reader import Read, Reader, read_all
from trillium_moe.shapes import PyTree

HELD = 1 << 40  # first part of the keys of evaluation examples: training never uses it


@dataclass(frozen=True, kw_only=True)
class LongConfig:
    """What is asked, at which lengths."""

    tasks: tuple[str, ...] = ("needle", "multi_key", "multi_query", "variable")
    lengths: tuple[int, ...] = (512, 1024)  # tokens of an example
    answers: int = 200  # per task and length, if `tokens` allows
    tokens: int = 1 << 20  # read per task and length, at most (one example at least)
    focus: int = 0  # a length at which it is `focus_tokens` times as many: the window in question
    focus_tokens: int = 4
    capacity: int = 0  # tokens that the caches hold; 0: the longest length. The same for all models: one program
    depths: int = 5  # at which needles are hidden, evenly from 0 to 1
    generate: int = 8  # examples per task and length that are also answered freely; 0: none
    text: bool = True  # loss by position and gain from context, on held-out text
    rows: int = 4  # sequences side by side
    chunk: int = 256  # tokens of each that go through the model at once
    threads: int = 1  # that read at the same time, each `rows` sequences: for cores that one program leaves idle
    seed: int = 0

    def __post_init__(self):
        for name in self.tasks:
            check_choice("tasks", name, tuple(TASKS))
        check(len(self.lengths) > 0 and min(self.lengths) > 1, "lengths", self.lengths, "must be numbers of tokens")
        for name in ("answers", "tokens", "depths", "rows", "threads", "focus_tokens"):
            check(getattr(self, name) > 0, name, getattr(self, name), "must be greater than 0")


@dataclass(frozen=True)
class Cell:
    """A task at a length."""

    task: str
    length: int  # tokens
    n: int  # answers
    right: int  # of them, all tokens right (teacher-forced)
    tokens_right: float  # share of answer tokens that are right
    chance: float  # share that guessing among the possible answers would get right
    generated: int = 0  # answers written freely
    generated_right: int = 0
    depths: dict[str, tuple[int, int]] = field(default_factory=dict)  # depth -> (answers, right)

    @property
    def accuracy(self) -> float:
        return self.right / self.n

    @property
    def interval(self) -> tuple[float, float]:
        return binomial(self.right, self.n)


def binomial(k: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Exact interval of a probability from k successes in n trials (Clopper and Pearson 1934)."""
    tail = (1 - level) / 2
    low = float(beta.ppf(tail, k, n - k + 1)) if k else 0.0
    high = float(beta.ppf(1 - tail, k + 1, n - k)) if k < n else 1.0
    return low, high


def examples(task: str, kit: Kit, config: LongConfig, length: int) -> list[Example]:
    """The examples of a cell, the same for every model. Raises ConfigError if the task does not fit the length."""
    out: list[Example] = []
    asked = tokens = 0
    budget = config.tokens * (config.focus_tokens if length == config.focus else 1)
    while asked < config.answers and (not out or tokens + length <= budget):
        i = len(out)
        depth = i % config.depths / max(1, config.depths - 1) if task in WITH_DEPTH else None
        out.append(make(task, kit, length, HELD, config.seed, i, depth=depth))
        asked, tokens = asked + len(out[-1].answers), tokens + len(out[-1].tokens)
    return out


def score(task: str, length: int, given: Sequence[Example], read: Sequence[Read], depths: int) -> Cell:
    """Teacher-forced answers of a cell."""
    rights, shares, by_depth = [], [], {}
    for example, seen in zip(given, read):
        for answer in example.answers:
            target = example.tokens[answer.start : answer.stop]
            same = seen.predicted[answer.start - 1 : answer.stop - 1] == target
            rights.append(bool(same.all()))
            shares.append(same)
            at = f"{round(answer.depth * (depths - 1)) / max(1, depths - 1):.2f}"
            n, right = by_depth.get(at, (0, 0))
            by_depth[at] = n + 1, right + rights[-1]
    chance = float(np.mean([a.chance for e in given for a in e.answers]))
    return Cell(task, length, len(rights), sum(rights), float(np.concatenate(shares).mean()), chance,
                depths=dict(sorted(by_depth.items())))


def generated(reader: Reader, given: Sequence[Example]) -> int:
    """How many of the examples' first answers the model writes freely."""
    answers = [e.tokens[e.answers[0].start : e.answers[0].stop] for e in given]
    prompts = [e.tokens[: e.answers[0].start] for e in given]
    written = reader.continued(prompts, max(map(len, answers)))
    return sum(bool((w[: len(a)] == a).all()) for w, a in zip(written, answers))


def stretches(tokens: UInt[np.ndarray, "n"], length: int, rows: int) -> list[Int[np.ndarray, "length"]]:
    """The first stretches of a text, `rows` of them if it is that long."""
    starts = [i * length for i in range(min(rows, len(tokens) // length))]
    return [np.asarray(tokens[s : s + length], np.int32) for s in starts]


def text_losses(whole: Sequence[Read], quarters: Sequence[Read]) -> dict[str, Any]:
    """Loss by position, and the gain from context, over stretches of held-out text and over their last quarters.

    Returns:
      positions, nll: nats per token over positions [2^k, 2^(k+1)).
      gain: loss of the last eighth of a stretch after only its last quarter, minus that after all of it.
    """
    full, quarter = (np.stack([r.nll for r in reads]) for reads in (whole, quarters))
    length = full.shape[1]
    tail = max(1, length // 8)
    edges = [2**k for k in range(int(math.log2(length)) + 1)]
    by_position = [float(full[:, a : min(2 * a, length - 1)].mean()) for a in edges[:-1] if a < length - 1]
    gain = quarter[:, -tail:-1].mean() - full[:, -tail:-1].mean()
    return {"length": length, "rows": len(full), "positions": edges[: len(by_position)], "nll": by_position,
            "gain": float(gain), "loss": float(full[:, :-1].mean())}


def evaluate(
    model: ModelConfig,
    params: PyTree,
    router_bias: PyTree,
    tokenizer: Tokenizer,
    documents: Documents,
    config: LongConfig,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All cells and text losses of a model, as JSON values. Tasks that do not fit a length are left out there.

    Args:
      documents: held-out text, for the haystacks and for the losses.
      progress: is told of every cell.
    """
    reader = Reader(model, params, router_bias, config.capacity or max(config.lengths), config.rows, config.chunk)
    readers = [reader, *(reader.twin() for _ in range(config.threads - 1))]
    kit = Kit(tokenizer, documents, model.vocab_size)
    cells, texts = [], []
    for length in config.lengths:
        given = {task: examples(task, kit, config, length) for task in config.tasks if length >= smallest(task, kit)}
        rows = max(1, min(config.rows, config.tokens // length)) if config.text else 0
        whole = stretches(documents.tokens, length, rows)
        # all sequences of a length at once: cells of few would leave rows and threads idle
        parts = [[e.tokens for e in some] for some in given.values()]
        parts += [whole, [tokens[-(length // 4) :] for tokens in whole]]
        read = iter(read_all(readers, [tokens for part in parts for tokens in part]))
        *answered, full, quarters = ([next(read) for _ in part] for part in parts)
        for (task, some), seen in zip(given.items(), answered):
            cell = score(task, length, some, seen, config.depths)
            if config.generate:
                some = some[: config.generate]
                cell = dataclasses.replace(cell, generated=len(some), generated_right=generated(reader, some))
            cells.append(cell)
            progress(describe(cell))
        texts += [text_losses(full, quarters)] if whole else []
    return {"config": dataclasses.asdict(config), "cells": [as_json(c) for c in cells], "text": texts}


def smallest(task: str, kit: Kit) -> int:
    """The smallest power of two at which a task can be made."""
    n = 16
    while True:
        try:
            make(task, kit, n, HELD)
            return n
        except ConfigError:
            n *= 2


def as_json(cell: Cell) -> dict[str, Any]:
    low, high = cell.interval
    return dataclasses.asdict(cell) | {"accuracy": cell.accuracy, "low": low, "high": high}


def describe(cell: Cell) -> str:
    """One line about a cell."""
    low, high = cell.interval
    free = f", written freely {cell.generated_right}/{cell.generated}" if cell.generated else ""
    return (f"{cell.task:>14} at {cell.length:>9,}: {cell.accuracy:6.1%} [{low:.1%}, {high:.1%}] of {cell.n}, "
            f"tokens {cell.tokens_right:.1%}, chance {cell.chance:.1%}{free}")

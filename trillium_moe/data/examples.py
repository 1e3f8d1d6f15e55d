"""What long-dependency tasks are made of: random draws, records in a haystack, answers. The tasks: `synthetic`.

An example is a sequence of token ids with spans that are answers. Most tasks plant records in a haystack of real text
and ask about them at the end:

    ...text...\n@kqz=482...text...\n?kqz=482
                 record                ^^^ answer

The same example serves training (loss on the answers alone) and evaluation (was every token of the answer right?). It
is a pure function of the task, the number of tokens and a key. Records and questions are encoded piece by piece, so
with any tokenizer an answer is the same tokens wherever it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from trillium_moe.config import ConfigError
from trillium_moe.data.packing import Documents, mix64, permute
from trillium_moe.data.tokenizer import Tokenizer
from trillium_moe.shapes import Int

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"


class Draw:
    """Random numbers that depend on the key alone, in every version of every library (`packing.mix64`)."""

    def __init__(self, *key: int):
        self._seed, self._n = 0, 0
        for part in key:
            self._seed = mix64(self._seed ^ (part & ((1 << 64) - 1)))

    def word(self) -> int:
        """64 random bits."""
        self._n += 1
        return mix64(self._seed + self._n)

    def below(self, n: int) -> int:
        """An integer of range(n)."""
        return self.word() % n

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return self.word() / 2.0**64

    def numbers(self, n: int, size: int) -> Int[np.ndarray, "size"]:
        """`size` integers of range(n), with repeats."""
        return (mix64(np.arange(size, dtype=np.uint64) ^ np.uint64(self.word())) % np.uint64(n)).astype(np.int64)

    def sample(self, n: int, k: int) -> list[int]:
        """k different integers of range(n), in random order."""
        assert k <= n
        key = self.word()
        return [int(permute(i, n, key)) for i in range(k)]

    def shuffled(self, items: Sequence) -> list:
        return [items[i] for i in self.sample(len(items), len(items))]

    def words(self, k: int, letters: int) -> list[str]:
        """k different words of lower-case letters."""
        def spell(i):
            return "".join(chr(97 + i // 26**p % 26) for p in range(letters))

        return [spell(i) for i in self.sample(26**letters, k)]


class Answer(NamedTuple):
    """One answer inside an example."""

    start: int  # its first token
    stop: int  # one past its last
    depth: float  # where the (first) evidence lies: 0 at the beginning, 1 right before the question
    chance: float  # probability that a guess among the possible answers is right


@dataclass(frozen=True, eq=False)
class Example:
    """A sequence of tokens, some of which are answers."""

    tokens: Int[np.ndarray, "n"]
    answers: tuple[Answer, ...]


class Question(NamedTuple):
    """A question about some of the records."""

    ask: str
    answer: str
    evidence: tuple[int, ...]  # indices of the records that the answer needs
    chance: float


@dataclass(frozen=True, eq=False)
class Kit:
    """What the tasks are written with.

    documents: text for haystacks; None: five sentences, over and over.
    symbols: ids that tasks without text are made of. By default the ids that the tokenizer leaves free in a vocabulary
      of `vocab_size`, or the bytes of the 94 printable characters where it leaves none.
    dense: for training: as many records and questions as the window holds, often fewer.
    """

    tokenizer: Tokenizer
    documents: Documents | None = None
    vocab_size: int = 0
    dense: bool = False
    symbols: Int[np.ndarray, "symbols"] = field(init=False)

    def __post_init__(self):
        free = np.arange(self.tokenizer.vocab_size, max(self.vocab_size, self.tokenizer.vocab_size))
        if not len(free):
            free = np.concatenate([self.encode(chr(c)) for c in range(33, 127)])
        object.__setattr__(self, "symbols", free)

    def encode(self, text: str) -> Int[np.ndarray, "n"]:
        return np.asarray(self.tokenizer.encode(text), np.int32)

    def cost(self, *texts: str) -> int:
        """Tokens of texts that are encoded one by one."""
        return sum(len(self.encode(text)) for text in texts)

    def haystack(self, draw: Draw, n: int) -> Int[np.ndarray, "n"]:
        """n tokens of text, from a random place on; the documents in order, around their end to the first."""
        if self.documents is None:
            noise = self.encode(NOISE)
            return np.resize(noise, n)
        tokens = self.documents.tokens
        start = draw.below(len(tokens))
        parts = [np.asarray(tokens[start : start + n], np.int32)]
        while (left := n - sum(map(len, parts))) > 0:
            parts.append(np.asarray(tokens[:left], np.int32))
        return np.concatenate(parts)

    def plant(
        self,
        draw: Draw,
        n: int,
        records: Sequence[str],
        questions: Sequence[Question],
        *,
        depth: float | None = None,
        filler: bool = True,
        apart: bool = False,
    ) -> Example:
        """Records in a haystack, then questions with their answers; n tokens in all, or fewer without filler.

        Args:
          depth: where to put the records, as a share of the haystack; None: at random places, in the order given.
          filler: whether text fills the window.
          apart: an end-of-document token after the text around every record: each stands in a document of its own.

        Raises:
          ConfigError: if records and questions alone exceed n.
        """
        pieces = [self.encode(record) for record in records]
        tail = [(self.encode(q.ask), self.encode(q.answer)) for q in questions]
        end = np.array([self.tokenizer.eos_id] if apart else [], np.int32)
        need = sum(map(len, pieces)) + sum(len(a) + len(b) for a, b in tail) + len(end) * max(1, len(pieces))
        if need > n:
            raise ConfigError(f"config length={n}: this task needs at least {need} tokens; raise it")
        text = self.haystack(draw, n - need) if filler else np.zeros(0, np.int32)
        if depth is None:
            cuts = np.sort(draw.numbers(len(text) + 1, len(pieces)))
        else:
            cuts = np.full(len(pieces), round(depth * len(text)))
        out, size, at, starts, answers = [], 0, 0, [], []

        def put(*parts):
            nonlocal size
            out.extend(parts)
            size += sum(map(len, parts))

        for i, (cut, piece) in enumerate(zip(cuts, pieces)):
            if apart and i:  # a document ends half-way between two records
                middle = (at + cut) // 2
                put(text[at:middle], end)
                at = middle
            put(text[at:cut])
            starts.append(size)
            put(piece)
            at = cut
        put(text[at:], end)
        asked = size
        for q, (ask, answer) in zip(questions, tail):
            put(ask)
            first = min((starts[e] for e in q.evidence), default=0)
            answers.append(Answer(size, size + len(answer), first / max(1, asked), q.chance))
            put(answer)
        return Example(np.concatenate(out).astype(np.int32), tuple(answers))

    def raw(self, tokens: Int[np.ndarray, "n"], answers: Sequence[tuple[int, int]], chance: float) -> Example:
        """An example of symbols.

        Args:
          tokens: indices into `symbols`.
          answers: (position of the answer, position of its evidence), one token each.
        """
        spans = tuple(Answer(a, a + 1, e / max(1, a), chance) for a, e in answers)
        return Example(self.symbols[tokens].astype(np.int32), spans)

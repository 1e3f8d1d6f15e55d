"""Hidden pages: one asked for (`read_page`, with an index), or all of them together (`aggregate`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trillium_moe.config import check
from trillium_moe.rl.env import Environment, Episode, register
from trillium_moe.rl.protocol import Action, Answer, Call, Param, Tool
from trillium_moe.rl.vocabulary import N_NUMBERS, TOPICS

VALUES = tuple(str(i) for i in range(N_NUMBERS))


class _Pages(Episode):
    def __init__(self, env: ReadPage, rng: np.random.Generator):
        P, self.answers, self.only = env.pages, VALUES[: env.values], env.entries == 0
        topics = [TOPICS[i] for i in rng.permutation(len(TOPICS))]
        self.listed, others = topics[:P], topics[P:]
        self.page_of = dict(zip(self.listed, (int(i) for i in rng.permutation(P) + 1)))
        self.text: dict[int, list[tuple[str, str]]] = {}
        entries = max(1, env.entries)
        values = rng.permuted(np.tile(np.arange(env.values), (P, 1)), axis=1)
        for topic, page in self.page_of.items():
            names = [topic, *(others[i] for i in rng.permutation(len(others))[: entries - 1])]
            pairs = [(name, str(v)) for name, v in zip(names, values[page - 1])]
            self.text[page] = [pairs[i] for i in rng.permutation(entries)]
        self.filler = [str(i) for i in rng.integers(0, N_NUMBERS, env.filler)]
        self.asked = self.listed[0]
        lines = [self.asked, *self.listed[1:][: (env.lines or P) - 1]]
        self.order = [lines[i] for i in rng.permutation(len(lines))]
        self.tools = (Tool("index"), Tool("read_page", (Param("page", 1, P),)))
        self.question = f"find {self.asked}"
        self.budget = env.budget
        self.parameters = (self.asked, self.page_of[self.asked])
        self.seen_index = self.seen_page = False

    @property
    def value(self) -> str:
        return dict(self.text[self.page_of[self.asked]])[self.asked]

    def call(self, call: Call) -> str:
        if call.tool == "index":
            self.seen_index = True
            return " ".join(f"{topic} page {self.page_of[topic]}" for topic in self.order)
        page = int(call.args[0])
        right = page == self.page_of[self.asked]
        self.seen_page |= right
        if self.only and not right:
            return " ".join([*self.filler, "none"])
        pairs = " ".join(f"{topic} {value}" for topic, value in self.text[page])
        return " ".join([*self.filler, pairs])

    def verify(self, answer: str) -> float:
        return float(answer == self.value)

    def oracle(self) -> Action:
        if self.seen_page:
            return Answer(self.value)
        return Call("read_page", (str(self.page_of[self.asked]),)) if self.seen_index else Call("index")

    def explore(self, rng: np.random.Generator) -> Call:
        if rng.random() < 0.5:
            return Call("index")
        return Call("read_page", (str(rng.integers(1, len(self.listed) + 1)),))

    def known(self) -> str | None:
        return self.value if self.seen_page else None

    def potential(self) -> float:
        return 1.0 if self.seen_page else 0.5 if self.seen_index else 0.0


@register("read_page")
@dataclass(frozen=True)
class ReadPage(Environment):
    """Find the value of a topic on one of several hidden pages; `index` lists the pages of topics.

    The oracle needs two calls. Reading pages at random finds the right one at 1 in `pages`.
    """

    pages: int = 8
    entries: int = 2  # pairs on a page; one is about the page's topic. 0: a page says what it has about the topic
    # asked for, or "none"
    lines: int = 0  # topics that the index lists, the one asked for among them; 0: all
    values: int = 100  # different answers
    budget: int = 6
    filler: int = 0  # numbers before the pairs of a page, for long trajectories

    def __post_init__(self):
        check(2 <= self.pages <= 12, "env read_page pages", self.pages, "must lie in [2, 12]")
        check(0 <= self.entries <= 6, "env read_page entries", self.entries, "must lie in [0, 6]")
        check(0 <= self.lines <= self.pages, "env read_page lines", self.lines, f"must lie in [0, pages={self.pages}]")
        check(64 <= self.values <= N_NUMBERS, "env read_page values", self.values, f"must lie in [64, {N_NUMBERS}]")
        check(self.budget >= 2, "env read_page budget", self.budget, "must be at least 2, which the oracle needs")

    def draw(self, rng: np.random.Generator) -> Episode:
        return _Pages(self, rng)


class _Documents(Episode):
    answers: Sequence[str] = VALUES

    def __init__(self, env: Aggregate, rng: np.random.Generator):
        self.values = [int(v) for v in rng.choice(N_NUMBERS, env.docs, replace=False)]
        self.tools = (Tool("read", (Param("doc", 1, env.docs),)),)
        self.question = f"largest value of {env.docs}"
        self.budget = env.budget
        self.parameters = (int(np.argmax(self.values)), max(self.values))
        self.seen: set[int] = set()

    def call(self, call: Call) -> str:
        doc = int(call.args[0])
        self.seen.add(doc)
        return f"doc {doc} value {self.values[doc - 1]}"

    def verify(self, answer: str) -> float:
        return float(answer == str(max(self.values)))

    def oracle(self) -> Action:
        left = [i + 1 for i in range(len(self.values)) if i + 1 not in self.seen]
        return Call("read", (str(left[0]),)) if left else Answer(str(max(self.values)))

    def explore(self, rng: np.random.Generator) -> Call:
        return Call("read", (str(rng.integers(1, len(self.values) + 1)),))

    def known(self) -> str | None:
        return str(max(self.values)) if len(self.seen) == len(self.values) else None

    def potential(self) -> float:
        return len(self.seen) / len(self.values)


@register("aggregate")
@dataclass(frozen=True)
class Aggregate(Environment):
    """The largest value over several documents: all of them must be read, each once."""

    docs: int = 3
    budget: int = 5

    def __post_init__(self):
        check(2 <= self.docs <= 12, "env aggregate docs", self.docs, "must lie in [2, 12]")
        check(self.budget >= self.docs, "env aggregate budget", self.budget, f"must be at least docs={self.docs}")

    def draw(self, rng: np.random.Generator) -> Episode:
        return _Documents(self, rng)

"""A context that is dropped now and then: only a note survives."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trillium_moe.config import check
from trillium_moe.rl.env import Environment, Episode, register
from trillium_moe.rl.envs.pages import VALUES
from trillium_moe.rl.protocol import Action, Answer, Call, Param, Tool
from trillium_moe.rl.vocabulary import N_NUMBERS, TOPICS


class _Memory(Episode):
    answers = VALUES

    def __init__(self, env: Memory, rng: np.random.Generator):
        topics = [TOPICS[i] for i in rng.permutation(len(TOPICS))[: env.facts]]
        self.facts = [(topic, str(v)) for topic, v in zip(topics, rng.permutation(N_NUMBERS))]
        self.which = int(rng.integers(env.facts))
        self.every, self.budget = env.every, env.budget
        self.tools = (Tool("next"), Tool("note", (Param("value"),)))
        self.parameters = (self.facts[self.which][0], self.which)
        self.at = self.n = 0
        self.kept = ""
        self.context: set[str] = set()  # values that the present context shows
        self.question = self._question()

    def _question(self) -> str:
        return f"find {self.facts[self.which][0]} until end note {self.kept or 'none'}"

    @property
    def value(self) -> str:
        return self.facts[self.which][1]

    def call(self, call: Call) -> str:
        self.n += 1
        if call.tool == "note":
            self.kept = call.args[0]
            return f"note {self.kept}"
        if self.at == len(self.facts):
            return "end"
        topic, value = self.facts[self.at]
        self.at += 1
        self.context.add(value)
        return f"{topic} {value}" + (" end" if self.at == len(self.facts) else "")

    def compact(self) -> str | None:
        if self.n % self.every:
            return None
        self.context = {self.kept} - {""}
        return self._question() + (" end" if self.at == len(self.facts) else "")

    def verify(self, answer: str) -> float:
        return float(answer == self.value and self.at == len(self.facts))  # not before the end

    def oracle(self) -> Action:
        if self.at == len(self.facts):
            return Answer(self.value)
        if self.at > self.which and self.kept != self.value:
            return Call("note", (self.value,))
        return Call("next")

    def explore(self, rng: np.random.Generator) -> Call:
        seen = [value for _, value in self.facts[: self.at] if value in self.context]
        if seen and rng.random() < 0.4:
            return Call("note", (str(rng.choice(seen)),))
        return Call("next")

    def known(self) -> str | None:
        return self.value if self.at == len(self.facts) and self.value in self.context else None

    @property
    def chance(self) -> float:
        return 0.0  # an answer before the end is never right


@register("memory")
@dataclass(frozen=True)
class Memory(Environment):
    """Facts come one by one and the context is dropped every few calls; only what was noted is in the new one."""

    facts: int = 5
    every: int = 2  # calls between two compactions
    budget: int = 9

    def __post_init__(self):
        check(2 <= self.facts <= len(TOPICS), "env memory facts", self.facts, f"must lie in [2, {len(TOPICS)}]")
        check(self.every >= 2, "env memory every", self.every, "must be at least 2: one call to see, one to note")
        check(self.budget > self.facts, "env memory budget", self.budget, f"must be more than facts={self.facts}")

    def draw(self, rng: np.random.Generator) -> Episode:
        return _Memory(self, rng)

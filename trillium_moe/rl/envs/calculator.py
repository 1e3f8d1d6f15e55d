"""Chains of calculations on a calculator that nobody can replace."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trillium_moe.config import check
from trillium_moe.rl.env import Environment, Episode, register
from trillium_moe.rl.envs.pages import VALUES
from trillium_moe.rl.protocol import Action, Answer, Call, Param, Tool

MODULUS = 97


class _Chain(Episode):
    answers = VALUES[:MODULUS]

    def __init__(self, env: Calculator, rng: np.random.Generator):
        draw = lambda: int(rng.integers(2, MODULUS))
        self.start = draw()
        self.steps = [(str(rng.choice(["plus", "times"])), draw()) for _ in range(env.steps)]
        self.offset = draw()  # the calculator's secret: without it no result can be worked out from the question
        self.tools = (Tool("calc", (Param("a"), Param("op", choices=("plus", "times")), Param("b"))),)
        self.question = " ".join(["start", str(self.start), *(f"{op} {b}" for op, b in self.steps)])
        self.budget = env.budget
        self.parameters = (self.start, self.steps[0])
        self.results: list[int] = []

    def compute(self, a: int, op: str, b: int) -> int:
        return (self.offset + (a + b if op == "plus" else a * b)) % MODULUS

    @property
    def chain(self) -> list[int]:
        """Start, and the result of every step."""
        out = [self.start]
        for op, b in self.steps:
            out.append(self.compute(out[-1], op, b))
        return out

    @property
    def done(self) -> int:
        """Steps of the chain whose results were seen, in order."""
        chain, n = self.chain, 0
        for result in self.results:
            n += n < len(self.steps) and result == chain[n + 1]
        return n

    def call(self, call: Call) -> str:
        a, op, b = call.args
        self.results.append(self.compute(int(a), op, int(b)))
        return str(self.results[-1])

    def verify(self, answer: str) -> float:
        return float(answer == str(self.chain[-1]))

    def oracle(self) -> Action:
        n = self.done
        if n == len(self.steps):
            return Answer(str(self.chain[-1]))
        op, b = self.steps[n]
        return Call("calc", (str(self.chain[n]), op, str(b)))

    def explore(self, rng: np.random.Generator) -> Call:
        a = rng.choice([self.start, *self.results])
        op, b = self.steps[rng.integers(len(self.steps))]
        return Call("calc", (str(a), op, str(b)))

    def known(self) -> str | None:
        return str(self.chain[-1]) if self.done == len(self.steps) else None

    def potential(self) -> float:
        return self.done / len(self.steps)


@register("calculator")
@dataclass(frozen=True)
class Calculator(Environment):
    """A chain of operations modulo 97 by a calculator that adds a secret number: its results cannot be guessed."""

    steps: int = 2
    budget: int = 4

    def __post_init__(self):
        check(1 <= self.steps <= 6, "env calculator steps", self.steps, "must lie in [1, 6]")
        check(self.budget >= self.steps, "env calculator budget", self.budget, f"must be at least steps={self.steps}")

    def draw(self, rng: np.random.Generator) -> Episode:
        return _Chain(self, rng)

"""Search by asking: number guessing (`guess`) and a maze with a number at its goal (`maze`)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from trillium_moe.config import check
from trillium_moe.rl.env import Environment, Episode, register
from trillium_moe.rl.envs.pages import VALUES
from trillium_moe.rl.protocol import Action, Answer, Call, Param, Tool
from trillium_moe.rl.vocabulary import N_NUMBERS

WAYS = {"north": (-1, 0), "east": (0, 1), "south": (1, 0), "west": (0, -1)}


class _Guess(Episode):
    def __init__(self, env: Guess, rng: np.random.Generator):
        self.secret = int(rng.integers(env.numbers))
        self.low, self.high = 0, env.numbers - 1
        self.answers = VALUES[: env.numbers]
        self.n, self.budget = env.numbers, env.budget
        self.tools = (Tool("guess", (Param("number", 0, env.numbers - 1),)),)
        self.question = f"find number 0 to {env.numbers - 1}"
        self.parameters = (self.secret,)

    def call(self, call: Call) -> str:
        number = int(call.args[0])
        if number < self.secret:
            self.low = max(self.low, number + 1)
            return f"higher {number}"
        if number > self.secret:
            self.high = min(self.high, number - 1)
            return f"lower {number}"
        self.low = self.high = number
        return f"equal {number}"

    def verify(self, answer: str) -> float:
        return float(answer == str(self.secret))

    def oracle(self) -> Action:
        found = self.known()
        return Answer(found) if found else Call("guess", (str((self.low + self.high) // 2),))

    def explore(self, rng: np.random.Generator) -> Call:
        return Call("guess", (str(rng.integers(self.n)),))

    def known(self) -> str | None:
        return str(self.secret) if self.low == self.high else None

    def potential(self) -> float:
        return 1 - float(np.log2(self.high - self.low + 1) / np.log2(self.n))


@register("guess")
@dataclass(frozen=True)
class Guess(Environment):
    """Find a number by "higher" and "lower": halving needs log2(numbers) calls."""

    numbers: int = 64
    budget: int = 8

    def __post_init__(self):
        check(64 <= self.numbers <= N_NUMBERS, "env guess numbers", self.numbers, f"must lie in [64, {N_NUMBERS}]")
        need = int(np.ceil(np.log2(self.numbers)))
        check(self.budget >= need, "env guess budget", self.budget, f"must be at least {need}, which halving needs")

    def draw(self, rng: np.random.Generator) -> Episode:
        return _Guess(self, rng)


class _Maze(Episode):
    answers = VALUES

    def __init__(self, env: Maze, rng: np.random.Generator):
        n = self.size = env.size
        cells = [(r, c) for r in range(n) for c in range(n)]
        self.doors: set[frozenset] = set()  # a random spanning tree and a few doors more
        tree, rest = [cells[rng.integers(len(cells))]], set(cells)
        rest.discard(tree[0])
        while rest:
            cell = tree[rng.integers(len(tree))]
            near = [x for x in self._near(cell) if x in rest]
            if near:
                new = near[rng.integers(len(near))]
                self.doors.add(frozenset((cell, new)))
                tree.append(new)
                rest.discard(new)
        a, b = rng.permutation(len(cells))[:2]
        self.at, self.goal = cells[a], cells[b]
        self.value = str(rng.integers(N_NUMBERS))
        self.tools = (Tool("move", (Param("way", choices=tuple(WAYS)),)),)
        self.question = f"at {self.at[0]} {self.at[1]} find {self.goal[0]} {self.goal[1]} open {self._open()}"
        self.budget = env.budget
        self.parameters = (self.at, self.goal)
        self.found = False
        self.start_distance = self.distance()

    def _near(self, cell: tuple[int, int]) -> list[tuple[int, int]]:
        moved = [(cell[0] + r, cell[1] + c) for r, c in WAYS.values()]
        return [x for x in moved if 0 <= x[0] < self.size and 0 <= x[1] < self.size]

    def _to(self, way: str) -> tuple[int, int]:
        r, c = WAYS[way]
        return self.at[0] + r, self.at[1] + c

    def _ways(self) -> list[str]:
        return [way for way in WAYS if frozenset((self.at, self._to(way))) in self.doors]

    def _open(self) -> str:
        return " ".join(self._ways())

    def distances(self) -> dict[tuple[int, int], int]:
        """Steps to the goal from every cell."""
        out, queue = {self.goal: 0}, deque([self.goal])
        while queue:
            cell = queue.popleft()
            for new in self._near(cell):
                if new not in out and frozenset((cell, new)) in self.doors:
                    out[new] = out[cell] + 1
                    queue.append(new)
        return out

    def distance(self) -> int:
        return self.distances()[self.at]

    def call(self, call: Call) -> str:
        if call.args[0] in self._ways():
            self.at = self._to(call.args[0])
        self.found |= self.at == self.goal
        found = f" found {self.value}" if self.at == self.goal else ""
        return f"at {self.at[0]} {self.at[1]} open {self._open()}{found}"

    def verify(self, answer: str) -> float:
        return float(answer == self.value)

    def oracle(self) -> Action:
        if self.found:
            return Answer(self.value)
        distances = self.distances()
        return Call("move", (min(self._ways(), key=lambda way: distances[self._to(way)]),))

    def explore(self, rng: np.random.Generator) -> Call:
        return Call("move", (str(rng.choice(self._ways())),))

    def known(self) -> str | None:
        return self.value if self.found else None

    def potential(self) -> float:
        return 1.0 if self.found else 1 - self.distance() / (self.size * self.size)


@register("maze")
@dataclass(frozen=True)
class Maze(Environment):
    """Walk through hidden walls to a cell and give the number that lies there; only one's own cell's ways are seen."""

    size: int = 3
    budget: int = 12

    def __post_init__(self):
        check(2 <= self.size <= 10, "env maze size", self.size, "must lie in [2, 10]")
        check(self.budget >= self.size**2 - 1, "env maze budget", self.budget,
              f"must be at least {self.size**2 - 1}, the longest way")

    def draw(self, rng: np.random.Generator) -> Episode:
        return _Maze(self, rng)

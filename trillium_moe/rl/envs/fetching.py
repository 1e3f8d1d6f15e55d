"""Values behind keys: chains of keys (`lookup`), tools that change (`drift`), tools that fail (`flaky`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trillium_moe.config import check
from trillium_moe.rl.env import Environment, Episode, register
from trillium_moe.rl.envs.pages import VALUES
from trillium_moe.rl.protocol import Action, Answer, Call, Param, Tool
from trillium_moe.rl.vocabulary import N_NUMBERS, NAMES, TOPICS


class _Lookup(Episode):
    answers = VALUES

    def __init__(self, env: Lookup, rng: np.random.Generator):
        self.next_of = [int(i) for i in rng.permutation(N_NUMBERS)]
        self.path = [int(rng.integers(N_NUMBERS))]
        for _ in range(env.hops):
            self.path.append(self.next_of[self.path[-1]])
        self.tools = (Tool("get", (Param("key"),)),)
        self.question = f"follow {self.path[0]} hops {env.hops}"
        self.budget = env.budget
        self.parameters = (self.path[0], self.path[1] % 10)
        self.at, self.results, self.counts = 0, [], env.left > 0
        self.filler = [str(i) for i in rng.integers(0, N_NUMBERS, env.filler)]
        if env.prose:
            self.filler += [TOPICS[i] for i in rng.integers(0, len(TOPICS), env.prose)]

    def call(self, call: Call) -> str:
        key = int(call.args[0])
        self.at += self.at < len(self.path) - 1 and key == self.path[self.at]
        self.results.append(self.next_of[key])
        left = [f"left {len(self.path) - 1 - self.at}"] if self.counts else []
        return " ".join([*self.filler, f"key {key} value {self.next_of[key]}", *left])

    def verify(self, answer: str) -> float:
        return float(answer == str(self.path[-1]))

    def oracle(self) -> Action:
        return Answer(str(self.path[-1])) if self.known() else Call("get", (str(self.path[self.at]),))

    def explore(self, rng: np.random.Generator) -> Call:
        return Call("get", (str(rng.choice([self.path[0], *self.results])),))

    def known(self) -> str | None:
        return str(self.path[-1]) if self.at == len(self.path) - 1 else None

    def potential(self) -> float:
        return self.at / (len(self.path) - 1)


@register("lookup")
@dataclass(frozen=True)
class Lookup(Environment):
    """Follow a chain of keys through a hidden table and give the last value."""

    hops: int = 3
    budget: int = 5
    filler: int = 0  # numbers before every value, for long trajectories
    prose: int = 0  # words before every value, none of them a number
    left: int = 0  # 1: the tool says how many hops are left, so that what to do next stands in its last words

    def __post_init__(self):
        check(1 <= self.hops <= 16, "env lookup hops", self.hops, "must lie in [1, 16]")
        check(0 <= self.left <= 1, "env lookup left", self.left, "must be 0 or 1")
        check(self.budget >= self.hops, "env lookup budget", self.budget, f"must be at least hops={self.hops}")

    def draw(self, rng: np.random.Generator) -> Episode:
        while True:
            episode = _Lookup(self, rng)
            if len(set(episode.path)) == len(episode.path):  # no cycle back to the start
                return episode


class _Drift(Episode):
    answers = VALUES
    kinds = ("blue", "red")

    def __init__(self, env: Drift, rng: np.random.Generator):
        self.places, self.budget = env.places, env.budget
        names = [NAMES[i] for i in rng.permutation(len(NAMES))[:2]]
        self.flipped = [bool(rng.integers(2)) for _ in self.kinds]
        self.table = rng.integers(0, N_NUMBERS, (2, env.places, env.places))
        self.kind = int(rng.integers(2))
        shelf = int(rng.integers(env.places))
        box = int((shelf + rng.integers(1, env.places)) % env.places)  # another number: the order matters
        self.where = (shelf, box)
        order = lambda flip: ("box", "shelf") if flip else ("shelf", "box")
        self.tools = tuple(Tool(name, tuple(Param(p, 0, env.places - 1) for p in order(flip)))
                           for name, flip in zip(names, self.flipped))
        declared = " ".join(f"{kind} is {name}" for kind, name in zip(self.kinds, names))
        self.question = f"{declared} find {self.kinds[self.kind]} shelf {shelf} box {box}"
        self.parameters = (names[self.kind], self.flipped[self.kind])
        self.found = False

    @property
    def value(self) -> str:
        return str(self.table[self.kind][self.where])

    @property
    def right(self) -> Call:
        args = self.where[::-1] if self.flipped[self.kind] else self.where
        return Call(self.tools[self.kind].name, tuple(str(a) for a in args))

    def call(self, call: Call) -> str:
        kind = next(i for i, tool in enumerate(self.tools) if tool.name == call.tool)
        place = tuple(int(a) for a in call.args)
        self.found |= call == self.right
        return f"value {self.table[kind][place[::-1] if self.flipped[kind] else place]}"

    def verify(self, answer: str) -> float:
        return float(answer == self.value)

    def oracle(self) -> Action:
        return Answer(self.value) if self.found else self.right

    def explore(self, rng: np.random.Generator) -> Call:
        args = self.where[::-1] if rng.integers(2) else self.where
        return Call(self.tools[rng.integers(2)].name, tuple(str(a) for a in args))

    def known(self) -> str | None:
        return self.value if self.found else None


@register("drift")
@dataclass(frozen=True)
class Drift(Environment):
    """Two tools whose names and argument order change with every episode and are declared in the prompt.

    One call only: the right tool with its arguments in the declared order. A fifth of (name, order) is held out.
    """

    places: int = 10
    budget: int = 1

    def __post_init__(self):
        check(2 <= self.places <= 50, "env drift places", self.places, "must lie in [2, 50]")
        check(self.budget >= 1, "env drift budget", self.budget, "must be at least 1")

    def draw(self, rng: np.random.Generator) -> Episode:
        return _Drift(self, rng)


class _Flaky(Episode):
    answers = VALUES

    def __init__(self, env: Flaky, rng: np.random.Generator):
        self.env, self.rng = env, np.random.default_rng(rng.integers(1 << 31))
        keys = [int(i) for i in rng.permutation(N_NUMBERS)[: env.keys]]
        self.keys, self.asked, self.budget = keys, keys[int(rng.integers(env.keys))], env.budget
        self.values = {key: int(rng.integers(N_NUMBERS)) for key in keys}
        self.tools = (Tool("fetch", (Param("key"),)),)
        self.question = f"key {' '.join(map(str, sorted(keys)))} fetch {self.asked}"
        self.parameters = (self.asked,)
        self.found = False
        # what calls do is drawn beforehand, so that some calls always work: the last one the budget allows does
        p = [env.busy, env.stale, 1 - env.busy - env.stale]
        drawn = self.rng.choice(["busy", "stale", "fresh"], env.budget - 1, p=p)
        self.fates = [*(str(f) for f in drawn), "fresh"]
        self.n = 0

    def call(self, call: Call) -> str:
        key = int(call.args[0])
        fate = self.fates[min(self.n, len(self.fates) - 1)]
        self.n += 1
        if key not in self.values:
            return "none"
        if fate == "busy":
            return "busy"
        if fate == "stale":
            return f"stale {int(self.rng.integers(N_NUMBERS))}"
        self.found |= key == self.asked
        return f"fresh {self.values[key]}"

    def verify(self, answer: str) -> float:
        return float(answer == str(self.values[self.asked]))

    def oracle(self) -> Action:
        return Answer(str(self.values[self.asked])) if self.found else Call("fetch", (str(self.asked),))

    def explore(self, rng: np.random.Generator) -> Call:
        return Call("fetch", (str(rng.choice(self.keys)),))

    def known(self) -> str | None:
        return str(self.values[self.asked]) if self.found else None


@register("flaky")
@dataclass(frozen=True)
class Flaky(Environment):
    """A tool that is sometimes busy and sometimes gives an old value, marked as such: ask again until it is fresh."""

    keys: int = 3
    busy: float = 0.3
    stale: float = 0.3
    budget: int = 5

    def __post_init__(self):
        check(1 <= self.keys <= 8, "env flaky keys", self.keys, "must lie in [1, 8]")
        check(min(self.busy, self.stale) >= 0 and self.busy + self.stale < 1, "env flaky busy", self.busy,
              "busy and stale must not be negative and sum to less than 1")
        check(self.budget >= 1, "env flaky budget", self.budget, "must be at least 1")

    def draw(self, rng: np.random.Generator) -> Episode:
        return _Flaky(self, rng)

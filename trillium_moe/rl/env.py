"""What an environment is, the registry, and a session that plays one episode turn by turn.

An `Environment` draws episodes; an `Episode` holds what is hidden, answers calls, and verifies. The verifier looks at
the hidden state only, never at what the tools said. Everything is a function of (environment, seed, split) and the
actions, so a session is restored by playing its actions again.

Episodes have generator parameters (who is asked for, where it lies); a hash of them decides whether an episode belongs
to the train or to the held-out split, so that held-out episodes differ from all training ones in those, not only by
seed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from trillium_moe.config import ConfigError, check, check_choice
from trillium_moe.rl.protocol import Action, Answer, Call, Tool, Turn

SPLITS = ("train", "heldout")
HELDOUT_SHARE = 5  # one in so many parameter values is held out
ENVIRONMENTS: dict[str, type[Environment]] = {}


class Episode:
    """One task. Attributes are set by `Environment.draw`."""

    tools: tuple[Tool, ...]
    question: str
    budget: int  # calls
    answers: Sequence[str]  # every possible answer; all but `chance` of them are wrong
    parameters: tuple  # what the split depends on

    def call(self, call: Call) -> str:
        """Runs a valid call and returns what the model sees."""
        raise NotImplementedError

    def verify(self, answer: str) -> float:
        """Reward of a final answer, in [0, 1]."""
        raise NotImplementedError

    def oracle(self) -> Action:
        """The best action, from the hidden state; deterministic."""
        raise NotImplementedError

    def explore(self, rng: np.random.Generator) -> Call:
        """A valid call with random choices: no strategy."""
        raise NotImplementedError

    def known(self) -> str | None:
        """The answer, if what was seen so far tells it."""
        raise NotImplementedError

    def public(self, answer: str) -> float:
        """What a verifier that the model can see says of an answer; differs from `verify` where tests are hidden."""
        return self.verify(answer)

    def potential(self) -> float:
        """Progress in [0, 1], for potential-based shaping."""
        return 0.0

    def compact(self) -> str | None:
        """A new question that replaces the whole context, when a context limit is reached; else None."""
        return None

    @property
    def chance(self) -> float:
        """Success of an answer drawn uniformly, without a call: exact."""
        return float(np.mean([self.verify(a) for a in self.answers]))


@dataclass(frozen=True)
class Environment:
    """A distribution of episodes. Subclasses are frozen dataclasses whose fields are options."""

    def draw(self, rng: np.random.Generator) -> Episode:
        raise NotImplementedError

    def episode(self, seed: int, split: str = "train") -> Episode:
        """The episode of a seed. Raises ConfigError if the options leave a split without episodes."""
        rng = np.random.default_rng([seed, zlib.crc32(type(self).__name__.encode())])
        for _ in range(1000):
            episode = self.draw(rng)
            if heldout(episode.parameters) == (split == "heldout"):
                return episode
        raise ConfigError(f"config env={self!r}: no episode of the {split} split in 1000 draws; widen its options")


def heldout(parameters: tuple) -> bool:
    """Whether generator parameters belong to the held-out split."""
    return zlib.crc32(repr(parameters).encode()) % HELDOUT_SHARE == 0


def register(name: str) -> Callable[[type], type]:
    """Class decorator: makes an environment known by name."""
    def add(cls):
        ENVIRONMENTS[name] = cls
        return cls
    return add


def make_env(spec: str) -> Environment:
    """An environment from `name` or `name:option=value:option=value`. Raises ConfigError for what does not exist."""
    from trillium_moe.rl import envs  # noqa: F401 - registers them

    name, *options = spec.split(":")
    check_choice("env", name, tuple(ENVIRONMENTS))
    cls, values = ENVIRONMENTS[name], {}
    known = {f.name: f for f in fields(cls)}
    for option in options:
        key, equals, value = option.partition("=")
        check_choice(f"env {name} option", key, tuple(known))
        check(equals == "=", f"env {name}", option, "write option=value")
        kind = type(known[key].default)
        try:
            values[key] = kind(value)
        except ValueError:
            raise ConfigError(f"config env {name} {key}={value!r}: must be of type {kind.__name__}") from None
    return cls(**values)


@dataclass(frozen=True)
class Outcome:
    """What a turn led to."""

    observation: str  # "" when the episode ended
    reward: float
    done: bool
    compacted: str | None = None  # a question that replaces the context


@dataclass
class Session:
    """Plays one episode: budget, errors, rewards, and how consistently tools were used."""

    episode: Episode
    call_cost: float = 0.0  # taken from the reward at every turn that is not the answer
    calls: int = 0
    success: float = 0.0
    public: float = 0.0
    done: bool = False
    end: str = ""  # answer, budget, or what the rollout says
    errors: dict[str, int] = field(default_factory=dict)  # by kind, see `Session.step`
    used: dict[str, int] = field(default_factory=dict)  # valid calls of every tool
    _seen: set = field(default_factory=set)
    _words: set = field(default_factory=set)

    def step(self, turn: Turn) -> Outcome:
        """Advances by a parsed turn. Counts errors: those of the parser, repeated_call, unsupported_claim."""
        assert not self.done
        action = turn.action
        if isinstance(action, Answer):
            self.success = self.episode.verify(action.text)
            self.public = self.episode.public(action.text)
            claims = [w for w in action.text.split() if w.isdigit()]
            if any(w not in self._words for w in claims):
                self._count("unsupported_claim")
            return self.finish("answer", self.success)
        if action is None:
            self._count(turn.error)
            observation = "error"
        else:
            if action in self._seen:
                self._count("repeated_call")
            self._seen.add(action)
            self.used[action.tool] = self.used.get(action.tool, 0) + 1
            observation = self.episode.call(action)
            self._words |= set(observation.split())
        self.calls += 1
        if self.calls >= self.episode.budget + 1:
            return self.finish("budget", -self.call_cost)
        return Outcome(observation, -self.call_cost, False, self.episode.compact())

    def finish(self, end: str, reward: float = 0.0) -> Outcome:
        """Ends the episode."""
        self.done, self.end = True, end
        return Outcome("", reward, True)

    def _count(self, kind: str) -> None:
        self.errors[kind] = self.errors.get(kind, 0) + 1


# --- policies without a model

Policy = Callable[[Episode], Action]
GIVE_UP = Answer("none")  # right nowhere, and shorter than another call


def oracle(episode: Episode) -> Action:
    return episode.oracle()


def guesser(rng: np.random.Generator) -> Policy:
    """Answers at once, uniformly: its success is `Episode.chance`."""
    return lambda episode: Answer(str(rng.choice(np.asarray(episode.answers))))


def explorer(rng: np.random.Generator, stop: float = 0.7, patience: int = 0) -> Policy:
    """Valid calls with random choices; what a call happened to find is answered with probability `stop` a turn.

    The policy of the format traces: it shows the protocol and no strategy.

    Args:
      patience: calls after which it answers, or gives up if it found nothing; 0: it never gives up.
    """
    calls = 0

    def act(episode: Episode) -> Action:
        nonlocal calls
        found, spent = episode.known(), 0 < patience <= calls
        if found is not None and (rng.random() < stop or spent):
            return Answer(found)
        if spent:
            return GIVE_UP
        calls += 1
        return episode.explore(rng)
    return act


def helped(rng: np.random.Generator) -> Policy:
    """Half of the calls are the oracle's; answers what was found, at once: short ways to an answer.

    The policy of lessons in answering (`trillium_moe.rl.sft`), of whose turns the answer alone is learned.
    """
    def act(episode: Episode) -> Action:
        found, best = episode.known(), episode.oracle()
        if found is not None:
            return Answer(found)
        return best if isinstance(best, Call) and rng.random() < 0.5 else episode.explore(rng)
    return act


def play(session: Session, policy: Policy) -> Session:
    """Plays a whole episode without a model."""
    while not session.done:
        session.step(Turn(policy(session.episode)))
    return session

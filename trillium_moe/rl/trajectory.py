"""What one episode leaves behind: parallel arrays per token, from which advantages and weights are computed.

A part is a stretch of context in which every turn extends the one before. A trajectory has one part unless its context
was replaced on the way (compaction): then each part is a training sequence of its own, with the credit of its turns.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trillium_moe.rl.protocol import GIVEN


@dataclass
class Part:
    """Arrays of equal length, one entry a token."""

    tokens: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)  # 1: sampled by the model; 0: given to it
    logprob: list[float] = field(default_factory=list)  # nats, of the policy that sampled; 0 where given
    version: list[int] = field(default_factory=list)  # optimizer steps of the policy that sampled; -1 where given
    turn: list[int] = field(default_factory=list)  # the assistant's turns, counted from 0; given tokens: the next one
    channel: list[int] = field(default_factory=list)  # protocol: GIVEN, THINK, RESPONSE, TOOLS

    def give(self, tokens: list[int], turn: int) -> None:
        """Appends tokens that the model is given."""
        self._append(tokens, 0, [0.0] * len(tokens), -1, turn, [GIVEN] * len(tokens))

    def sample(self, tokens: list[int], logprob: list[float], version: int, turn: int) -> None:
        """Appends tokens that the model sampled. Channels are set when the turn is complete."""
        self._append(tokens, 1, logprob, version, turn, [GIVEN] * len(tokens))

    def _append(self, tokens, mask, logprob, version, turn, channel) -> None:
        n = len(tokens)
        self.tokens += [int(t) for t in tokens]
        self.mask += [mask] * n
        self.logprob += [float(p) for p in logprob]
        self.version += [version] * n
        self.turn += [turn] * n
        self.channel += channel

    def sampled(self, turn: int) -> list[int]:
        """Sampled ids of one turn."""
        return [t for t, m, u in zip(self.tokens, self.mask, self.turn) if m and u == turn]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class Trajectory:
    """One sample of one task."""

    group: int
    sample: int
    env: int  # index into the run's environments
    seed: int  # of the episode
    split: str = "train"
    effort: str = ""
    parts: list[Part] = field(default_factory=lambda: [Part()])
    turns: int = 0  # complete ones
    rewards: list[float] = field(default_factory=list)  # one a turn
    potentials: list[float] = field(default_factory=list)  # before every turn, for shaping
    calls: int = 0
    success: float = 0.0
    public: float = 0.0  # verdict of the verifier that the model can see
    end: str = ""  # answer, budget, overlong, context, time; "": not yet
    errors: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)  # valid calls of every tool

    @property
    def id(self) -> str:
        return f"{self.group}/{self.sample}"

    @property
    def done(self) -> bool:
        return bool(self.end)

    @property
    def sampled(self) -> int:
        """Tokens that the model wrote: T(y) of the effort budget."""
        return sum(sum(part.mask) for part in self.parts)

    @property
    def length(self) -> int:
        return sum(map(len, self.parts))

    @property
    def reward(self) -> float:
        return float(sum(self.rewards))

    @property
    def versions(self) -> np.ndarray:
        """Policy version of every sampled token."""
        return np.array([v for part in self.parts for v, m in zip(part.version, part.mask) if m], np.int64)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Trajectory:
        return cls(**{**values, "parts": [Part(**part) for part in values["parts"]]})


Group = list[Trajectory]  # K samples of one task

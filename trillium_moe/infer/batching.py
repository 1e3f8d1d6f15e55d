"""Continuous batching: requests wait, take a free slot of the engine, and leave it to the next when they end.

Every `step` prefills one chunk of one waiting prompt and decodes all running sequences, so that a long prompt delays
the others by a chunk at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trillium_moe.config import check
from trillium_moe.infer.engine import Engine
from trillium_moe.infer.pictures import Pictures
from trillium_moe.infer.sampling import Sampling


@dataclass(eq=False)
class Request:
    """One sequence to be continued."""

    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = Sampling()
    stops: Sequence[int] = ()  # token ids; one of them ends the sequence and is its last token
    on_tokens: Callable[[Request], Any] = lambda request: None  # called after every step that changed the request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: str = ""  # stop (token), length, cancelled; "": not yet
    slot: int = -1
    pictures: Pictures | None = None  # those whose placeholders are in the prompt


class Batcher:
    """Not for several threads at once."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.waiting: deque[Request] = deque()
        self.prefilling: deque[tuple[Request, Any]] = deque()
        self.running: dict[int, Request] = {}

    def check(self, request: Request) -> None:
        """Raises ConfigError for a request that can never run."""
        vocab, capacity = self.engine.model.vocab_size, self.engine.cache.capacity
        check(len(request.prompt) > 0, "prompt", "", "must hold at least one token: the model predicts what follows it")
        bad = [i for i in request.prompt if not 0 <= i < vocab]
        check(not bad, "prompt", bad[:3], f"token ids must lie in [0, {vocab})")
        check(request.max_tokens > 0, "max_tokens", request.max_tokens, "must be greater than 0")
        check(len(request.prompt) + request.max_tokens <= capacity, "max_tokens", request.max_tokens,
              f"{len(request.prompt)} tokens of prompt leave {max(0, capacity - len(request.prompt))} of {capacity}")

    def submit(self, request: Request) -> Request:
        """Queues a request. Raises ConfigError if it can never run."""
        self.check(request)
        self.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """Ends a request wherever it is; its slot is free at once."""
        if request.finished:
            return
        if request in self.waiting:
            self.waiting.remove(request)
        self._end(request, "cancelled")

    def abandon(self, reason: str) -> None:
        """Ends every request."""
        for request in [*self.waiting, *(r for r, _ in self.prefilling), *self.running.values()]:
            self._end(request, reason)
        self.waiting.clear()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def step(self) -> None:
        """One chunk of prefill and one call of decode, as far as there is work."""
        while self.waiting and self.engine.free:
            request = self.waiting.popleft()
            request.slot = self.engine.open()
            self.prefilling.append((request, self.engine.extending(request.slot, request.prompt, request.pictures)))
        if self.prefilling:
            request, chunks = self.prefilling[0]
            if next(chunks, self) is self:
                self.prefilling.popleft()
                self.engine.start(request.slot, request.max_tokens, request.sampling, request.stops)
                self.running[request.slot] = request
            else:
                self.prefilling.rotate(-1)
        if self.running:
            self._decode()

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self.busy:
            self.step()

    def _decode(self) -> None:
        decoded = self.engine.decode()
        for slot, request in list(self.running.items()):
            n = int((decoded.tokens[slot] >= 0).sum())
            request.tokens += decoded.tokens[slot, :n].tolist()
            request.logprobs += decoded.logprobs[slot, :n].astype(np.float64).tolist()
            if self.engine.left[slot] == 0:
                self._end(request, "stop" if request.tokens[-1] in request.stops else "length")
            else:
                request.on_tokens(request)

    def _end(self, request: Request, reason: str) -> None:
        request.finished = reason
        self.running.pop(request.slot, None)
        self.prefilling = deque(pair for pair in self.prefilling if pair[0] is not request)
        if request.slot >= 0:
            self.engine.close(request.slot)
            request.slot = -1
        request.on_tokens(request)

"""Sequences read side by side in chunks through the caches: what the model predicts at every place, at any length.

Memory is the caches' (latents of `capacity` tokens a row) and a chunk's; it does not grow with the sequence beyond
that. One program reads all lengths.
"""

from __future__ import annotations

import copy
import functools
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trillium_moe.config import ModelConfig, check
from trillium_moe.infer import forward
from trillium_moe.model.cache import clear_rows, make_cache
from trillium_moe.shapes import Float, Int, PyTree


class Read(NamedTuple):
    """What a model made of a sequence of n tokens."""

    predicted: Int[np.ndarray, "..."]  # the likeliest next token after each
    nll: Float[np.ndarray, "..."]  # nats of the token that does follow; 0 after the last


class Reader:
    """Reads up to `rows` sequences of at most `capacity` tokens at a time, `chunk` tokens of each in a program."""

    def __init__(self, model: ModelConfig, params: PyTree, router_bias: PyTree, capacity: int, rows: int, chunk: int):
        """Raises ConfigError for sizes out of range or a cache that does not fit into the device's memory."""
        check(chunk > 1, "chunk", chunk, "must be greater than 1")
        self.model, self.rows, self.chunk = model, rows, chunk
        self.weights = forward.serving_weights(model, params, router_bias)
        self.cache = make_cache(model, rows, capacity)

    def read(self, sequences: Sequence[Int[np.ndarray, "..."]]) -> list[Read]:
        """Raises ConfigError for a sequence that is longer than the capacity."""
        out = []
        for at in range(0, len(sequences), self.rows):
            out += self._read(sequences[at : at + self.rows])
        return out

    def twin(self) -> Reader:
        """A reader with the same weights and a cache of its own, for another thread."""
        other = copy.copy(self)
        other.cache = make_cache(self.model, self.rows, self.cache.capacity)
        return other

    def _read(self, sequences):
        longest = max(map(len, sequences))
        check(longest <= self.cache.capacity, "length", longest, f"must be at most the capacity {self.cache.capacity}")
        self.cache = _clear(self.cache)
        padded = np.zeros((self.rows, longest + self.chunk + 1), np.int32)
        lengths = np.zeros(self.rows, np.int32)
        for row, sequence in enumerate(sequences):
            padded[row, : len(sequence)], lengths[row] = sequence, len(sequence)
        parts = [self._step(padded, lengths, at, self.chunk) for at in range(0, longest, self.chunk)]
        parts = jax.device_get(parts)  # only now: chunks follow one another on the device
        predicted, nll = (np.concatenate([part[i] for part in parts], 1) for i in (0, 1))
        for row, n in enumerate(lengths):
            nll[row, n - 1 :] = 0
        return [Read(predicted[row, :n], nll[row, :n]) for row, n in enumerate(lengths[: len(sequences)])]

    def _step(self, padded, lengths, at, size):
        n = np.clip(lengths - at, 0, size)
        window = padded[:, at : at + size + 1]
        predicted, nll, self.cache = _extend(self.model, self.weights, self.cache, window[:, :-1], window[:, 1:], n)
        return predicted, nll

    def continued(self, prompts: Sequence[Int[np.ndarray, "..."]], n_tokens: int) -> list[Int[np.ndarray, "..."]]:
        """The likeliest n_tokens after each prompt, token by token.

        Raises:
          ConfigError: for prompts that leave no room.
        """
        out = []
        for at in range(0, len(prompts), self.rows):
            part = prompts[at : at + self.rows]
            longest = max(map(len, part)) + n_tokens
            check(longest <= self.cache.capacity, "length", longest, f"must be at most {self.cache.capacity}")
            read = self._read(part)
            tokens = np.zeros((self.rows, n_tokens), np.int32)
            tokens[: len(part), 0] = [r.predicted[-1] for r in read]
            n = np.array([1] * len(part) + [0] * (self.rows - len(part)), np.int32)
            for i in range(1, n_tokens):
                last = tokens[:, i - 1 : i]
                predicted, _, self.cache = _extend(self.model, self.weights, self.cache, last, last, n)
                tokens[:, i] = np.asarray(predicted)[:, 0]
            out += list(tokens[: len(part)])
        return out


def read_all(readers: Sequence[Reader], sequences: Sequence[Int[np.ndarray, "..."]]) -> list[Read]:
    """What the readers make of the sequences, each in a thread: programs for a CPU use little more than one core.

    Sequences of like lengths are read side by side, the longest first; whichever reader is free takes the next.
    """
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    out: list[Any] = [None] * len(sequences)
    free = queue.SimpleQueue()
    for reader in readers:
        free.put(reader)

    def one(group):
        reader = free.get()
        try:
            return reader.read([sequences[i] for i in group])
        finally:
            free.put(reader)

    groups = [order[at : at + readers[0].rows] for at in range(0, len(order), readers[0].rows)]
    with ThreadPoolExecutor(len(readers)) as pool:
        for group, part in zip(groups, pool.map(one, groups)):
            for i, read in zip(group, part):
                out[i] = read
    return out


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _extend(model, weights, cache, tokens_BT, next_BT, n_B):
    h, cache = forward.extend(model, weights, cache, tokens_BT, n_B)
    logits = forward.logits(model, weights, h).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, next_BT[..., None], -1)[..., 0]
    return logits.argmax(-1).astype(jnp.int32), jax.nn.logsumexp(logits, -1) - picked, cache


@functools.partial(jax.jit, donate_argnums=0)
def _clear(cache):
    return clear_rows(cache, jnp.arange(cache.length.shape[0]))

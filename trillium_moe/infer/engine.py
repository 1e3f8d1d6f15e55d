"""A fixed number of sequences that grow side by side in one cache.

A slot is a row of the cache and a pending token: the last token of its sequence, which the cache has not seen yet. So

    extend(slot, tokens)   feeds the pending token and all but the last new one, whose turn comes next
    decode()               feeds every running slot its pending token and samples the next, several times in one program
    fork(slot, k)          copies the row; the copies share nothing afterwards

There is one program per chunk size and one for decoding, whatever the lengths, settings and the number of running
sequences. A sequence's tokens depend on its own tokens, settings and seed only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trillium_moe.config import ModelConfig, check
from trillium_moe.infer import forward
from trillium_moe.infer.pictures import Pictures
from trillium_moe.infer.prefix import PrefixStore
from trillium_moe.infer.sampling import Sampling, Settings, sample
from trillium_moe.model.cache import Cache, clear_rows, copy_rows, make_cache
from trillium_moe.shapes import PyTree

MOST_STOPS = 8  # stop tokens a sequence can have


@dataclass(frozen=True)
class EngineConfig:
    """Sizes that compiled programs depend on."""

    slots: int = 8  # sequences side by side
    capacity: int = 4096  # tokens a sequence may reach
    chunks: tuple[int, ...] = (16, 128, 512)  # tokens of a prefill program; what does not fill one is padded
    steps: int = 8  # tokens that one call of `decode` adds to a sequence at most
    speculate: bool = False  # verify a token proposed by the multi-token-prediction layer in every step
    latents: str = ""  # dtype of the latents: "" for the compute dtype, float32, bfloat16, int8
    prefix_block: int = 64  # tokens per hashed block of the prefix store
    prefix_bytes: int = 0  # device memory for prefixes; 0: no store
    prefix_host_bytes: int = 0  # host memory for prefixes that had to leave the device
    exact: bool = False  # sample from training's own forward pass: `exact.make_engine`

    def __post_init__(self):
        for name, value in (("speculate", False), ("latents", ""), ("prefix_bytes", 0)):
            check(not self.exact or getattr(self, name) == value, f"infer.{name}", getattr(self, name),
                  f"must be {value!r} with infer.exact")
        check(self.steps > 0, "infer.steps", self.steps, "must be greater than 0")
        check(len(self.chunks) > 0 and min(self.chunks, default=0) > 1, "infer.chunks", self.chunks,
              "must be sizes greater than 1")


class Snapshot(NamedTuple):
    """One sequence, outside of the cache."""

    length: int  # tokens in the cache
    pending: int
    latents: list[Any]  # per block of tokens, per MLA layer
    state: Any  # of the KDA layers


class Decoded(NamedTuple):
    """What `decode` added: rows are slots, -1 and nan where a sequence had stopped."""

    tokens: np.ndarray  # [slots, steps], twice as many columns with `speculate`
    logprobs: np.ndarray  # alike: of the model, in nats (temperature 1, no cuts)


class Engine:
    """See the module. Not for several threads at once; under `jax.set_mesh`, cut over that mesh."""

    def __init__(self, model: ModelConfig, params: PyTree, router_bias: PyTree, config: EngineConfig = EngineConfig()):
        """Raises ConfigError for sizes out of range or a cache that does not fit into the device's memory."""
        B = config.slots
        self.model, self.config = model, config
        self.cache = self._empty()
        self.load(params, router_bias)
        self.store = None
        if config.prefix_bytes:
            self.store = PrefixStore(config.prefix_block, config.prefix_bytes, config.prefix_host_bytes)
        self.length = np.zeros(B, np.int64)  # tokens in the cache
        self.pending = np.full(B, -1, np.int32)
        self.draft = np.full(B, -1, np.int32)  # proposal for the token after the pending one; -1: none
        self.proposed = self.accepted = 0  # tokens: all that the multi-token-prediction layer proposed, and the right
        self.left = np.zeros(B, np.int32)  # tokens still to be sampled
        self.count = np.zeros(B, np.int32)  # tokens sampled since `start`
        self.settings = Settings(np.zeros(B, np.uint32), np.zeros(B, np.float32), np.zeros(B, np.int32),
                                 np.ones(B, np.float32))
        self.stops = np.full((B, MOST_STOPS), -1, np.int32)
        self.greedy = True  # nothing was ever sampled: decoding needs no program that could
        self.free = list(range(B))[::-1]
        self.prefilled = 0  # tokens that went through prefill, not counting reuse
        self.computed = 0  # places of all programs that ran, rows x tokens, idle ones included: what it cost

    def _empty(self) -> Cache:
        check(not self.config.exact, "infer.exact", True, "needs the engine that trillium_moe.infer.exact makes")
        return make_cache(self.model, self.config.slots, self.config.capacity, self.config.latents,
                          mtp=self.config.speculate)

    # --- slots

    def _clear(self, slot: int) -> None:
        self.cache = _clear(self.cache, np.array([slot], np.int32))

    def _copy(self, slot: int, copies: list[int]) -> None:
        self.cache = _copy(self.cache, np.full(len(copies), slot, np.int32), np.array(copies, np.int32))

    def open(self) -> int:
        """An empty slot. Raises IndexError if none is free."""
        slot = self.free.pop()
        self._clear(slot)
        self.length[slot], self.pending[slot], self.left[slot], self.count[slot] = 0, -1, 0, 0
        return slot

    def close(self, slot: int) -> None:
        """Gives a slot back, whatever it was doing."""
        assert slot not in self.free
        self.left[slot] = 0
        self.free.append(slot)

    def room(self, slot: int) -> int:
        """Tokens that the sequence can still grow by."""
        return self.cache.capacity - int(self.length[slot]) - int(self.pending[slot] >= 0)

    def fork(self, slot: int, k: int) -> list[int]:
        """k new slots with the sequence of `slot`. Raises ConfigError if fewer are free."""
        check(k <= len(self.free), "infer.slots", self.config.slots,
              f"{k} forks were asked for and {len(self.free)} slots are free")
        copies = [self.free.pop() for _ in range(k)]
        self._copy(slot, copies)
        for copy in copies:
            for array in (self.length, self.pending, self.draft):
                array[copy] = array[slot]
            self.left[copy], self.count[copy] = 0, 0
        return copies

    # --- known tokens

    def extend(self, slot: int, tokens: Sequence[int] | np.ndarray, pictures: Pictures | None = None) -> None:
        """Appends known tokens, with the pictures whose placeholders are among them.

        Raises ConfigError if they do not fit, are no token ids, are none at all, or end with a picture.
        """
        for _ in self.extending(slot, tokens, pictures):
            pass

    def extending(self, slot: int, tokens: Sequence[int] | np.ndarray, pictures: Pictures | None = None):
        """`extend`, yielding after every chunk, so that others can be served in between."""
        tokens = self._checked(tokens)
        self._check_room(slot, len(tokens))
        seen = None if pictures is None else self._see(pictures, len(tokens))
        names = tokens if pictures is None else pictures.named(tokens)
        if self.pending[slot] >= 0:
            tokens, names = (np.concatenate([self.pending[slot : slot + 1], t]) for t in (tokens, names))
            seen = seen and tuple(np.pad(x, ((1, 0), *((0, 0),) * (x.ndim - 1))) for x in seen)
        self.pending[slot], self.draft[slot] = tokens[-1], -1
        known = names[:-1]  # what the store tells prefixes apart by: placeholders alone would look alike
        at, kept, marks = 0, 0, set()
        if self.store is not None and self.length[slot] == 0:
            at, marks = self._reuse(slot, known)
            kept = at // self.store.block
        while at < len(known):
            stop = min([m for m in marks if m > at], default=len(known))
            size = max([c for c in self.config.chunks if c <= stop - at], default=min(self.config.chunks))
            part = tokens[at : min(at + size, stop)]
            padded = np.zeros((2, 1, size), np.int32)
            padded[0, 0, : len(part)], padded[1, 0, : len(part)] = part, tokens[at + 1 : at + 1 + len(part)]
            rows, n = np.array([slot], np.int32), np.array([len(part)], np.int32)
            shown = seen and _chunk(*seen, at, size)
            self.cache = _prefill(self.model, self.weights, self.cache, padded[0], n, rows, padded[1], shown)
            at += len(part)
            self.length[slot] += len(part)
            self.prefilled += len(part)
            self.computed += size
            if at in marks:
                kept = self._keep(slot, known[:at], kept)
            yield

    def _checked(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Known tokens as an array. Raises ConfigError if they are none, or no token ids."""
        tokens = np.asarray(tokens, np.int32).reshape(-1)
        check(len(tokens) > 0, "prompt", "", "must hold at least one token: the model predicts what follows it")
        check(bool(tokens.min() >= 0 and tokens.max() < self.model.vocab_size), "prompt", int(tokens.max()),
              f"token ids must lie in [0, {self.model.vocab_size})")
        return tokens

    def _check_room(self, slot: int, n: int) -> None:
        check(n <= self.room(slot), "infer.capacity", self.cache.capacity,
              f"{n} more tokens do not fit after {self.length[slot]}; raise it")

    def _see(self, pictures: Pictures, n: int) -> tuple[np.ndarray, np.ndarray]:
        """(where features stand [n], the features there [n, D]) for the n tokens of a prompt."""
        check(self.model.vision.n_layers > 0, "model.vision.n_layers", 0, "this model was trained without pictures")
        check(int(pictures.at.max()) < n - 1, "prompt", "", "must hold text after the last picture: what it is asked")
        features = np.asarray(_features(self.model, self.weights, *pictures.padded())[0])
        where, placed = np.zeros(n, bool), np.zeros((n, features.shape[-1]), features.dtype)
        where[pictures.at], placed[pictures.at] = True, features[pictures.features]
        return where, placed

    def extend_all(self, tokens: dict[int, Sequence[int] | np.ndarray]) -> None:
        """`extend` of many slots at once: every chunk is one program over all rows of the cache.

        Past the prefix store and without multi-token prediction, both of which go sequence by sequence.
        """
        check(not self.config.speculate, "infer.speculate", True, "must be False where many slots are extended at once")
        left: dict[int, np.ndarray] = {}
        for slot, new in tokens.items():
            new = self._checked(new)
            self._check_room(slot, len(new))
            if self.pending[slot] >= 0:
                new = np.concatenate([self.pending[slot : slot + 1], new])
            self.pending[slot], left[slot] = new[-1], new[:-1]
        while longest := max(map(len, left.values()), default=0):
            size = min([c for c in self.config.chunks if c >= longest], default=max(self.config.chunks))
            padded, n = np.zeros((self.config.slots, size), np.int32), np.zeros(self.config.slots, np.int32)
            for slot, new in left.items():
                n[slot] = min(size, len(new))
                padded[slot, : n[slot]] = new[:size]
            self.cache = _prefill_all(self.model, self.weights, self.cache, padded, n)
            self.length += n
            self.prefilled += int(n.sum())
            self.computed += padded.size
            left = {slot: new[size:] for slot, new in left.items()}

    def load(self, params: PyTree, router_bias: PyTree) -> None:
        """Goes on with other weights. What the cache holds was computed with the old ones."""
        self.weights = forward.serving_weights(self.model, params, router_bias)
        self.flat = forward.flat(self.weights)

    def _reuse(self, slot: int, known: np.ndarray) -> tuple[int, set[int]]:
        """Tokens taken from the store, and the numbers of tokens after which to keep the sequence: where the prompt's
        last block ends, and where it leaves what the store has latents of but no state."""
        block = self.store.block
        entries, seen = self.store.match(known)
        for i, entry in enumerate(entries):
            self.cache = _put_block(self.cache, slot, i * block, entry.latents)
        if entries:
            self.length[slot] = len(entries) * block
            self.cache = _put_state(self.cache, slot, len(entries) * block, entries[-1].state)
        return len(entries) * block, {seen * block, len(known) // block * block}

    def _keep(self, slot: int, known: np.ndarray, kept: int) -> int:
        block = self.store.block
        blocks = [_get_block(self.cache, slot, i * block, block) for i in range(kept, len(known) // block)]
        if blocks:
            self.store.put(known, blocks, _get_state(self.cache, slot))
        return kept + len(blocks)

    def snapshot(self, slot: int) -> Snapshot:
        """A copy of the sequence that survives the slot. Its size is that of whole blocks of `prefix_block` tokens."""
        block, length = self.config.prefix_block, int(self.length[slot])
        starts = range(0, length, block)
        latents = [_get_block(self.cache, slot, min(at, self.cache.capacity - block), block) for at in starts]
        return Snapshot(length, int(self.pending[slot]), latents, _get_state(self.cache, slot))

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        """Puts a sequence into a slot, in place of what was there."""
        for i, latents in enumerate(snapshot.latents):
            at = min(i * self.config.prefix_block, self.cache.capacity - self.config.prefix_block)
            self.cache = _put_block(self.cache, slot, at, latents)
        self.cache = _put_state(self.cache, slot, snapshot.length, snapshot.state)
        self.length[slot], self.pending[slot], self.draft[slot] = snapshot.length, snapshot.pending, -1
        self.left[slot] = self.count[slot] = 0

    def score(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Log-probability in nats of every token but the first, given those before it, [len - 1]; in a slot of its own.

        Memory does not grow with the number of tokens, beyond the cache.
        """
        tokens = np.asarray(tokens, np.int32).reshape(-1)
        check(len(tokens) <= self.cache.capacity, "infer.capacity", self.cache.capacity,
              f"must be at least {len(tokens)}")
        slot, out, at = self.open(), [], 0
        while at < len(tokens) - 1:
            size = max([c for c in self.config.chunks if c <= len(tokens) - 1 - at], default=min(self.config.chunks))
            part = tokens[at : at + size + 1]
            n = min(size, len(part) - 1)
            padded = np.zeros((2, 1, size), np.int32)
            padded[0, 0, :n], padded[1, 0, :n] = part[:n], part[1 : n + 1]
            logprobs, self.cache = _score(self.model, self.weights, self.cache, padded[0], padded[1],
                                          np.array([n], np.int32), np.array([slot], np.int32))
            out.append(np.asarray(logprobs)[0, :n])
            at += n
        self.close(slot)
        return np.concatenate(out) if out else np.zeros(0, np.float32)

    # --- new tokens

    def start(self, slot: int, n_tokens: int, sampling: Sampling = Sampling(), stops: Sequence[int] = ()) -> None:
        """Lets `decode` sample up to n_tokens, ending early after a stop token, which is the last one then."""
        check(bool(self.pending[slot] >= 0), "prompt", "", "must hold at least one token: it is what is continued")
        check(n_tokens > 0, "n_tokens", n_tokens, "must be greater than 0")
        check(n_tokens <= self.room(slot), "infer.capacity", self.cache.capacity,
              f"{n_tokens} more tokens do not fit after {self.length[slot] + 1}; raise it")
        check(len(stops) <= MOST_STOPS, "stops", list(stops), f"at most {MOST_STOPS} stop tokens")
        self.left[slot], self.count[slot] = n_tokens, 0
        self.greedy &= bool(sampling.temperature <= 0)
        values = (sampling.seed & 0xFFFFFFFF, sampling.temperature, sampling.top_k, sampling.top_p)
        for array, value in zip(self.settings, values):
            array[slot] = value
        self.stops[slot] = [*stops, *[-1] * (MOST_STOPS - len(stops))]

    @property
    def running(self) -> bool:
        return bool((self.left > 0).any())

    def decode(self) -> Decoded:
        """Adds up to `steps` tokens to every started sequence, twice as many with `speculate`."""
        tokens, logprobs = self._sample()
        if self.config.speculate:
            self.proposed += int((tokens[:, ::2] >= 0).sum())
            self.accepted += int((tokens[:, 1::2] >= 0).sum())
            # rejected places go to the end
            order = np.argsort(tokens < 0, axis=1, kind="stable")
            tokens, logprobs = (np.take_along_axis(x, order, axis=1) for x in (tokens, logprobs))
        for slot in np.flatnonzero(self.left > 0):
            new = tokens[slot][tokens[slot] >= 0]
            self.length[slot] += len(new)
            self.count[slot] += len(new)
            self.pending[slot] = new[-1]
            self.left[slot] = 0 if new[-1] in self.stops[slot] else self.left[slot] - len(new)
        return Decoded(tokens, logprobs)

    def _sample(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and their log-probabilities [slots, columns], -1 and nan where a sequence had stopped."""
        run = _speculate if self.config.speculate else _decode
        tokens, logprobs, draft, self.cache = run(
            self.model, self.config.steps, self.greedy, self.flat, self.cache, self.pending.copy(), self.draft.copy(),
            self.left.copy(), self.count.copy(), jax.tree.map(np.copy, self.settings), self.stops.copy(),
        )  # fmt: skip
        self.draft = np.array(draft)
        self.computed += tokens.size
        return np.asarray(tokens), np.asarray(logprobs)


# --- programs. The cache is donated: it is updated in place.


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill(model, weights, cache, tokens_ST, n_S, rows_S, next_ST, seen=None):
    length_S = cache.length[rows_S]
    h, cache = forward.extend(model, weights, cache, tokens_ST, n_S, rows_S, seen=seen)
    return cache if cache.mtp is None else forward.extend_mtp(
        model, weights, cache, h, next_ST, n_S, length_S, rows_S
    )[1]  # fmt: skip


_features = jax.jit(forward.see, static_argnums=0)


def _chunk(where_T: np.ndarray, features_TD: np.ndarray, at: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The part of a prompt's features that a chunk holds, padded to the chunk's size."""
    part = where_T[at : at + size], features_TD[at : at + size]
    return tuple(np.pad(x, ((0, size - len(x)), *((0, 0),) * (x.ndim - 1)))[None] for x in part)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _prefill_all(model, weights, cache, tokens_BT, n_B):
    return forward.extend(model, weights, cache, tokens_BT, n_B)[1]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _score(model, weights, cache, tokens_ST, targets_ST, n_S, rows_S):
    h, cache = forward.extend(model, weights, cache, tokens_ST, n_S, rows_S)
    logp = jax.nn.log_softmax(forward.logits(model, weights, h).astype(jnp.float32), -1)
    return jnp.take_along_axis(logp, targets_ST[..., None], -1)[..., 0], cache


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _decode(model, steps, greedy, weights, cache, token_B, draft_B, left_B, count_B, settings, stops_BN):
    weights = forward.whole(weights)

    def step(carry, _):
        cache, token, left, count = carry
        runs = left > 0
        h, cache = forward.extend(model, weights, cache, token[:, None], runs.astype(jnp.int32))
        new, logprob = sample(forward.logits(model, weights, h[:, 0]), count, settings, greedy)
        stopped = (new[:, None] == stops_BN).any(-1)
        left = jnp.where(runs & ~stopped, left - 1, 0)
        out = jnp.where(runs, new, -1), jnp.where(runs, logprob, jnp.nan)
        return (cache, jnp.where(runs, new, token), left, count + runs), out

    (cache, *_), (tokens, logprobs) = jax.lax.scan(step, (cache, token_B, left_B, count_B), length=steps)
    return tokens.T, logprobs.T, draft_B, cache


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _speculate(model, steps, greedy, weights, cache, token_B, draft_B, left_B, count_B, settings, stops_BN):
    """`_decode` with two tokens a step where the proposal is right.

    The pending token and the proposal for the one after it go through the model together. The token after the pending
    one is drawn as ever, by its own noise; only if it is the proposal do the second place's logits continue the
    sequence, and a second token is drawn from them. So a proposal x is accepted with the model's own probability of x,
    a rejected one is replaced by a draw from the rest, and every token is the one that `_decode` would have drawn.
    """
    weights = forward.whole(weights)
    stops = lambda token: (token[:, None] == stops_BN).any(-1)

    def step(carry, _):
        cache, token, draft, left, count = carry
        runs, length = left > 0, cache.length
        both = jnp.stack([token, jnp.maximum(draft, 0)], 1)
        h, cache = forward.extend(model, weights, cache, both, 2 * runs.astype(jnp.int32), undecided=True)
        logits = forward.logits(model, weights, h)
        first, logp_first = sample(logits[:, 0], count, settings, greedy)
        second, logp_second = sample(logits[:, 1], count + 1, settings, greedy)
        accepted = runs & (first == draft) & ~stops(first) & (left > 1)
        n = runs.astype(jnp.int32) + accepted
        cache = forward.settle(cache, n)
        last = jnp.where(accepted, second, first)
        left = jnp.where(runs & ~stops(last), left - n, 0)
        new = jnp.stack([first, second], 1)
        h, cache = forward.extend_mtp(model, weights, cache, h, new, n, length)
        h = jnp.take_along_axis(h, jnp.maximum(n - 1, 0)[:, None, None], 1)[:, 0]
        draft = jnp.where(runs, jnp.argmax(forward.logits(model, weights, h), -1), draft).astype(jnp.int32)
        real = jnp.stack([runs, accepted], 1)
        out = jnp.where(real, new, -1), jnp.where(real, jnp.stack([logp_first, logp_second], 1), jnp.nan)
        return (cache, jnp.where(runs, last, token), draft, left, count + n), out

    carry = (cache, token_B, draft_B, left_B, count_B)
    (cache, _, draft, *_), (tokens, logprobs) = jax.lax.scan(step, carry, length=steps)
    flat = lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1)
    return flat(tokens), flat(logprobs), draft, cache


_copy = jax.jit(copy_rows, donate_argnums=0)
_clear = jax.jit(clear_rows, donate_argnums=0)


def _latents(cache):
    return cache.mla, cache.mtp


@functools.partial(jax.jit, static_argnums=3)
def _get_block(cache, row, start, size):
    one = lambda x: jax.lax.dynamic_slice(x, (row, start, 0), (1, size, x.shape[2]))[0]
    return jax.tree.map(one, _latents(cache))


@functools.partial(jax.jit, donate_argnums=0)
def _put_block(cache, row, start, latents):
    put = lambda x, b: jax.lax.dynamic_update_slice(x, b[None], (row, start, 0))
    mla, mtp = jax.tree.map(put, _latents(cache), latents)
    return cache._replace(mla=mla, mtp=mtp)


@jax.jit
def _get_state(cache, row):
    return jax.tree.map(lambda x: x[row], cache.kda)


@functools.partial(jax.jit, donate_argnums=0)
def _put_state(cache, row, length, state):
    kda = jax.tree.map(lambda x, s: x.at[row].set(s), cache.kda, state)
    return cache._replace(length=cache.length.at[row].set(length), kda=kda)

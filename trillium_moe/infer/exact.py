"""Sequences continued by the forward pass of training itself, so that both give a token the same probability.

Decoding token by token orders sums otherwise than training does. In bfloat16 the two differ by a hundredth of a nat,
and quantised experts pass every difference on enlarged. Here a token is sampled from what training computes: the last,
incomplete block of BLOCK tokens goes through the model as rows of a batch do, from the state that the blocks before it
left. No layer looks ahead, so what stands after the newest token does not matter, to the bit; and blocks begin where
those of training's kernels begin, in rows that begin with their sequence or hold it from a multiple of BLOCK on.

The price is the arithmetic of a block for every token, and keys and values made anew from all latents: for sampling
that reinforcement learning trains on, not for serving. On one device, without pictures.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trillium_moe.config import ModelConfig, check
from trillium_moe.infer.engine import Engine, EngineConfig, Snapshot
from trillium_moe.infer.pictures import Pictures
from trillium_moe.infer.sampling import sample
from trillium_moe.model.cache import Recurrent, abstract_cache, check_memory
from trillium_moe.model.context import Context
from trillium_moe.model.mla import put_rows
from trillium_moe.parallel import sharding
from trillium_moe.shapes import Array, Bool, Float, Int, PyTree
from trillium_moe.train.state import model_def

BLOCK = 128  # a multiple of what the kernels of KDA and attention take at once


class Blocks(NamedTuple):
    """What complete blocks leave, stacked over the layers of a kind. Fields are untyped: arrays or shapes."""

    kda: Recurrent | None  # leaves [L, B, ..]; None: no such layer
    mla: Any  # [L, B, C, X], or None

    @property
    def capacity(self) -> int:
        """Tokens that each sequence has room for."""
        return 1 << 30 if self.mla is None else self.mla.shape[2]

    @property
    def past(self) -> dict[str, PyTree]:
        """By kind of layer, as `Trillium.hidden` takes it."""
        return {kind: x for kind, x in self._asdict().items() if x is not None}


class ExactEngine(Engine):
    """`Engine` in blocks; `length` and `pending` as there, the open block holds the pending token as its last."""

    def _empty(self) -> Blocks:
        c = self.config
        check(sharding.current_mesh() is None, "infer.exact", True, "runs on one device, without a mesh")
        check("moe" not in self.model.ffns or not self.model.moe.capacity, "model.moe.capacity",
              self.model.moe.capacity, "must be 0 for infer.exact: which tokens are dropped hangs on their neighbours")
        shapes = abstract_cache(self.model, c.slots, -(-c.capacity // BLOCK) * BLOCK)
        stack = lambda *x: jax.ShapeDtypeStruct((len(x), *x[0].shape), x[0].dtype)
        stacked = lambda layers: jax.tree.map(stack, *layers)
        latents = [layer.values for layer in shapes.mla]
        blocks = Blocks(stacked(shapes.kda) if shapes.kda else None, stacked(latents) if latents else None)
        check_memory(shapes, jax.devices()[0])
        # tokens of the open blocks; what follows a pending one is old. Programs get copies: they may read them later
        self.block = np.zeros((c.slots, BLOCK), np.int32)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blocks)

    def load(self, params: PyTree, router_bias: PyTree) -> None:
        self.weights = params, router_bias

    def _clear(self, slot: int) -> None:
        if self.cache.kda is not None:
            kda = jax.tree.map(lambda x: x.at[:, slot].set(0), self.cache.kda)
            self.cache = self.cache._replace(kda=kda)

    def _copy(self, slot: int, copies: list[int]) -> None:
        self.cache = jax.tree.map(lambda x: x.at[:, np.array(copies)].set(x[:, slot, None]), self.cache)
        self.block[copies] = self.block[slot]

    @property
    def begins(self) -> np.ndarray:
        """Where every open block begins."""
        return (self.length // BLOCK * BLOCK).astype(np.int32)

    # --- known tokens

    def extending(self, slot: int, tokens: Sequence[int] | np.ndarray, pictures: Pictures | None = None):
        check(pictures is None, "infer.exact", True, "takes no pictures")
        tokens = self._checked(tokens)
        self._check_room(slot, len(tokens))
        for at in range(0, len(tokens), BLOCK):
            self.extend_all({slot: tokens[at : at + BLOCK]})
            yield

    def extend_all(self, tokens: dict[int, Sequence[int] | np.ndarray]) -> None:
        left = {slot: self._checked(new) for slot, new in tokens.items()}
        for slot, new in left.items():
            self._check_room(slot, len(new))
        while left:
            known = self.length + (self.pending >= 0)
            more = np.isin(np.arange(len(known)), list(left))
            full = more & (known > 0) & (known % BLOCK == 0)
            if full.any():
                self.cache = _seal(self.model, self.weights, self.cache, self.block.copy(), self.begins, full)
                self.prefilled += BLOCK * int(full.sum())
                self.computed += self.block.size
            for slot, new in left.items():
                at = int(known[slot]) % BLOCK
                part = new[: BLOCK - at]
                self.block[slot, at : at + len(part)] = part
                self.length[slot], self.pending[slot] = known[slot] + len(part) - 1, part[-1]
            left = {slot: rest for slot, new in left.items() if len(rest := new[BLOCK - int(known[slot]) % BLOCK :])}

    def snapshot(self, slot: int) -> Snapshot:
        kda = jax.tree.map(lambda x: x[:, slot], self.cache.kda)
        latents = [] if self.cache.mla is None else [self.cache.mla[:, slot]]
        return Snapshot(int(self.length[slot]), int(self.pending[slot]), latents, (kda, self.block[slot].copy()))

    def restore(self, slot: int, snapshot: Snapshot) -> None:
        kda, self.block[slot] = snapshot.state
        put = lambda x, row: x.at[:, slot].set(row)
        mla = put(self.cache.mla, snapshot.latents[0]) if snapshot.latents else None
        self.cache = Blocks(jax.tree.map(put, self.cache.kda, kda), mla)
        self.length[slot], self.pending[slot] = snapshot.length, snapshot.pending
        self.left[slot] = self.count[slot] = 0

    def score(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        tokens = self._checked(tokens)
        check(len(tokens) <= self.cache.capacity, "infer.capacity", self.cache.capacity,
              f"must be at least {len(tokens)}")
        slot, out = self.open(), []
        for at in range(0, len(tokens) - 1, BLOCK):
            self.extend_all({slot: tokens[at : at + BLOCK]})
            following, targets = tokens[at + 1 :][:BLOCK], np.zeros_like(self.block)
            targets[slot, : len(following)] = following
            logprobs = _score(self.model, self.weights, self.cache, self.block.copy(), self.begins, targets)
            out.append(np.asarray(logprobs)[slot, : len(following)])
        self.close(slot)
        return np.concatenate(out) if out else np.zeros(0, np.float32)

    # --- new tokens

    def _sample(self) -> tuple[np.ndarray, np.ndarray]:
        tokens, logprobs, block, self.cache = _decode(
            self.model, self.config.steps, self.greedy, self.weights, self.cache, self.block.copy(),
            self.length.astype(np.int32), self.left.copy(), self.count.copy(), jax.tree.map(np.copy, self.settings),
            self.stops.copy(),
        )  # fmt: skip
        self.block = np.array(block)
        self.computed += self.config.steps * self.block.size
        return np.asarray(tokens), np.asarray(logprobs)


def make_engine(
    model: ModelConfig, params: PyTree, router_bias: PyTree, config: EngineConfig = EngineConfig()
) -> Engine:
    """The engine that `config` asks for; arguments and errors as of `Engine`."""
    return (ExactEngine if config.exact else Engine)(model, params, router_bias, config)


# --- programs


def _forward(model, weights, cache, block_BT, start_B) -> tuple[nnx.Module, Float[Array, "B T D"], dict]:
    """The model, normed hidden states of the open blocks, and what mixers give of them."""
    trained = nnx.merge(model_def(model)[0], *weights)
    h, aux = trained.hidden(block_BT, Context(start=start_B), past=cache.past)
    return trained, h, aux


def _sealed(cache: Blocks, aux: dict, start_B: Int[Array, " B"], full_B: Bool[Array, " B"]) -> Blocks:
    """The cache with the open blocks of some sequences. Latents of others are written again before they are read."""
    kda, mla = cache
    if kda is not None:
        full = lambda x: full_B.reshape(1, -1, *[1] * (x.ndim - 2))
        kda = jax.tree.map(lambda old, new: jnp.where(full(old), new.astype(old.dtype), old), kda, aux["kda"]["past"])
    if mla is not None:
        mla = jax.vmap(put_rows, (0, 0, None))(mla, aux["mla"]["past"], start_B)
    return Blocks(kda, mla)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _seal(model, weights, cache, block_BT, start_B, full_B):
    return _sealed(cache, _forward(model, weights, cache, block_BT, start_B)[2], start_B, full_B)


@functools.partial(jax.jit, static_argnums=0)
def _score(model, weights, cache, block_BT, start_B, targets_BT):
    trained, h, _ = _forward(model, weights, cache, block_BT, start_B)
    logp = jax.nn.log_softmax(trained.logits(h).astype(jnp.float32), -1)
    return jnp.take_along_axis(logp, targets_BT[..., None], -1)[..., 0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _decode(model, steps, greedy, weights, cache, block_BT, length_B, left_B, count_B, settings, stops_BN):
    rows = jnp.arange(len(length_B))

    def step(carry, _):
        cache, block, length, left, count = carry
        runs, at = left > 0, length % BLOCK
        trained, h, aux = _forward(model, weights, cache, block, length - at)
        new, logprob = sample(trained.logits(h[rows, at]), count, settings, greedy)
        stopped = (new[:, None] == stops_BN).any(-1)
        cache = _sealed(cache, aux, length - at, runs & (at == BLOCK - 1))
        length = length + runs
        place = length % BLOCK
        block = block.at[rows, place].set(jnp.where(runs, new, block[rows, place]))
        left = jnp.where(runs & ~stopped, left - 1, 0)
        out = jnp.where(runs, new, -1), jnp.where(runs, logprob, jnp.nan)
        return (cache, block, length, left, count + runs), out

    carry = (cache, block_BT, length_B, left_B, count_B)
    (cache, block, *_), (tokens, logprobs) = jax.lax.scan(step, carry, length=steps)
    return tokens.T, logprobs.T, block, cache

"""A store of prefixes: what the cache holds after tokens that were seen before.

A prefix is reusable only where the latents of every MLA layer and the state of every KDA layer exist for the same
number of tokens (model.md 3.4). Tokens are hashed in blocks, each with the hash of the block before, so equal hashes
mean equal histories. An entry holds one block's latents of all MLA layers and, at some boundaries, the state of all KDA
layers at its end: `match` finds the longest chain of entries that ends in one with a state. An entry moves, and goes,
with all its layers at once.

Entries lie on the device up to `device_bytes`, beyond that in host memory up to `host_bytes`; the least recently used
go first. A chain's older blocks count as used after its newer ones, so a block never outlives what it continues.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from trillium_moe.config import check
from trillium_moe.model.cache import nbytes


@dataclass
class Entry:
    """One block of one prefix. Arrays of JAX while on the device, of numpy while in host memory."""

    tokens: np.ndarray
    latents: Any  # per MLA layer
    state: Any = None  # per KDA layer, after the block's last token
    on_device: bool = True

    @property
    def bytes(self) -> int:
        return nbytes((self.latents, self.state))


@dataclass
class PrefixStore:
    """See the module. Not for several threads at once."""

    block: int  # tokens
    device_bytes: int
    host_bytes: int = 0
    hits: int = 0  # tokens that did not have to be computed
    misses: int = 0  # tokens that had to
    _entries: OrderedDict = field(default_factory=OrderedDict)  # by hash, least recently used first

    def __post_init__(self):
        check(self.block > 0, "infer.prefix_block", self.block, "must be greater than 0")
        check(self.device_bytes >= 0, "infer.prefix_bytes", self.device_bytes, "must be 0 (off) or positive")
        check(self.host_bytes >= 0, "infer.prefix_host_bytes", self.host_bytes, "must be 0 (off) or positive")

    def match(self, tokens: np.ndarray) -> tuple[list[Entry], int]:
        """The longest chain of whole blocks that begins `tokens` and ends with a state, on the device.

        And the number of leading blocks that are in the store, with or without a state.
        """
        keys = self._chain(tokens)
        found = []
        for i, key in enumerate(keys):
            entry = self._entries.get(key)
            block = tokens[i * self.block : (i + 1) * self.block]
            if entry is None or not np.array_equal(entry.tokens, block):
                break
            found.append(entry)
        seen = len(found)
        while found and found[-1].state is None:
            found.pop()
        for key, entry in reversed(list(zip(keys, found))):
            self._entries.move_to_end(key)
            if not entry.on_device:
                entry.latents, entry.state = jax.device_put((entry.latents, entry.state))
                entry.on_device = True
        self.hits += len(found) * self.block
        self.misses += len(tokens) - len(found) * self.block
        self._make_room()
        return found, seen

    def put(self, tokens: np.ndarray, latents: list[Any], state: Any) -> None:
        """Keeps a prefix of whole blocks.

        Args:
          latents: of the last len(latents) blocks; the earlier ones are in the store.
          state: of the KDA layers after the last token.
        """
        keys = self._chain(tokens)
        first = len(keys) - len(latents)
        for i, (key, block) in enumerate(zip(keys[first:], latents), first):
            if key not in self._entries:
                self._entries[key] = Entry(tokens[i * self.block : (i + 1) * self.block].copy(), block)
        last = self._entries[keys[-1]]
        if last.state is None:
            last.state = state if last.on_device else jax.device_get(state)
        for key in reversed(keys):
            if key in self._entries:
                self._entries.move_to_end(key)
        self._make_room()

    def usage(self) -> tuple[int, int]:
        """Bytes on the device and in host memory."""
        held = [(e.on_device, e.bytes) for e in self._entries.values()]
        return sum(b for on, b in held if on), sum(b for on, b in held if not on)

    def __len__(self) -> int:
        return len(self._entries)

    def _chain(self, tokens: np.ndarray) -> list[bytes]:
        key, keys = b"", []
        for i in range(len(tokens) // self.block):
            block = np.ascontiguousarray(tokens[i * self.block : (i + 1) * self.block], np.int32)
            key = hashlib.blake2b(key + block.tobytes(), digest_size=16).digest()
            keys.append(key)
        return keys

    def _make_room(self) -> None:
        device, host = self.usage()
        for entry in list(self._entries.values()):
            if device <= self.device_bytes:
                break
            if entry.on_device:
                size = entry.bytes
                entry.latents, entry.state = jax.device_get((entry.latents, entry.state))
                entry.on_device = False
                device, host = device - size, host + size
        for key, entry in list(self._entries.items()):
            if host <= self.host_bytes:
                break
            if not entry.on_device:
                host -= entry.bytes
                del self._entries[key]

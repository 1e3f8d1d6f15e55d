"""A tokenizer for short task messages: bytes, the special tokens, and one id for each word of a closed list.

A word carries the space before it, so that " read_page 17" is two tokens and decoding is concatenation. Text outside
the list falls back to bytes: nothing is unencodable, and the parser sees whatever was sampled.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import numpy as np

from trillium_moe.data.tokenizer import ByteTokenizer
from trillium_moe.shapes import Int

TOPICS = ("apple", "bread", "cloud", "drum", "eagle", "flute", "grape", "horse", "iron", "jade", "kite", "lemon",
          "moon", "nest", "olive", "pearl", "quill", "rose", "salt", "tulip")  # fmt: skip
NAMES = ("alpha", "beta", "gamma", "delta", "omega", "sigma", "theta", "zeta")
OPS = ("inc", "dec", "double", "square", "negate", "add5", "times3", "minus7")
CHANNELS = ("think", "response", "tools", "system", "user", "result")
PLAIN = (
    "effort", "low", "high", "max", "error", "none", "find", "index", "read_page", "page", "number", "value",
    "largest", "read", "doc", "of", "get", "key", "follow", "hops", "calc", "start", "plus", "times", "a", "op",
    "b", "move", "to", "way", "north", "east", "south", "west", "at", "open", "found", "guess", "higher", "lower",
    "equal", "blue", "red", "shelf", "box", "is", "fetch", "busy", "stale", "fresh", "probe", "check", "passed",
    "program", "next", "note", "end", "until", "left", "calls", "first", "second",
)  # fmt: skip
N_NUMBERS = 100
WORDS = (*CHANNELS, *(str(i) for i in range(N_NUMBERS)), *PLAIN, *TOPICS, *NAMES, *OPS)
assert len(set(WORDS)) == len(WORDS)


class WordTokenizer(ByteTokenizer):
    """Bytes and special tokens as in `ByteTokenizer`, then one id per word of WORDS."""

    first = ByteTokenizer.vocab_size
    vocab_size = first + len(WORDS)
    token_bytes = np.concatenate([ByteTokenizer.token_bytes, [1 + len(w) for w in WORDS]]).astype(np.int32)
    fingerprint = "words-" + hashlib.sha256(" ".join(WORDS).encode()).hexdigest()[:16]
    ids = {f" {word}": i for i, word in enumerate(WORDS, ByteTokenizer.vocab_size)}
    _pieces = re.compile(r" [^ ]+| ")

    @classmethod
    def word(cls, word: str) -> int:
        """Id of a word of the list."""
        return cls.ids[f" {word}"]

    def encode(self, text: str | bytes) -> Int[np.ndarray, "n"]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        out: list[int] = []
        at = 0
        for piece in self._pieces.finditer(text):
            out += text[at : piece.start()].encode("utf-8", "replace")
            id = self.ids.get(piece.group())
            out += [id] if id is not None else piece.group().encode("utf-8", "replace")
            at = piece.end()
        out += text[at:].encode("utf-8", "replace")
        return np.array(out, np.int32)

    def decode_bytes(self, ids: Any) -> bytes:
        out = bytearray()
        for i in np.asarray(ids, np.int64).reshape(-1).tolist():
            if i < 256:
                out.append(i)
            elif self.first <= i < self.vocab_size:
                out += f" {WORDS[i - self.first]}".encode()
        return bytes(out)

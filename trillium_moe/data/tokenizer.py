"""Text to token ids and back, without loss, with sixteen special tokens.

`ByteTokenizer` needs no training: ids 0-255 are bytes. `BPETokenizer` is byte-level byte-pair encoding through
`tokenizers`. Both map ordinary text to ordinary ids only: "<|eos|>" written in a document stays text.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
from etils import epath

from trillium_moe.config import ConfigError, DataConfig, check
from trillium_moe.data.chat import ChatFormat
from trillium_moe.data.packing import permute
from trillium_moe.data.sources import Source, make_source
from trillium_moe.shapes import Int

# eos ends a document; [open] .. [end_of_msg] are the structure of a chat template; <|image|> stands for image features
SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>", "[open]", "[sep]", "[close]", "[end_of_msg]", "<|image|>", "<|think|>",
            "<|/think|>", *(f"<|reserved_{i}|>" for i in range(6)))

# names of the same tokens in published tokenizer.json files
_ALIASES = {
    "<|pad|>": ("[PAD]", "<pad>", "<|pad_id|>", "<|PAD|>"),
    "<|bos|>": ("[BOS]", "<s>", "<bos>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>"),
    "<|eos|>": ("[EOS]", "</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
}

_TRAINING_BYTES = 64 << 20  # text a BPE is trained on: merges are stable well before, and memory stays bounded


class Tokenizer:
    """What every tokenizer has.

    Attributes:
      vocab_size: number of ids, special tokens included.
      specials: id of every name in SPECIALS.
      token_bytes: [vocab_size] int32, UTF-8 bytes each id stands for; 0 for special tokens. With `weights` and
        `targets` of a batch, the bytes predicted are sum(token_bytes[targets] * weights).
      fingerprint: hash of everything that determines `encode`.
    """

    vocab_size: int
    specials: dict[str, int]
    token_bytes: Int[np.ndarray, "vocab"]
    fingerprint: str
    chat: ChatFormat = ChatFormat()

    @property
    def special_ids(self) -> dict[str, int]:
        """Ids of all special tokens by name; a `ChatFormat` is written in these."""
        return self.specials

    @property
    def pad_id(self) -> int:
        return self.specials["<|pad|>"]

    @property
    def bos_id(self) -> int:
        return self.specials["<|bos|>"]

    @property
    def eos_id(self) -> int:
        return self.specials["<|eos|>"]

    def encode(self, text: str | bytes) -> Int[np.ndarray, "n"]:
        """Ids of the text, int32, without begin or end tokens.

        A subclass for documents with parts that carry no loss may return (ids, mask), mask bool [n].
        """
        raise NotImplementedError

    def decode(self, ids: Any) -> str:
        """The text of a sequence of ids. Special tokens vanish; bytes that are not UTF-8 become U+FFFD."""
        raise NotImplementedError

    def num_bytes(self, ids: Any) -> int:
        """UTF-8 bytes that the ids stand for."""
        return int(self.token_bytes[np.asarray(ids, np.int64)].sum())


class ByteTokenizer(Tokenizer):
    """Bytes as ids 0-255, special tokens 256-271."""

    vocab_size = 256 + len(SPECIALS)
    specials = {name: 256 + i for i, name in enumerate(SPECIALS)}
    token_bytes = np.repeat(np.array([1, 0], np.int32), [256, len(SPECIALS)])
    fingerprint = "byte"

    def encode(self, text: str | bytes) -> Int[np.ndarray, "n"]:
        # a lone surrogate (JSON can hold one) is not text and becomes "?"
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, ids: Any) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Any) -> bytes:
        """The exact bytes; special tokens vanish."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        return ids[ids < 256].astype(np.uint8).tobytes()


def read_backend(path: epath.PathLike) -> Any:
    """A `tokenizers.Tokenizer` from a byte-level tokenizer.json. Raises ConfigError for anything else."""
    from tokenizers import Tokenizer as Backend

    path = epath.Path(path).expanduser()
    check(path.exists(), "data.tokenizer", str(path), "no such file; use byte, bpe or the path of a tokenizer.json")
    try:
        backend = Backend.from_str(path.read_text())
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"config data.tokenizer={str(path)!r}: not a tokenizer.json ({error})") from None
    check("ByteLevel" in json.dumps(json.loads(backend.to_str())["decoder"]), "data.tokenizer", str(path),
          "not byte-level, so bytes per token would not be exact; use a byte-level BPE (as GPT-2, Llama 3, Qwen)")
    return backend


class BPETokenizer(Tokenizer):
    """Byte-level BPE from a `tokenizer.json`. Special tokens that the file lacks get ids after its own.

    Raises:
      ConfigError: if the file is missing, is not a tokenizer, or is not byte-level, in which case neither the round
        trip nor the bytes per token would be exact.
    """

    def __init__(self, path: epath.PathLike):
        self._take(read_backend(path), {}, add=True)

    def _take(self, backend: Any, given: dict[str, str], add: bool) -> None:
        """Encodes with `backend`. given: names of SPECIALS in it; add: give an id to those that it lacks."""
        from tokenizers import pre_tokenizers

        known = backend.get_vocab(with_added_tokens=True)
        names = {s: next((a for a in (s, *_ALIASES.get(s, ())) if a in known), s) for s in SPECIALS} | given
        if not add:
            names = {s: name for s, name in names.items() if name in known}
        backend.add_special_tokens(list(names.values()))
        backend.encode_special_tokens = True  # special tokens spelled out in a text are text
        vocab = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        self.vocab_size = max(vocab.values()) + 1
        self.specials = {s: vocab[name] for s, name in names.items()}
        self.token_bytes = np.zeros(self.vocab_size, np.int32)
        for token, i in vocab.items():
            if not (i in added and added[i].special):
                # one character of the byte alphabet stands for one byte; added tokens are plain text
                self.token_bytes[i] = len(token) if set(token) <= alphabet and i not in added else len(token.encode())
        self.fingerprint = hashlib.sha256(backend.to_str().encode()).hexdigest()
        self._backend = backend

    @classmethod
    def train(cls, documents: Iterable[str], vocab_size: int, path: epath.PathLike) -> BPETokenizer:
        """Trains on the documents and writes `path`. The same documents give the same file, whatever the threads.

        Args:
          vocab_size: ids in all, at least 272 (bytes and special tokens); a small text may yield fewer.
        """
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers, trainers

        check(vocab_size >= 256 + len(SPECIALS), "data.bpe_vocab", vocab_size,
              f"must be at least {256 + len(SPECIALS)} (256 bytes and {len(SPECIALS)} special tokens)")
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.train_from_iterator(documents, trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=list(SPECIALS), show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
        path = epath.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # written aside and moved: another process sees no file or a whole one
        part = path.with_name(f"{path.name}.{os.getpid()}")
        part.write_text(backend.to_str(pretty=True))
        part.replace(path)
        return cls(path)

    def encode(self, text: str | bytes) -> Int[np.ndarray, "n"]:
        data = text.encode("utf-8", "replace") if isinstance(text, str) else text
        return np.array(self._backend.encode(data.decode("utf-8", "replace"), add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Any) -> str:
        ids = np.asarray(ids, np.int64).reshape(-1)
        return self._backend.decode(ids[ids < self.vocab_size].tolist(), skip_special_tokens=True)


def make_tokenizer(data: DataConfig, workdir: epath.PathLike = "") -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: byte, bpe, a tokenizer.json, a tiktoken model file, or the directory
    of a released checkpoint.

    `bpe` is trained on the training split the first time and kept as `workdir/tokenizer.json`, which resuming,
    evaluation and generation read again.

    Raises:
      ConfigError: for a file that is missing or unusable, or `bpe` without a workdir.
    """
    if data.tokenizer == "byte":
        return ByteTokenizer()
    if data.tokenizer != "bpe":
        path = epath.Path(data.tokenizer).expanduser()
        if path.is_dir() or path.suffix in (".model", ".tiktoken"):
            from trillium_moe.interop.tokenizers import ReleasedTokenizer

            return ReleasedTokenizer(str(path))
        return BPETokenizer(path)
    check(os.fspath(workdir) != "", "data.tokenizer", "bpe", "needs a run directory to keep tokenizer.json in")
    path = epath.Path(workdir) / "tokenizer.json"
    if path.exists():
        return BPETokenizer(path)
    return BPETokenizer.train(_sample(make_source(data).split(data.heldout)[0]), data.bpe_vocab, path)


def _sample(documents: Source) -> Iterable[str]:
    """Documents in a fixed random order, up to the training budget."""
    seen = 0
    for i in range(len(documents)):
        text = documents[permute(i, len(documents), 0)]
        yield text
        seen += len(text)
        if seen >= _TRAINING_BYTES:
            return

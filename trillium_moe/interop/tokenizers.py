"""Tokenizers of released checkpoints: tokenizer.json, or a tiktoken model file with tokenizer_config.json beside it.

Both run in `tokenizers`. Special tokens are those of the files, none is added: the model has rows for those ids only.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from trillium_moe.config import ConfigError, check
from trillium_moe.data.chat import chat_format
from trillium_moe.data.tokenizer import BPETokenizer, read_backend
from trillium_moe.interop.safetensors import read_json

RESERVED = 256  # ids after those of a tiktoken file that are special tokens

_CASED = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_CASED}", rf"[\p{{Ll}}{_CASED}"
_ENDING = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# how Kimi's files split text before merging: Han runs, words of the other scripts, numbers by three, signs, spaces
PATTERN = "|".join([
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])


class ReleasedTokenizer(BPETokenizer):
    """The tokenizer in a checkpoint's directory, or of one file of it.

    Raises:
      ConfigError: there is none, or it is damaged or not byte-level, or a special token that the files name is missing.
    """

    def __init__(self, path: str | Path):
        path = Path(path).expanduser()
        directory = path if path.is_dir() else path.parent
        if path.is_dir():
            names = [n for n in ("tokenizer.json", "tiktoken.model") if (path / n).is_file()]
            check(bool(names), "data.tokenizer", str(path), "no tokenizer.json or tiktoken.model in this directory")
            path = path / names[0]
        config = read_json(f) if (f := directory / "tokenizer_config.json").is_file() else {}
        if path.suffix == ".json":
            backend = read_backend(path)
        else:
            backend = tiktoken(path, config.get("added_tokens_decoder", {}))
        added = backend.get_added_tokens_decoder()
        special_ids = {token.content: i for i, token in added.items() if token.special}
        names = {}
        for ours, key in (("<|pad|>", "pad_token"), ("<|bos|>", "bos_token"), ("<|eos|>", "eos_token")):
            name = config.get(key)
            name = name.get("content") if isinstance(name, dict) else name
            if name is not None:
                check(name in special_ids, f"{directory}/tokenizer_config.json {key}", name,
                      "is not a special token of the tokenizer")
                names[ours] = name
        self._take(backend, names, add=False)
        check("<|eos|>" in self.specials, f"{directory}/tokenizer_config.json eos_token", config.get("eos_token"),
              "must name the special token that ends a text")
        image = (read_json(f) if (f := directory / "config.json").is_file() else {}).get("media_placeholder_token_id")
        if type(image) is int and 0 <= image < self.vocab_size:
            self.specials["<|image|>"] = image
        for name in ("<|pad|>", "<|bos|>", "<|image|>"):  # a tokenizer without them fills with what ends a text
            self.specials.setdefault(name, self.eos_id)
        self._special_ids = special_ids | self.specials
        own = directory / "chat_format.json"
        self.chat = chat_format(str(own), self.special_ids, read_json(own) if own.is_file() else None)

    @property
    def special_ids(self) -> dict[str, int]:
        return self._special_ids


def tiktoken(path: Path, added: dict[str, Any]) -> Backend:
    """The tokenizer of a tiktoken model file: a line for each token, its bytes in base64 and its rank.

    Args:
      added: id -> {"content": name} of the special tokens that have one; of the `RESERVED` ids after the file's, others
        are named <|reserved_token_ID|>.
    """
    check(path.is_file(), "data.tokenizer", str(path), "no such file; name a tokenizer.json or a tiktoken model file")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ConfigError(f"{path}: line {number} is not a token in base64 and its rank") from None
    n = len(ranks)
    if sorted(ranks.values()) != list(range(n)) or any(bytes([b]) not in ranks for b in range(256)):
        raise ConfigError(f"{path}: ranks must be 0 to the number of tokens, each once, and every byte a token")
    letters = _byte_letters()
    spelled = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [(rank, ranks[a], ranks[b], spelled[a], spelled[b]) for a, b in known]
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    # a piece that is a token is that token, whatever merges would make of it
    model = models.BPE(vocab=vocab, merges=[m[3:] for m in sorted(merges)], ignore_merges=True)
    backend = Backend(model)
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False,
                                                                                   use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    names = {i: f"<|reserved_token_{i}|>" for i in range(n, n + RESERVED)}
    for i, token in added.items():
        content = token.get("content") if isinstance(token, dict) else None
        ok = isinstance(i, str) and i.isdigit() and int(i) in names and isinstance(content, str)
        check(ok, f"{path.parent}/tokenizer_config.json added_tokens_decoder {i}", content,
              f"must be an id from {n} to {n + RESERVED - 1} and a name")
        names[int(i)] = content
    twice = len(set(names.values())) < RESERVED or any(name in vocab for name in names.values())
    check(not twice, f"{path.parent}/tokenizer_config.json", "added_tokens_decoder", "gives two ids the same name")
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names.values()])
    return backend


def _byte_letters() -> list[str]:
    """The letter that byte-level BPE writes for each byte: itself where it can be printed, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    codes = {b: b for b in printable} | {b: 256 + i for i, b in enumerate(others)}
    return [chr(codes[b]) for b in range(256)]

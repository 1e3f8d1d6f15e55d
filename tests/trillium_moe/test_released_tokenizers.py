"""Tokenizers from the files of releases: tokenizer.json, tiktoken model files, special tokens, chat formats."""

import base64
import json
import random

import numpy as np
import pytest

from trillium_moe.config import ConfigError, DataConfig
from trillium_moe.data import ByteTokenizer
from trillium_moe.data.chat import ChatFormat, chat_format
from trillium_moe.data.tokenizer import BPETokenizer, make_tokenizer
from trillium_moe.infer.chat import chat_parts
from trillium_moe.interop.tokenizers import PATTERN, ReleasedTokenizer

TEXTS = ("def f(x):\n\treturn x + 12345  # three\r\n\n", "it's I'LL we'Ve don't", "汉字和 kana かな、mixed漢字text",
         "  lead and trail  ", "naïve café ÀÉÎ", "🙂 a\u0000b \u2028", "MixedCASE words HTTPServer",
         "<|im_end|> [EOS] is text", "")  # fmt: skip
SPECIAL = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|im_system|>": 10,
           "<|im_middle|>": 17, "[PAD]": 255}


def ranks_of(n: int) -> dict[bytes, int]:
    """Byte-pair ranks trained by the definition on this file and some other scripts: the commonest pair is merged."""
    text = open(__file__, "rb").read().decode().replace('"', "") + " ".join(TEXTS[:7]) * 20
    words = [[bytes([b]) for b in w.encode()] for w in text.replace("\n", " ").split(" ")]
    ranks = {bytes([b]): b for b in range(256)}
    while len(ranks) < n:
        counts: dict = {}
        for w in words:
            for pair in zip(w, w[1:]):
                counts[pair] = counts.get(pair, 0) + 1
        a, b = max(counts, key=lambda p: (counts[p], p))
        ranks[a + b] = len(ranks)
        for w in words:
            i = 0
            while i < len(w) - 1:
                if w[i] == a and w[i + 1] == b:
                    w[i : i + 2] = [a + b]
                i += 1
    return ranks


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """A directory with a tiktoken model file of 400 tokens, and its ranks."""
    directory = tmp_path_factory.mktemp("kimi")
    ranks = ranks_of(400)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    added = {str(400 + i): {"content": name, "special": True} for name, i in SPECIAL.items()}
    (directory / "tokenizer_config.json").write_text(json.dumps({
        "added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": {"content": "[EOS]"}, "pad_token": "[PAD]",
        "chat_template": "{{ '' + ''.__class__ }}", "tokenizer_class": "TikTokenTokenizer"}))
    return directory, ranks


def by_definition(ranks: dict[bytes, int], piece: bytes) -> list[int]:
    """Byte-pair encoding of one piece: of all neighbours merge those of the lowest rank, the first of equals."""
    parts = [bytes([b]) for b in piece]
    while len(parts) > 1:
        found = [(ranks.get(a + b, len(ranks)), i) for i, (a, b) in enumerate(zip(parts, parts[1:]))]
        rank, i = min(found)
        if rank == len(ranks):
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [ranks[p] for p in parts]


def test_a_tiktoken_file_encodes_by_its_ranks(kimi):
    directory, ranks = kimi
    tokenizer = ReleasedTokenizer(directory)
    assert tokenizer.vocab_size == 400 + 256
    for text in TEXTS:
        ids = tokenizer.encode(text)
        pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
        want = [i for _, (a, b) in pieces for i in by_definition(ranks, text[a:b].encode())]
        assert ids.tolist() == want and tokenizer.decode(ids) == text
        assert tokenizer.num_bytes(ids) == len(text.encode())
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (401, 400, 655)
    assert tokenizer.special_ids["<|reserved_token_405|>"] == 405


@pytest.mark.parametrize("text, pieces", [
    ("don't I'LL", ["don't", " I'LL"]),
    ("HTTPServer x", ["HTTPServer", " x"]),
    ("汉字ab字", ["汉字", "ab", "字"]),
    ("12345", ["123", "45"]),
    ("a  b\n\n c", ["a", " ", " b", "\n\n", " c"]),
    ("f(x):\n", ["f", "(x", "):\n"]),
])
def test_how_text_is_split(text, pieces, kimi):
    found = ReleasedTokenizer(kimi[0])._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[a:b] for _, (a, b) in found] == pieces


def test_equals_tiktoken(kimi):
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    directory, ranks = kimi
    theirs = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    mine, rng = ReleasedTokenizer(directory), random.Random(0)
    letters = "ab eE tT\n\r'sS1234.,()_-é汉字かÀ\t  " + "".join(map(chr, range(0x2000, 0x2010)))
    for text in (*TEXTS, *("".join(rng.choices(letters, k=rng.randrange(60))) for _ in range(2000))):
        assert mine.encode(text).tolist() == theirs.encode_ordinary(text), repr(text)


def test_a_tokenizer_json_keeps_its_own_ids(tmp_path):
    made = BPETokenizer.train(["some text to train on " * 9, "and more"], 300, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[close]"}))
    tokenizer = make_tokenizer(DataConfig(tokenizer=str(tmp_path)))
    assert isinstance(tokenizer, ReleasedTokenizer) and tokenizer.vocab_size == made.vocab_size
    np.testing.assert_array_equal(tokenizer.encode("some text"), made.encode("some text"))
    assert tokenizer.eos_id == made.specials["[close]"] and tokenizer.bos_id == made.bos_id


def test_chat_formats(kimi):
    tokenizer = ReleasedTokenizer(kimi[0])
    special, text = tokenizer.special_ids, lambda s: tokenizer.encode(s).tolist()
    messages = [{"role": "system", "content": "be <|im_end|>"}, {"role": "tool", "content": "x"}]
    assert sum(chat_parts(tokenizer, messages), []) == [
        special["<|im_system|>"], *text("system"), special["<|im_middle|>"], *text("be <|im_end|>"),
        special["<|im_end|>"],
        special["<|im_system|>"], *text("tool"), special["<|im_middle|>"], *text("x"), special["<|im_end|>"],
        special["<|im_assistant|>"], *text("assistant"), special["<|im_middle|>"]]  # fmt: skip
    assert tokenizer.chat.stop_ids(tokenizer) == [special["<|im_end|>"]]
    byte = ByteTokenizer()
    mark, text = byte.specials, lambda s: byte.encode(s).tolist()
    assert sum(chat_parts(byte, [{"role": "user", "content": "[sep]"}]), []) == [
        byte.bos_id, mark["[open]"], *text("user"), mark["[sep]"], *text("[sep]"), mark["[end_of_msg]"],
        mark["[open]"], *text("assistant"), mark["[sep]"]]  # fmt: skip


def test_a_chat_format_from_a_file(kimi, tmp_path):
    directory, _ = kimi
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    own = {"begin": ["[BOS]"], "message": ["{role}: ", "{content}", "[EOS]"], "answer": ["assistant: "],
           "stops": ["[EOS]"]}
    (tmp_path / "chat_format.json").write_text(json.dumps(own))
    tokenizer = ReleasedTokenizer(tmp_path)
    ids = sum(chat_parts(tokenizer, [{"role": "user", "content": "hi"}]), [])
    text = lambda s: tokenizer.encode(s).tolist()
    assert ids == [400, *text("{role}: "), *text("hi"), 401, *text("assistant: ")]
    for change, says in (({"messages": []}, "did you mean 'message'"), ({"stops": ["[NO]"]}, "not a special token"),
                         ({"begin": "x"}, "list of texts"), ({"message": ["{role}"]}, "{content} once")):
        with pytest.raises(ConfigError, match=says):
            chat_format("chat_format.json", tokenizer.special_ids, change)
    assert chat_format("", {"[open]": 3}) == ChatFormat()


@pytest.mark.parametrize("change, says", [
    (lambda d: (d / "tiktoken.model").write_text("IQ== 0\n"), "every byte a token"),
    (lambda d: (d / "tiktoken.model").write_text("?? 0\n"), "line 1"),
    (lambda d: (d / "tiktoken.model").write_text("IQ==\n"), "line 1"),
    (lambda d: (d / "tiktoken.model").unlink(), "no tokenizer.json or tiktoken.model"),
    (lambda d: (d / "tokenizer_config.json").write_text("{"), "not JSON"),
    (lambda d: (d / "tokenizer_config.json").write_text('{"eos_token": "[NO]"}'), "not a special token"),
    (lambda d: (d / "tokenizer_config.json").write_text('{}'), "must name the special token that ends"),
    (lambda d: (d / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"3": {"content": "x"}}}'),
     "an id from 400 to 655"),
])
def test_damaged_files(change, says, kimi, tmp_path):
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((kimi[0] / name).read_bytes())
    change(tmp_path)
    with pytest.raises(ConfigError, match=says) as raised:
        ReleasedTokenizer(tmp_path)
    assert "\n" not in str(raised.value)

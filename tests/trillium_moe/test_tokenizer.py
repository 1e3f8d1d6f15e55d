"""Tokenizers: exact round trips, special tokens, bytes per token."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from trillium_moe.config import ConfigError, DataConfig
from trillium_moe.data import SPECIALS, BPETokenizer, ByteTokenizer, make_tokenizer

TEXTS = ["def add(a, b):\n    return a + b\n" * 5, "The quick brown fox; äöü 三 🙂 jumps.\t" * 5, "x = {1: 2}\n" * 9]
text = st.text(alphabet=st.characters(exclude_categories=["Cs"]))  # no lone surrogates: they are not text


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return BPETokenizer.train(TEXTS, 320, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


def test_special_tokens(bpe):
    assert len(SPECIALS) == len(set(SPECIALS)) == 16
    byte = ByteTokenizer()
    assert (byte.vocab_size, byte.pad_id, byte.bos_id, byte.eos_id) == (272, 256, 257, 258)
    assert byte.specials["<|image|>"] == 263 and list(byte.specials.values()) == list(range(256, 272))
    for tokenizer in (byte, bpe):
        ids = list(tokenizer.specials.values())
        assert len(set(ids)) == 16 and tokenizer.num_bytes(ids) == 0 and tokenizer.decode(ids) == ""
        assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)


@settings(deadline=None)
@given(st.one_of(text, st.sampled_from(SPECIALS), st.sampled_from(TEXTS)))
def test_round_trip_of_text(bpe, s):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(s)
        assert ids.dtype == np.int32 and tokenizer.decode(ids) == s
        assert tokenizer.num_bytes(ids) == len(s.encode())
        assert not set(ids.tolist()) & set(tokenizer.specials.values())  # spelled out, a special token is text


@given(st.binary())
def test_round_trip_of_bytes(data):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(data)
    assert ids.tolist() == list(data) and tokenizer.decode_bytes(ids) == data
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")


def test_decode_skips_what_stands_for_no_text(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = [*tokenizer.encode("ab"), tokenizer.eos_id, *tokenizer.encode("c"), tokenizer.vocab_size + 5]
        assert tokenizer.decode(ids) == "abc"  # ids past the vocabulary: the model's may be larger
    assert ByteTokenizer().encode("a\ud800").tolist() == [97, 63]


def test_bpe_compresses_and_is_deterministic(bpe, tmp_path):
    assert bpe.vocab_size == 320
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    again = BPETokenizer.train(iter(TEXTS), 320, tmp_path / "run" / "tokenizer.json")
    assert again.fingerprint == bpe.fingerprint
    assert BPETokenizer.train(TEXTS, 300, tmp_path / "tokenizer.json").fingerprint != bpe.fingerprint
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["tokenizer.json"]  # nothing left behind


def test_every_byte_has_a_token(bpe):
    single = [bpe.encode(chr(i)) for i in range(128)]
    assert all(len(ids) == 1 for ids in single)
    assert bpe.decode(bpe.encode("🙂")) == "🙂" and bpe.num_bytes(bpe.encode("🙂")) == 4


def foreign(path, special, decoder):
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder
    backend.train_from_iterator(TEXTS, trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    backend.add_tokens(["    ü"])
    backend.save(str(path))
    return backend


def test_published_tokenizers_keep_their_special_tokens(tmp_path):
    path = tmp_path / "tokenizer.json"
    backend = foreign(path, ["[BOS]", "<|endoftext|>"], decoders.ByteLevel())
    tokenizer = make_tokenizer(DataConfig(tokenizer=str(path)))
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.pad_id == backend.get_vocab_size() and tokenizer.vocab_size == backend.get_vocab_size() + 14
    text = "return a    übrig"
    ids = tokenizer.encode(text)
    assert ids.tolist() == backend.encode(text).ids and backend.token_to_id("    ü") in ids
    assert tokenizer.decode(ids) == text and tokenizer.num_bytes(ids) == len(text.encode())


def test_make_tokenizer_trains_once(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    for i, t in enumerate(TEXTS):
        (tmp_path / "data" / f"{i}.txt").write_text(t)
    data = DataConfig(source="text", path=f"{tmp_path}/data/*.txt", tokenizer="bpe", bpe_vocab=300, heldout=0.3)
    first = make_tokenizer(data, tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "tokenizer.json").read_text())
    assert len(stored["model"]["vocab"]) == 300 == first.vocab_size
    monkeypatch.setattr(BPETokenizer, "train", None)
    assert make_tokenizer(data, tmp_path / "run").fingerprint == first.fingerprint
    assert make_tokenizer(DataConfig()).vocab_size == 272


def test_bad_tokenizers_are_one_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="data.tokenizer='/nowhere.json': no such file; use byte, bpe or"):
        make_tokenizer(DataConfig(tokenizer="/nowhere.json"))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ConfigError, match="bad.json': not a tokenizer.json"):
        make_tokenizer(DataConfig(tokenizer=f"{tmp_path}/bad.json"))
    foreign(tmp_path / "pieces.json", [], decoders.Metaspace())
    with pytest.raises(ConfigError, match="pieces.json': not byte-level"):
        make_tokenizer(DataConfig(tokenizer=f"{tmp_path}/pieces.json"))
    with pytest.raises(ConfigError, match="data.tokenizer='bpe': needs a run directory"):
        make_tokenizer(DataConfig(tokenizer="bpe"))
    with pytest.raises(ConfigError, match="data.bpe_vocab=271: must be at least 272"):
        BPETokenizer.train(TEXTS, 271, tmp_path / "t.json")

"""The pipeline's promises: order, hosts, resume, held-out data, the token cache."""

import dataclasses
import json

import numpy as np
import pytest

from trillium_moe.config import Config, ConfigError, DataConfig, ModelConfig
from trillium_moe.data import (
    BPETokenizer,
    ByteTokenizer,
    load_documents,
    make_pipeline,
    make_source,
    tokenize,
)
from trillium_moe.data import pipeline as pipeline_module

TOKENIZER = ByteTokenizer()
DOCUMENTS = tokenize([chr(97 + i) * n for i, n in enumerate([5, 30, 11, 2, 47, 8, 19])], TOKENIZER)  # 129 tokens


def make(split="train", batch_size=4, seed=0, documents=DOCUMENTS, seq_len=8, packing="concat", segments=True,
         **kwargs):
    data = DataConfig(seq_len=seq_len, batch_size=batch_size, packing=packing, segments=segments)
    return make_pipeline(Config(seed=seed, data=data), split, documents=documents, **kwargs)


def same(a, b):
    return a.keys() == b.keys() and all((a[k] == b[k]).all() and a[k].dtype == b[k].dtype for k in a)


def joined(batches):
    return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}


def take(iterator, n):
    return [next(iterator) for _ in range(n)]


def test_tokenize_appends_eos_and_skips_empty_texts():
    documents = tokenize(["ab", "", "ü"], TOKENIZER)
    assert documents.tokens.tolist() == [97, 98, 258, 195, 188, 258] and documents.lengths.tolist() == [3, 3]
    assert documents.tokens.dtype == np.uint16 and documents.mask is None
    with pytest.raises(ValueError, match="no document holds a token"):
        tokenize([""], TOKENIZER)


class MaskedTokenizer(ByteTokenizer):
    """Letters in upper case carry no loss."""

    def encode(self, text):
        return super().encode(text), np.array([not c.isupper() for c in text], bool)


def test_masked_documents():
    documents = tokenize(["ABcd", "xY"], MaskedTokenizer())
    assert documents.mask.tolist() == [False, False, True, True, True, True, False, False]
    rows = joined(list(make("heldout", documents=documents, seq_len=8)))
    predicted = rows["targets"][rows["weights"] > 0]
    assert sorted(predicted.tolist()) == sorted([*b"cd", 258])

    class Sometimes(ByteTokenizer):
        def encode(self, text):
            ids = super().encode(text)
            return (ids, np.ones(len(ids), bool)) if text == "a" else ids

    with pytest.raises(ValueError, match="1 of 2 documents carry a mask"):
        tokenize(["a", "b"], Sometimes())


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_batches_are_rows_in_order_whatever_the_batch_size(packing):
    reference = make(packing=packing).rows
    for batch_size in (1, 2, 4, 8):
        for threads in (0, 1):
            pipeline = make(batch_size=batch_size, packing=packing, threads=threads)
            rows = joined(take(iter(pipeline), 48 // batch_size))
            for i in range(48):
                assert same({k: v[i] for k, v in rows.items()}, reference[i])
            assert same(pipeline[5], {k: v[5 * batch_size:6 * batch_size] for k, v in joined(
                [pipeline[b] for b in range(6)]).items()})


@pytest.mark.parametrize("hosts", [2, 4])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_hosts_read_slices_of_the_same_global_batch(hosts, split):
    whole = make(split, batch_size=4)
    parts = [iter(make(split, batch_size=4, host=h, hosts=hosts)) for h in range(hosts)]
    assert len(make(split, batch_size=4, hosts=hosts)) == len(whole)
    for b in range(5):
        local = [next(p) for p in parts]
        assert all(x["tokens"].shape == (4 // hosts, 8) for x in local)
        assert same(joined(local), whole[b])


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
@pytest.mark.parametrize("threads", [0, 1])
def test_resume_equals_an_uninterrupted_run(packing, threads):
    # about 16 rows an epoch: with 4 rows a batch, stops 3 and 9 are mid-epoch and 4 is at, or astride, a boundary
    pipeline = make(packing=packing, threads=threads)
    uninterrupted = take(iter(pipeline), 16)
    for stop in (0, 3, 4, 9):
        iterator = iter(pipeline)
        take(iterator, stop)
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
        for hosts in (1, 2):  # also on another number of hosts
            resumed = []
            for h in range(hosts):
                fresh = iter(make(packing=packing, threads=threads, host=h, hosts=hosts))
                next(fresh)  # the position before the restore must not matter
                fresh.set_state(state)
                assert fresh.get_state() == state
                resumed.append(take(fresh, 16 - stop))
            for b, expected in enumerate(uninterrupted[stop:]):
                assert same(joined([r[b] for r in resumed]), expected)


def test_resume_with_another_batch_size():
    iterator = iter(make(batch_size=4))
    take(iterator, 2)
    state = iterator.get_state()
    assert state["next_row"] == 8
    fresh = iter(make(batch_size=8))
    fresh.set_state(state)
    assert same(next(fresh), make(batch_size=8)[1])
    with pytest.raises(ConfigError, match="data.batch_size=3: must divide the 8 rows already read"):
        iter(make(batch_size=3)).set_state(state)


@pytest.mark.parametrize("change", [
    {"seed": 1}, {"seq_len": 16}, {"packing": "first_fit"}, {"segments": False}, {"split": "heldout"},
    {"documents": tokenize(["other", "texts"], TOKENIZER)},
    {"documents": dataclasses.replace(DOCUMENTS, tokens=DOCUMENTS.tokens + 1)},
])
def test_a_position_in_another_stream_is_refused(change):
    state = iter(make()).get_state()
    with pytest.raises(ConfigError, match="the saved position is of another data stream"):
        iter(make(**change)).set_state(state)


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_heldout_is_read_once_in_an_order_no_seed_changes(packing):
    pipeline = make("heldout", packing=packing)
    batches = list(pipeline)
    assert len(batches) == len(pipeline) and all(b["tokens"].shape == (4, 8) for b in batches)
    rows = joined(batches)
    assert sorted(rows["tokens"][rows["segment_ids"] > 0].tolist()) == sorted(DOCUMENTS.tokens.tolist())
    assert rows["weights"].sum() == len(DOCUMENTS.tokens) - len(DOCUMENTS)  # all but the first of each document
    assert (rows["weights"][rows["segment_ids"] == 0] == 0).all()
    assert same(rows, joined(list(make("heldout", packing=packing, seed=7))))
    assert not same(joined(take(iter(make(packing=packing)), 4)), joined(take(iter(make(packing=packing, seed=7)), 4)))
    with pytest.raises(IndexError):
        pipeline[len(pipeline)]
    iterator = iter(pipeline)
    take(iterator, len(pipeline))
    end = iterator.get_state()
    iterator = iter(pipeline)
    iterator.set_state(end)
    assert list(iterator) == []


def test_epoch_counts_passes():
    pipeline = make(batch_size=4)
    assert pipeline.epoch(0) == 0 and np.isclose(pipeline.epoch(10) * 129, 10 * 4 * 8)


def write_texts(folder, n=40):
    folder.mkdir(exist_ok=True)
    for i in range(n):
        (folder / f"{i:02}.txt").write_text(f"document {i} " * (i + 1))
    return DataConfig(source="text", path=f"{folder}/*.txt", seq_len=32, batch_size=4, heldout=0.2)


def test_from_config_train_and_heldout_are_disjoint_and_whole(tmp_path):
    config = Config(data=write_texts(tmp_path / "d"))
    train, heldout = (make_pipeline(config, s).rows.documents for s in ("train", "heldout"))

    def texts(documents):
        return {TOKENIZER.decode(documents.tokens[a:a + n]) for a, n in zip(documents.starts, documents.lengths)}

    assert texts(train).isdisjoint(texts(heldout))
    assert texts(train) | texts(heldout) == {f"document {i} " * (i + 1) for i in range(40)}


def test_stdlib_with_the_default_config():
    batch = make_pipeline(Config(), "train")[0]
    assert batch["tokens"].shape == (8, 512) and batch["tokens"].max() < 272
    assert batch["weights"].mean() > 0.98
    source = "".join(make_source(DataConfig()).split(0.05)[0])
    for row in batch["tokens"]:  # eight pieces of real files
        longest = max(bytes(row.astype(np.uint16).clip(0, 255).astype(np.uint8)).split(b"\xff"), key=len)
        assert longest[5:-5].decode("utf-8", "ignore")[:100] in source


def test_token_cache_equals_memory_and_is_reused(tmp_path, monkeypatch):
    data = write_texts(tmp_path / "d")
    source = make_source(data)
    tokenizer = BPETokenizer.train(source, 300, tmp_path / "tokenizer.json")
    memory = tokenize(source, tokenizer)
    # a BPE source above 1 MiB goes to disk; here the size is claimed, not written
    monkeypatch.setattr(type(source), "num_bytes", 2 << 20)
    cached = load_documents(source, tokenizer, tmp_path / "cache")
    assert isinstance(cached.tokens, np.memmap)
    assert (cached.tokens == memory.tokens).all() and (cached.lengths == memory.lengths).all()
    assert len(list((tmp_path / "cache").iterdir())) == 1  # no partial folder left
    monkeypatch.setattr(pipeline_module, "tokenize", None)  # a second tokenisation would fail
    again = load_documents(source, tokenizer, tmp_path / "cache")
    config = Config(model=ModelConfig(vocab_size=320), data=data)
    a, b = (make_pipeline(config, "train", tokenizer=tokenizer, documents=d) for d in (memory, again))
    assert a.stream == b.stream and same(a[3], b[3])


def test_a_failed_tokenisation_leaves_no_cache(tmp_path, monkeypatch):
    source = make_source(write_texts(tmp_path / "d"))
    monkeypatch.setattr(type(source), "num_bytes", 1 << 30)

    class Broken(ByteTokenizer):
        def encode(self, text):
            raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="disk on fire"):
        load_documents(source, Broken(), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_masks_survive_the_cache(tmp_path):
    texts = ["ABcd", "xY"]
    memory, disk = tokenize(texts, MaskedTokenizer()), tokenize(texts, MaskedTokenizer(), tmp_path)
    assert (memory.mask == disk.mask).all() and (memory.tokens == disk.tokens).all()


def test_bad_input_is_one_clear_error():
    with pytest.raises(ConfigError, match="split='val'.*must be one of train, heldout"):
        make("val")
    with pytest.raises(ConfigError, match="data.batch_size=4: must be a multiple of the 3 hosts"):
        make(hosts=3)
    with pytest.raises(ValueError, match="host 2 of 2"):
        make(host=2, hosts=2)
    small = Config(model=ModelConfig(vocab_size=300))
    with pytest.raises(ConfigError, match="model.vocab_size=300: must be at least the 320"):
        tokenizer = ByteTokenizer()
        tokenizer.vocab_size = 320
        make_pipeline(small, "train", tokenizer=tokenizer)

"""Sources written by the tests themselves, and the standard library."""

import ast
import builtins
import json
import math
import sysconfig
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from trillium_moe.config import ConfigError, DataConfig
from trillium_moe.data import make_source, order0_entropy
from trillium_moe.data.sources import Source

TEXTS = ["first", "zweites Dokument äöü", "三", "fourth\nwith a line", "🙂" * 5, "last"]


def write_arrayrecord(path, records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def write(tmp_path, kind):
    """A source of TEXTS; returns its config."""
    if kind == "text":
        (tmp_path / "sub").mkdir()
        for i, text in enumerate(TEXTS):
            (tmp_path / "sub" / f"{i}.txt").write_text(text)
        return DataConfig(source="text", path=f"{tmp_path}/**/*.txt")
    if kind == "jsonl":
        lines = [json.dumps({"n": i, "body": t}) for i, t in enumerate(TEXTS)]
        (tmp_path / "d.jsonl").write_text("\n".join(lines[:3]) + "\n\n" + "\n".join(lines[3:]))
        return DataConfig(source="text", path=f"{tmp_path}/d.jsonl", text_key="body")
    if kind == "arrayrecord":
        write_arrayrecord(tmp_path / "d.array_record", [t.encode() for t in TEXTS])
        return DataConfig(source="arrayrecord", path=f"{tmp_path}/*.array_record")
    if kind == "arrayrecord_json":
        write_arrayrecord(tmp_path / "d.array_record", [json.dumps({"text": t}).encode() for t in TEXTS])
        return DataConfig(source="arrayrecord", path=f"{tmp_path}/*.array_record")
    pq.write_table(pa.table({"n": range(6), "text": TEXTS}), tmp_path / "d.parquet", row_group_size=4)
    return DataConfig(source="parquet", path=f"{tmp_path}/d.parquet")


@pytest.mark.parametrize("kind", ["text", "jsonl", "arrayrecord", "arrayrecord_json", "parquet"])
def test_every_kind_reads_the_same_documents(tmp_path, kind):
    source = make_source(write(tmp_path, kind))
    assert list(source) == TEXTS and len(source) == 6
    assert [source[i] for i in (5, 0, 4, 1)] == [TEXTS[i] for i in (5, 0, 4, 1)]
    assert len({source.name(i) for i in range(6)}) == 6
    with pytest.raises(IndexError):
        source[6]
    train, heldout = source.split(0.3)
    assert sorted([*train, *heldout]) == sorted(TEXTS) and len(heldout) >= 1 and len(train) >= 1
    assert {train.name(i) for i in range(len(train))}.isdisjoint(heldout.name(i) for i in range(len(heldout)))
    assert len({source.manifest, train.manifest, heldout.manifest}) == 3
    assert 0 < heldout.num_bytes < source.num_bytes


def test_names_do_not_depend_on_where_the_files_are(tmp_path):
    sources = []
    for place in ("a", "b/c"):
        (tmp_path / place).mkdir(parents=True)
        sources.append(make_source(write(tmp_path / place, "text")))
    a, b = ([[f.name for f in part.files] for part in s.split(0.3)] for s in sources)
    assert a == b and all(name.startswith("sub/") for part in a for name in part)


def test_splits_follow_the_share_and_stay_when_files_are_added(tmp_path):
    def files(n):
        for i in range(n):
            (tmp_path / f"{i}.txt").write_text(str(i))
        train, heldout = make_source(DataConfig(source="text", path=f"{tmp_path}/*.txt")).split(0.2)
        return {f.name for f in train.files}, {f.name for f in heldout.files}

    train, heldout = files(300)
    assert 35 < len(heldout) < 85  # 60 expected, standard deviation 7
    more_train, more_heldout = files(400)
    assert train <= more_train and heldout <= more_heldout


def test_records_are_split_where_a_file_would_be_too_much(tmp_path):
    for name in "ab":
        pq.write_table(pa.table({"text": [f"{name}{i}" for i in range(1000)]}), tmp_path / f"{name}.parquet")
    source = make_source(DataConfig(source="parquet", path=f"{tmp_path}/*.parquet"))
    train, heldout = source.split(0.05)
    assert 60 < len(heldout) < 140 and Counter(t[0] for t in heldout).keys() == {"a", "b"}
    assert sorted([*train, *heldout]) == sorted(source)
    train, heldout = source.split(0.5)  # now a file is just the share
    assert [f.name for f in heldout.files] in (["a.parquet"], ["b.parquet"]) and len(train) == len(heldout) == 1000


def test_manifest_notices_a_changed_file(tmp_path):
    data = write(tmp_path, "text")
    before = make_source(data).manifest
    assert make_source(data).manifest == before
    (tmp_path / "sub" / "0.txt").write_text("first!")
    assert make_source(data).manifest != before


def test_several_patterns_and_empty_files(tmp_path):
    for name, text in [("a.txt", "A"), ("b.md", "B"), ("c.txt", "")]:
        (tmp_path / name).write_text(text)
    source = make_source(DataConfig(source="text", path=f"{tmp_path}/*.txt, {tmp_path}/*.md,{tmp_path}/a.*"))
    assert list(source) == ["A", "B"]


def test_bytes_that_are_not_utf8_are_replaced(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\xffb")
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "c\xfed"}\n')
    assert list(make_source(DataConfig(source="text", path=f"{tmp_path}/*"))) == ["a�b", "c�d"]


def test_stdlib():
    source = make_source(DataConfig())
    root = Path(sysconfig.get_paths()["stdlib"])
    names = [source.name(i) for i in range(len(source))]
    assert names == sorted(set(names)) and "os.py" in names and "asyncio/base_events.py" in names
    assert not any(part in ("test", "tests", "idle_test", "site-packages") for n in names for part in n.split("/"))
    assert source[names.index("os.py")] == (root / "os.py").read_text("utf-8")
    assert source.num_bytes > 5e6 and all(f.size for f in source.files)
    ast.parse(source[names.index("argparse.py")])
    train, heldout = source.split(0.05)
    train_names, heldout_names = ({f.name for f in s.files} for s in (train, heldout))
    assert train_names | heldout_names == set(names) and not train_names & heldout_names
    assert 0.02 < heldout.num_bytes / source.num_bytes < 0.1
    # one file must not dominate the held-out loss
    assert max(f.size for f in heldout.files) < 0.35 * heldout.num_bytes


@pytest.mark.parametrize("kind, change, message", [
    ("text", {"path": "/nowhere/*.txt"}, r"data.path='/nowhere/\*.txt': '/nowhere/\*.txt' matches no file"),
    ("jsonl", {"text_key": "txt"}, r"data.text_key='txt': .*d.jsonl document 0 has no such text; it has n, body"),
    ("arrayrecord_json", {"text_key": "txt"}, r"data.text_key='txt': .* record 0 has no such text; it has text"),
    ("parquet", {"text_key": "txt"}, r"data.text_key='txt': .*d.parquet has no such column; it has n, text"),
    ("text", {"source": "parquet"}, r"data.path='.*0.txt': not a Parquet file"),
    ("text", {"source": "arrayrecord"}, r"data.path='.*0.txt': not an ArrayRecord file"),
])
def test_bad_sources_are_one_clear_error(tmp_path, kind, change, message):
    data = write(tmp_path, kind)
    with pytest.raises(ConfigError, match=message) as error:
        list(make_source(DataConfig(**{**vars(data), **change})))
    assert "\n" not in str(error.value)


def test_other_bad_sources(tmp_path, monkeypatch):
    (tmp_path / "e.txt").write_text("")
    with pytest.raises(ConfigError, match="data.path=.*every file found is empty"):
        make_source(DataConfig(source="text", path=f"{tmp_path}/*.txt"))
    (tmp_path / "one.txt").write_text("one")
    with pytest.raises(ConfigError, match="data.path=.*one.txt': holds a single document"):
        make_source(DataConfig(source="text", path=f"{tmp_path}/one.txt")).split(0.5)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(ConfigError, match="data.path=.*bad.jsonl': document 1 is not JSON"):
        list(make_source(DataConfig(source="text", path=f"{tmp_path}/bad.jsonl")))
    real = builtins.__import__

    def without_pyarrow(name, *args):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args)

    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "d.parquet")
    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(ConfigError, match=r"needs pyarrow; pip install 'trillium-moe\[parquet\]'"):
        make_source(DataConfig(source="parquet", path=f"{tmp_path}/d.parquet"))


def test_order0_entropy():
    assert order0_entropy(["ab", "cd"]) == 2.0
    assert order0_entropy(["aaaa"]) == 0.0
    text = "hello wörld"
    counts = Counter(text.encode())
    n = sum(counts.values())
    assert math.isclose(order0_entropy([text]), -sum(c / n * math.log2(c / n) for c in counts.values()))


def test_a_source_restricted_to_some_documents(tmp_path):
    source = make_source(write(tmp_path, "jsonl"))
    part = Source(source.files, source.text_key, np.array([4, 1]))
    assert list(part) == [TEXTS[4], TEXTS[1]] and part.name(0) == "d.jsonl#4"


def test_damaged_arrayrecords_are_errors_not_shorter_files(tmp_path):
    path, data = tmp_path / "d.ar", DataConfig(source="arrayrecord", path=f"{tmp_path}/d.ar")
    rng = np.random.default_rng(0)
    write_arrayrecord(path, [rng.bytes(1000) for _ in range(200)])
    whole = path.read_bytes()
    path.write_bytes(whole[:len(whole) // 2])
    with pytest.raises(ConfigError, match="d.ar': not an ArrayRecord file, or cut short"):
        make_source(data)
    path.write_bytes(whole[:3000] + bytes(50) + whole[3050:])
    with pytest.raises(ConfigError, match="d.ar': record [12] is damaged"):
        list(make_source(data))


def test_storage_that_cannot_be_opened():
    for path in ("nowhere://bucket/*.txt", "nowhere://bucket/x"):
        with pytest.raises(ConfigError, match="data.path='nowhere://.*cannot be opened"):
            make_source(DataConfig(source="text", path=path))

"""Safetensors directories: what the reference package writes and reads, and everything that is refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save, save_file

from trillium_moe.config import ConfigError
from trillium_moe.interop.safetensors import (
    INDEX,
    Planned,
    header_bytes,
    index_of,
    parse_header,
    read_directory,
    read_header,
    shard_names,
    split,
)

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b.weight": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    "c": np.arange(5, dtype=np.uint8),
    "empty": np.zeros((0, 4), np.float32),
}


@pytest.fixture
def one(tmp_path):
    save_file(ARRAYS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def test_reads_what_the_package_writes(one):
    found = read_directory(one)
    assert set(found) == set(ARRAYS)
    for name, entry in found.items():
        value = entry.read()
        assert value.dtype == ARRAYS[name].dtype
        np.testing.assert_array_equal(value, ARRAYS[name])


def test_the_package_reads_what_is_written(tmp_path):
    planned = [Planned("x", "F32", (2, 3)), Planned("y", "BF16", (2,)), Planned("z", "U8", (5,))]
    values = [ARRAYS["a"], ARRAYS["b.weight"], ARRAYS["c"]]
    path = tmp_path / "model.safetensors"
    path.write_bytes(header_bytes(planned) + b"".join(v.tobytes() for v in values))
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        for tensor, value in zip(planned, values):
            np.testing.assert_array_equal(file.get_tensor(tensor.name), value)


def test_shards_by_size():
    tensors = [Planned(str(i), "U8", (n,)) for i, n in enumerate((4, 4, 3, 9, 1))]
    shards = split(tensors, 8)
    assert [[t.name for t in s] for s in shards] == [["0", "1"], ["2"], ["3"], ["4"]]
    index = index_of(shards)
    assert index["metadata"]["total_size"] == 21 and index["weight_map"]["3"] == "model-00003-of-00004.safetensors"
    assert shard_names(1) == ["model.safetensors"]


def refused(directory, *words):
    with pytest.raises(ConfigError) as raised:
        read_directory(directory)
    assert "\n" not in str(raised.value)
    for word in words:
        assert word in str(raised.value)


def damage(one, change):
    path = one / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("change, says", [
    (lambda b: b[:-1], "truncated"),
    (lambda b: b[:40], "truncated"),
    (lambda b: b[:5], "not a safetensors file"),
    (lambda b: b"", "not a safetensors file"),
    (lambda b: b + b"x", "longer"),
    (lambda b: b"\xff" * 8 + b[8:], "not a safetensors file"),
    (lambda b: b.replace(b'"F32"', b'"F99"', 1), "known dtype"),
    (lambda b: b.replace(b"[2,3]", b"[2,4]"), "bytes for F32[2, 4]"),
    (lambda b: b.replace(b"[2,3]", b"[-2]" + b" "), "known dtype, a shape"),
    (lambda b: b.replace(b'"b.weight"', b'"a",     '[:10].ljust(10)), "corrupted header"),
    (lambda b: b.replace(b'{"', b'["', 1), "corrupted header"),
    (lambda b: b"PK\x03\x04" + b"\xff" * 60, "pickled"),
    (lambda b: b"\x80\x02" + b"\xff" * 60, "pickled"),
])
def test_damaged_files_are_refused(one, change, says):
    damage(one, change)
    refused(one, str(one / "model.safetensors"), says)


def test_gaps_overlaps_and_repeated_names_are_refused(tmp_path):
    path = tmp_path / "x"
    entry = lambda a, b: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]}
    good = {"a": entry(0, 4), "b": entry(4, 6)}
    assert list(parse_header(json.dumps(good).encode(), 6, path)) == ["a", "b"]
    for header, says in (({"a": entry(0, 4), "b": entry(5, 6)}, "begins at byte 5"),
                         ({"a": entry(0, 4), "b": entry(3, 6)}, "begins at byte 3"),
                         ({"a": entry(1, 6)}, "begins at byte 1"), ({"a": entry(0, 4)}, "longer"),
                         ({"a": entry(0, 9)}, "truncated"), ({"a": 3}, "needs a known dtype"),
                         ({"a": {**entry(0, 6), "shape": [1 << 70]}}, "needs a known dtype"),
                         ({"a": {**entry(0, 6), "shape": [True]}}, "needs a known dtype")):
        with pytest.raises(ConfigError, match=says):
            parse_header(json.dumps(header).encode(), 6, path)
    twice = json.dumps(good)[:-1] + ', "a": ' + json.dumps(entry(0, 4)) + "}"
    for text in (twice.encode(), b"[" * 100_000, b"\xff{}", b"null"):
        with pytest.raises(ConfigError, match="corrupted header"):
            parse_header(text, 6, path)


@given(noise=st.binary(max_size=60), at=st.integers(0, 2**16), cut=st.integers(0, 300))
@settings(max_examples=150, deadline=None)
def test_no_damage_goes_unseen_or_beyond_one_error(noise, at, cut, tmp_path_factory):
    """Whatever is overwritten or cut off, a file is read as tensors of the right sizes or refused in one line."""
    good = save(ARRAYS)
    at %= len(good)
    bad = (good[:at] + noise + good[at + len(noise) :])[: len(good) - cut]
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(bad)
    try:
        found = read_header(path)
    except ConfigError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return
    assert cut == 0 and sum(e.nbytes for e in found.values()) == len(bad) - 8 - int.from_bytes(bad[:8], "little")
    for entry in found.values():
        assert entry.read().shape == entry.shape


def indexed(directory, weight_map):
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..", "",
                                  "a\\model.safetensors", "model.bin", "pytorch_model.pt", "C:model.safetensors"])
def test_an_index_that_leads_elsewhere_is_refused(one, name):
    indexed(one, {"a": "model.safetensors", "b.weight": name})
    refused(one, INDEX, "only .safetensors files of the directory itself")


def test_an_index_and_files_must_agree(one):
    everything = dict.fromkeys(ARRAYS, "model.safetensors")
    indexed(one, everything)
    assert set(read_directory(one)) == set(ARRAYS)
    indexed(one, everything | {"d": "model.safetensors"})
    refused(one, "d is not in model.safetensors")
    indexed(one, {n: f for n, f in everything.items() if n != "c"})
    refused(one, "c is not listed")
    indexed(one, everything | {"d": "model-2.safetensors"})
    refused(one, "model-2.safetensors missing")
    save_file({"a": ARRAYS["a"]}, one / "model-2.safetensors")
    indexed(one, everything | {"b.weight": "model-2.safetensors"})
    refused(one, "holds a, which")
    for text in ("{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'):
        (one / INDEX).write_text(text)
        refused(one, INDEX)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "consolidated.00.pth", "MODEL.BIN"])
def test_pickles_are_refused_unopened(one, name):
    class Bomb:
        def __reduce__(self):
            return (open, (str(one / "exploded"), "w"))

    import pickle

    (one / name).write_bytes(pickle.dumps(Bomb()))
    refused(one, name, "never opened")
    (one / name).rename(one / "model.safetensors")
    refused(one, "is pickled")
    assert not (one / "exploded").exists()

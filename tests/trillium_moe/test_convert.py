"""The command line of released checkpoints: plans, imports as runs, exports of runs; wrong calls."""

import dataclasses
import json
import pickle

import numpy as np
import pytest

from configs import scales
from experiments import convert, logits
from experiments.common import UsageError, command
from tests import goldens
from tests.models import random_variables
from trillium_moe.data.tokenizer import BPETokenizer
from trillium_moe.infer.generate import load_model
from trillium_moe.interop.export import export
from trillium_moe.interop.safetensors import read_directory
from trillium_moe.interop.tokenizers import ReleasedTokenizer

MXFP4 = goldens.ROOT / "kimi_k3_tiny_mxfp4"


def call(module, *argv):
    return command(module.__doc__, module.define, module.run, argv)


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """An exported model of two layers with a tokenizer beside it."""
    directory = tmp_path_factory.mktemp("released") / "hf"
    config = dataclasses.replace(scales.tiny(), n_layers=2, vocab_size=300)
    _, params, bias = random_variables(config, noise=0.1)
    export(directory, config, params, bias, dtype="float32", extra={"eos_token_id": 7})
    BPETokenizer.train(["a text to train on " * 9], 300, directory / "tokenizer.json")
    return directory


def test_a_plan_reads_headers_only(capsys, tmp_path):
    """Of files whose data were never written: headers, then a hole."""
    for path in MXFP4.iterdir():
        data = path.read_bytes()
        if path.suffix == ".safetensors":
            start = 8 + int.from_bytes(data[:8], "little")
            with (tmp_path / path.name).open("wb") as file:
                file.write(data[:start])
                file.truncate(len(data))
        elif path.name == "config.json":
            (tmp_path / path.name).write_bytes(data)
    assert call(convert, f"--hf={tmp_path}", "--plan", "--json", "--devices=8", "--mesh=data=2,expert=4",
                "--experts=mxfp4") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"]["expert"] == 4 and found["files"] == 1 and found["naming"] == "kimi_k3"
    rows = found["rows"]
    stored = {n: e.nbytes for n, e in read_directory(MXFP4).items()}
    experts = sum(v for n, v in stored.items() if ".experts." in n)
    assert rows["routed experts"]["stored"] == experts == 4 * rows["routed experts"]["device"] * 2
    assert sum(row["stored"] for row in rows.values()) == sum(stored.values())
    assert sum(row["tensors"] for row in rows.values()) == len(stored)
    assert call(convert, f"--hf={tmp_path}", "--plan") == 0
    out = capsys.readouterr().out
    assert "routed experts" in out and "model.safetensors" in out


@pytest.mark.slow
def test_import_as_a_run_and_back(released, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"a text to train on, the {i}th of its kind. " * 20)
    assert call(convert, f"--hf={released}", f"--workdir={run}", "--config.data.tokenizer=checkpoint",
                "--config.data.source=text", f"--config.data.path={tmp_path}/*.txt", "--config.data.seq_len=64",
                "--config.data.batch_size=2") == 0
    model = load_model(run)
    assert model.step == 0 and isinstance(model.tokenizer, ReleasedTokenizer) and model.config.model.n_layers == 2
    assert call(convert, f"--workdir={run}", f"--out={out}", "--dtype=float32", "--shard_gb=0.001") == 0
    want, got = read_directory(released), read_directory(out)
    assert len({e.file for e in got.values()}) == 3
    assert {n: e.read().tobytes() for n, e in got.items()} == {n: e.read().tobytes() for n, e in want.items()}
    assert (out / "tokenizer.json").read_bytes() == (released / "tokenizer.json").read_bytes()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == model.tokenizer.eos_id
    capsys.readouterr()
    assert call(convert, f"--hf={released}", f"--workdir={run}") == 2
    assert "holds a run" in capsys.readouterr().err


@pytest.mark.slow
def test_converting_between_layouts(released, tmp_path):
    packed = tmp_path / "packed"
    assert call(convert, f"--hf={MXFP4}", f"--out={packed}", "--experts=mxfp4") == 0
    for name, entry in read_directory(MXFP4).items():
        assert read_directory(packed)[name].read().tobytes() == entry.read().tobytes()
    assert call(convert, f"--hf={goldens.ROOT / 'kimi_linear_tiny'}", f"--out={tmp_path / 'lib'}",
                "--naming=transformers") == 0
    want, got = (read_directory(d) for d in (goldens.ROOT / "kimi_linear_tiny/in_library", tmp_path / "lib"))
    assert {n: e.read().tobytes() for n, e in got.items()} == {n: e.read().tobytes() for n, e in want.items()}


def test_logits_of_packed_experts(tmp_path, capsys):
    ref = goldens.arrays(MXFP4.name, "reference.safetensors")
    np.save(tmp_path / "ids.npy", ref["input_ids"])
    assert call(logits, f"--hf={MXFP4}", f"--tokens={tmp_path}/ids.npy", f"--out={tmp_path}/out.npy",
                "--experts=mxfp4") == 0
    assert goldens.error(np.load(tmp_path / "out.npy"), ref["logits"]) < 1e-4


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize("write, message", [
    (lambda path, bomb: path.write_bytes(pickle.dumps(bomb)), "not an .npy array (This file contains pickled"),
    (lambda path, bomb: np.save(path, np.array([bomb], object), allow_pickle=True), "not an .npy array (Object arrays"),
    (lambda path, bomb: path.write_bytes(b""), "not an .npy array (No data"),
    (lambda path, bomb: path.write_bytes((MXFP4 / "config.json").read_bytes()), "not an .npy array"),
    (lambda path, bomb: np.savez(path.open("wb"), a=np.zeros(3)), "an .npz archive"),
    (lambda path, bomb: np.save(path, np.zeros(3)), "must hold integers [T] or [B,T], not float64 (3,)"),
    (lambda path, bomb: np.save(path, np.array([2**63], np.uint64)), "ids must lie in [0, 272)"),
    (lambda path, bomb: np.save(path, np.array([-1])), "ids must lie in [0, 272)"),
    (lambda path, bomb: path.mkdir(), "no such file"),
])
def test_tokens_that_are_none(write, message, tmp_path):
    write(tmp_path / "ids.npy", Bomb(tmp_path / "exploded"))
    with pytest.raises(UsageError) as raised:
        logits.read_tokens(str(tmp_path / "ids.npy"), 272)
    assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "exploded").exists()


def test_logits_that_cannot_be_written_are_not_computed(tmp_path):
    (tmp_path / "file").write_text("")
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "file" / "out.npy", "Not a directory|File exists")):
        with pytest.raises(UsageError, match=f"--out={path}: cannot be written .{reason}"):
            logits.writable(str(path))


@pytest.mark.parametrize("argv, message", [
    ((), "two of the flags"),
    (("--hf=/no/such",), "two of the flags"),
    (("--hf=/no/such", "--plan"), "/no/such: no config.json"),
    (("--plan",), "flag --plan needs --hf"),
    (("--hf=/no/such", "--out=/tmp/x"), "no config.json"),
    (("--workdir=/no/such", "--out=/tmp/x"), "no such directory"),
    ((f"--hf={MXFP4}", "--plan", "--mesh=dta=3"), "'dta=3' is not AXIS=SIZE"),
    ((f"--hf={MXFP4}", "--plan", "--mesh=data=--3"), "'data=--3' is not AXIS=SIZE"),
    ((f"--hf={MXFP4}", "--plan", "--mesh=data=3", "--devices=8"), "does not fill the 8 devices"),
    ((f"--hf={MXFP4}", "--plan", "--mesh=expert=3", "--devices=3"), "do not divide"),
    ((f"--hf={goldens.ROOT / 'kimi_k3_tiny'}", "--plan", "--experts=mxfp4"), "multiple of 32"),
    ((f"--hf={MXFP4}", "--out=/tmp", "--naming=transformers", "--experts=mxfp4"), "cannot be MXFP4"),
])
def test_wrong_command_lines(argv, message, capsys):
    assert call(convert, *argv) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert out == ""

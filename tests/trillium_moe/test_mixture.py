import dataclasses

import numpy as np
import pytest

from trillium_moe.config import KINDS, Config, ConfigError, DataConfig, MixtureConfig, TrainConfig
from trillium_moe.data.examples import Kit
from trillium_moe.data.mixture import MixtureRows, packages, weights_at
from trillium_moe.data.packing import Documents
from trillium_moe.data.pipeline import make_pipeline
from trillium_moe.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
LENGTHS = np.array([90, 300, 40, 700, 60, 20, 250, 130])
NAMES = ["a", "p/a", "p/b", "q/a", "r/a", "r/b", "r/c", "z"]
TOKENS = np.concatenate([np.r_[65 + np.arange(n - 1) % 26, BYTES.eos_id] for n in LENGTHS]).astype(np.uint16)
DOCUMENTS = Documents(TOKENS, LENGTHS)
ALL = MixtureConfig(0.4, 0.2, 0.15, 0.1, 0.15, replay_window=128, synthetic_from=0.0, tasks=("needle", "multi_query"))


def rows(config=ALL, n=4000, seq_len=512, seed=0):
    return MixtureRows(config, DOCUMENTS, Kit(BYTES, DOCUMENTS, dense=True), seq_len, seed, n, NAMES)


def test_shares_are_met_within_one_percent_over_a_thousand_batches():
    for seed in range(5):
        r = rows(n=4000, seed=seed)
        target = {k: getattr(ALL, k) for k in KINDS}
        counted = np.bincount([KINDS.index(r.kind(i)[0]) for i in range(4000)], minlength=5) / 4000
        assert all(abs(share - target[k]) < 0.01 * target[k] for k, share in zip(KINDS, counted))
        assert r.shares(4000) == pytest.approx(dict(zip(KINDS, counted)), abs=1e-12)


def test_shares_move_from_those_of_the_stage_before_and_tasks_come_last():
    config = dataclasses.replace(ALL, before=(1.0, 0.0, 0.0, 0.0, 0.0), ramp=0.5, synthetic_from=0.8)
    w = weights_at(config, np.array([0.0, 0.25, 0.5, 0.79, 0.8, 1.0]))
    assert w[0] == pytest.approx([1, 0, 0, 0, 0])
    # half-way: (1 + .4, .2, .15, .1) over their sum, without tasks
    assert w[1] == pytest.approx(np.array([1.4, 0.2, 0.15, 0.1, 0]) / 1.85)
    assert w[2:4] == pytest.approx(np.array(2 * [[0.4, 0.2, 0.15, 0.1, 0]]) / 0.85)
    assert w[4:] == pytest.approx(np.array(2 * [[0.4, 0.2, 0.15, 0.1, 0.15]]))
    r = rows(config, n=20_000)
    late = r.shares(20_000)["synthetic"] * 20_000
    assert r.shares(16_000)["synthetic"] == 0 and late / 4000 == pytest.approx(0.15, rel=0.01)
    # over many rows the moving shares integrate: text is 1.4 / 1.85 and so on, point by point
    expected = weights_at(config, np.arange(10_000) / 20_000)[:, 0].mean()
    assert r.shares(10_000)["text"] == pytest.approx(expected, rel=0.01)


def test_rows_do_not_depend_on_what_was_read_before():
    one, other = rows(), rows()
    for i in (3999, 0, 17, 1234):
        a, b = one[i], other[i]
        assert all(np.array_equal(a[k], b[k]) for k in a)
    assert not all(np.array_equal(one[i]["tokens"], rows(seed=1)[i]["tokens"]) for i in range(4))
    # the n-th row of a kind is the n-th of its stream: none is skipped
    numbers = {kind: [i for k, i in map(one.kind, range(500)) if k == kind] for kind in KINDS}
    assert all(n == list(range(len(n))) for n in numbers.values())
    with pytest.raises(IndexError):
        one[4000]


def first(kind, config=ALL):
    r = rows(config)
    return r[next(i for i in range(100) if r.kind(i)[0] == kind)]


def test_joined_rows_see_across_documents_and_replayed_ones_are_apart():
    joined = first("joined")
    assert (joined["segment_ids"] == 1).all() and joined["weights"].all()
    assert (joined["tokens"] == BYTES.eos_id).any()
    replay = first("replay")
    assert len(np.unique(replay["segment_ids"].reshape(4, 128), axis=0)) == 4
    starts = replay["segment_ids"][::128]
    assert (np.diff(starts) > 0).all() and (np.diff(replay["segment_ids"]) >= 0).all()


def test_tasks_carry_loss_on_answers_only():
    row = first("synthetic", dataclasses.replace(ALL, answer_weight=3.0))
    marked = row["weights"] > 0
    assert set(np.unique(row["weights"])) == {0.0, 3.0}
    assert BYTES.decode(row["targets"][marked]).isdigit() and marked.sum() % 3 == 0
    ends = np.flatnonzero(np.diff(marked.astype(int)) == 1)
    assert all(chr(row["tokens"][e + 1]) == "=" for e in ends)


def test_rows_of_one_task_alone():
    r = rows(MixtureConfig(text=0.0, synthetic=1.0, tasks=("palindrome",), split=0.0))
    assert r.shares(10) == {"text": 0, "long": 0, "replay": 0, "joined": 0, "synthetic": 1}
    assert all(r[i]["segment_ids"].max() == 1 and (r[i]["weights"] > 0).sum() == 256 for i in range(4))
    several = rows(MixtureConfig(text=0.0, synthetic=1.0, tasks=("palindrome",), split=1.0))
    assert {int(several[i]["segment_ids"].max()) for i in range(20)} == {1, 2, 4}
    grown = MixtureConfig(text=0.0, synthetic=1.0, tasks=("palindrome",), split=1.0, short_until=0.5)
    counts = [int(rows(grown, n=40)[i]["segment_ids"].max()) for i in range(40)]
    assert set(counts[:20]) == {4} and set(counts[20:]) == {1, 2, 4}
    shorter = rows(dataclasses.replace(grown, shortest=64), n=40)
    assert {int(shorter[i]["segment_ids"].max()) for i in range(20)} == {8}


def test_packages():
    long = packages(DOCUMENTS, NAMES, 256)
    # p: 300 + 40, q: 700, r: 60 + 20 + 250; a and z are alone and short
    assert long.lengths.tolist() == [340, 700, 330] and long.tokens[:340].tolist() == TOKENS[90:430].tolist()
    assert packages(DOCUMENTS, None, 256).lengths.tolist() == [300, 700]
    assert packages(DOCUMENTS, NAMES, 1000) is None


def test_what_cannot_be_mixed():
    with pytest.raises(ConfigError, match="config data.mixture.long=0.2: no document or package holds 1024"):
        rows(seq_len=2048)
    with pytest.raises(ConfigError, match="replay_window=128: must divide data.seq_len=500"):
        rows(seq_len=500)
    with pytest.raises(ConfigError, match="data.mixture.before"):
        MixtureConfig(before=(1.0,))
    with pytest.raises(ConfigError, match=r"data.mixture.short_until=1.5: must lie in"):
        MixtureConfig(short_until=1.5)
    config = Config(data=DataConfig(mixture=ALL, packing="first_fit"))
    with pytest.raises(ConfigError, match="data.packing='concat'"):
        make_pipeline(config, "train", documents=DOCUMENTS)


def test_a_pipeline_of_a_mixture_resumes():
    data = DataConfig(seq_len=512, batch_size=2, mixture=dataclasses.replace(ALL, long=0.0))
    config = Config(data=data, train=TrainConfig(steps=30, first_step=10, start="before"))
    pipeline = make_pipeline(config, "train", documents=DOCUMENTS, threads=0)
    assert len(pipeline) == 20 and len(pipeline.rows) == 40
    batches = iter(pipeline)
    for _ in range(3):
        next(batches)
    state, fourth = batches.get_state(), next(batches)
    again = iter(pipeline)
    again.set_state(state)
    assert all(np.array_equal(next(again)[k], fourth[k]) for k in ["tokens"])
    longer = dataclasses.replace(config, train=TrainConfig(steps=31, first_step=10, start="before"))
    with pytest.raises(ConfigError, match="another data stream"):
        iter(make_pipeline(longer, "train", documents=DOCUMENTS, threads=0)).set_state(state)

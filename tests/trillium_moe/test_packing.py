"""Packing against brute force over plain lists."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillium_moe.data.packing import (
    ConcatRows,
    Documents,
    FirstFitRows,
    build_row,
    mix64,
    permute,
    plan_first_fit,
)

PAD = 999
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def make_documents(lengths, mask=None):
    """Documents whose every token is distinct, so that a row shows where each came from."""
    return Documents(np.arange(sum(lengths), dtype=np.uint16), np.array(lengths, np.int64), mask)


def follower(lengths):
    """{token: next token of its document, or None at the end}."""
    ends = set(np.cumsum(lengths).tolist())
    return {t: None if t + 1 in ends else t + 1 for t in range(sum(lengths))}


def real_tokens(row):
    return row["tokens"][row["segment_ids"] > 0].tolist()


def test_mix64_is_splitmix64():
    # first outputs of splitmix64 with seed 1234567 (rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64)
    gamma, expected = 0x9E3779B97F4A7C15, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + i * gamma) % 2**64 for i in range(3)]
    assert [mix64(s) for s in states] == expected
    assert mix64(np.array(states, np.uint64)).tolist() == expected


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000])
def test_permute_is_a_permutation_and_the_same_for_scalars(n):
    out = permute(np.arange(n, dtype=np.uint64), n, 3, 5)
    assert sorted(out.tolist()) == list(range(n))
    assert [permute(i, n, 3, 5) for i in range(n)] == out.tolist()
    assert permute(0, 10**15, -1) == permute(0, 10**15, 2**64 - 1) < 10**15


def test_permute_is_uniform_and_depends_on_every_part_of_the_key():
    n, keys = 10, 1500
    images = np.array([permute(np.arange(n, dtype=np.uint64), n, k) for k in range(keys)])
    counts = np.array([np.bincount(images[:, i].astype(int), minlength=n) for i in range(n)])
    chi2 = ((counts - keys / n) ** 2 / (keys / n)).sum(1)  # 9 degrees of freedom each: 99.99% lie below 33.7
    assert chi2.max() < 40
    assert len({tuple(permute(np.arange(50, dtype=np.uint64), 50, a, b)) for a in range(4) for b in range(4)}) == 16


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(2, 17), st.booleans(), st.sampled_from([ConcatRows, FirstFitRows]), st.integers(0, 5))
def test_one_epoch_loses_and_repeats_nothing(lengths, seq_len, segments, rows_class, seed):
    rows = rows_class(make_documents(lengths), seq_len, seed, segments=segments, pad_id=PAD, epochs=1)
    seen = Counter(t for i in range(len(rows)) for t in real_tokens(rows[i]))
    assert seen == Counter(range(sum(lengths)))
    with pytest.raises(IndexError):
        rows[len(rows)]


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(2, 17), st.sampled_from([ConcatRows, FirstFitRows]), st.integers(0, 5), st.booleans())
def test_rows_by_brute_force_with_segments(lengths, seq_len, rows_class, seed, masked):
    mask = np.random.default_rng(seed).random(sum(lengths)) < 0.7 if masked else None
    rows = rows_class(make_documents(lengths, mask), seq_len, seed, pad_id=PAD, epochs=1)
    follow, document = follower(lengths), np.repeat(np.arange(len(lengths)), lengths)
    predicted = Counter()
    for i in range(len(rows)):
        row = rows[i]
        tokens, segment_ids = row["tokens"].tolist(), row["segment_ids"].tolist()
        assert {k: (v.shape, v.dtype.name) for k, v in row.items()} == {
            "tokens": ((seq_len,), "int32"), "targets": ((seq_len,), "int32"),
            "segment_ids": ((seq_len,), "int32"), "weights": ((seq_len,), "float32")}
        n = len(real_tokens(row))
        assert tokens[n:] == [PAD] * (seq_len - n) and segment_ids[n:] == [0] * (seq_len - n)
        segment = 0
        for t in range(n):
            starts = t == 0 or document[tokens[t]] != document[tokens[t - 1]]
            segment += starts
            assert segment_ids[t] == segment
            if not starts:
                assert tokens[t] == tokens[t - 1] + 1  # contiguous inside its document
            after = follow[tokens[t]]
            assert row["targets"][t] == (PAD if after is None else after)
            assert row["weights"][t] == float(after is not None and (mask is None or mask[after]))
        assert (row["targets"][n:] == PAD).all() and (row["weights"][n:] == 0).all()
        predicted.update(row["targets"][row["weights"] > 0].tolist())
    # every token but the first of its document is predicted exactly once, if its mask allows
    firsts = set((np.cumsum(lengths) - lengths).tolist())
    assert predicted == Counter(t for t in range(sum(lengths)) if t not in firsts and (mask is None or mask[t]))


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(2, 17), st.integers(0, 5))
def test_concat_without_segments_is_the_plain_stream(lengths, seq_len, seed):
    rows = ConcatRows(make_documents(lengths), seq_len, seed, segments=False, pad_id=PAD, epochs=2)
    stream = sum(([*range(start, start + lengths[d])] for e in range(2) for d in rows._epoch(e)[0]
                  for start in [sum(lengths[:d])]), [])
    padded = stream + [PAD] * (seq_len + 1)
    expected = Counter()
    for k in range(0, len(stream), seq_len):
        expected[tuple(padded[k:k + seq_len]), tuple(padded[k + 1:k + seq_len + 1])] += 1
    out = [rows[i] for i in range(len(rows))]
    assert Counter((tuple(r["tokens"].tolist()), tuple(r["targets"].tolist())) for r in out) == expected
    for r in out:
        assert (r["segment_ids"] == (r["tokens"] != PAD)).all() and (r["weights"] == (r["targets"] != PAD)).all()


def test_first_fit_without_segments_predicts_across_documents_of_a_row_only():
    rows = FirstFitRows(make_documents([3, 4]), 8, 0, segments=False, pad_id=PAD, epochs=1)
    (row,) = [rows[i] for i in range(len(rows))]
    a, b = ([0, 1, 2], [3, 4, 5, 6])[::1 if row["tokens"][0] == 0 else -1]
    assert row["tokens"].tolist() == [*a, *b, PAD] and row["targets"].tolist() == [*a[1:], *b, PAD, PAD]
    assert row["weights"].tolist() == [1] * 6 + [0, 0] and row["segment_ids"].tolist() == [1] * 7 + [0]


@settings(max_examples=30, deadline=None)
@given(lengths, st.integers(2, 17), st.integers(0, 5))
def test_endless_concat_covers_each_epoch_whole(lengths, seq_len, seed):
    n = sum(lengths)
    rows = ConcatRows(make_documents(lengths), seq_len, seed, segments=False)
    # n rows are seq_len epochs exactly
    out = [rows[i]["tokens"] for i in range(n)]
    assert Counter(np.concatenate(out).tolist()) == dict.fromkeys(range(n), seq_len)
    assert rows.rows_per_epoch == n / seq_len


def test_epochs_differ_and_mix_documents():
    rows = ConcatRows(make_documents([64] * 32), 16, 0)  # 128 rows an epoch, four to a document
    epochs = [np.array([rows[e * 128 + i]["tokens"] for i in range(128)]) for e in range(2)]
    assert all(sorted(e.ravel().tolist()) == list(range(2048)) for e in epochs)
    assert (epochs[0] != epochs[1]).any(1).mean() > 0.9
    document = epochs[0][:, 0] // 64
    assert np.mean([len(set(document[b:b + 8])) for b in range(0, 128, 8)]) > 6  # of 8 rows in a batch
    other = ConcatRows(make_documents([64] * 32), 16, 1)
    assert (np.array([other[i]["tokens"] for i in range(128)]) != epochs[0]).any(1).mean() > 0.9


def test_documents_and_rows_are_each_shuffled_by_seed_and_epoch():
    # one document: only the order of its rows can differ
    one = {seed: ConcatRows(make_documents([1024]), 16, seed) for seed in (0, 1)}
    orders = {tuple(int(one[seed][e * 64 + i]["tokens"][0]) for i in range(64)) for seed in one for e in range(3)}
    assert len(orders) == 6 and all(sorted(o) == list(range(0, 1024, 16)) for o in orders)
    # two documents to a row: which ones, whatever the order of the rows
    many = {seed: ConcatRows(make_documents([8] * 32), 16, seed) for seed in (0, 1)}
    pairs = {frozenset(tuple(many[seed][e * 16 + i]["tokens"].tolist()) for i in range(16))
             for seed in many for e in range(3)}
    assert len(pairs) == 6


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(2, 17), st.integers(1, 4))
def test_first_fit_plan_against_a_literal_first_fit(lengths, seq_len, window):
    plan = plan_first_fit(np.array(lengths), np.arange(len(lengths)), seq_len, window)
    bins, closed = [], set()  # the textbook loop: every bin in order of creation
    for d, length in enumerate(lengths):
        whole = length // seq_len * seq_len
        for start in range(0, whole, seq_len):
            closed.add(len(bins))
            bins.append([(d, start, start + seq_len)])
        if length == whole:
            continue
        used = lambda b: sum(stop - start for _, start, stop in bins[b])  # noqa: E731
        fitting = [b for b in range(len(bins)) if b not in closed and used(b) + length - whole <= seq_len]
        if fitting:
            bins[fitting[0]].append((d, whole, length))
            continue
        still_open = [b for b in range(len(bins)) if b not in closed]
        if len(still_open) == window:
            closed.add(max(still_open, key=used))
        bins.append([(d, whole, length)])
    assert [plan.row(r) for r in range(len(plan))] == bins
    for row in bins:
        assert sum(stop - start for _, start, stop in row) <= seq_len


def test_first_fit_wastes_little_on_short_documents():
    lengths = np.random.default_rng(0).integers(1, 200, 2000).tolist()
    rows = FirstFitRows(make_documents(lengths), 512, 0)
    assert sum(lengths) / (len(rows.plan) * 512) > 0.98


def test_first_fit_epochs_permute_the_same_rows():
    rows = FirstFitRows(make_documents([5, 9, 3, 20, 7, 1]), 8, 2)
    n = len(rows.plan)
    epochs = [[tuple(rows[e * n + i]["tokens"].tolist()) for i in range(n)] for e in range(4)]
    assert all(Counter(e) == Counter(epochs[0]) for e in epochs) and len({tuple(e) for e in epochs}) > 1


def test_random_access_is_pure():
    for rows_class in (ConcatRows, FirstFitRows):
        documents = make_documents([13, 40, 2, 31, 8])
        rows, again = rows_class(documents, 8, 4), rows_class(documents, 8, 4)
        order = np.random.default_rng(0).permutation(60).tolist()
        shuffled = {i: rows[i] for i in order}
        for i, (a, b) in itertools.product(range(60), [(shuffled, again)]):
            assert all((a[i][k] == b[i][k]).all() for k in a[i])


def test_far_rows_cost_no_more_than_near_ones():
    rows = ConcatRows(make_documents([13, 40, 2]), 8, 0)
    assert (rows[10**15]["weights"] <= 1).all()


def test_build_row_masks_targets():
    mask = np.array([True, False, True, True, False, True])
    row = build_row(make_documents([4, 2], mask), [(0, 0, 4), (1, 0, 2)], 6, True, PAD)
    assert row["weights"].tolist() == [0, 1, 1, 0, 1, 0]  # positions that predict tokens 1, 2, 3, -, 5, -
    assert row["targets"].tolist() == [1, 2, 3, PAD, 5, PAD]


@pytest.mark.parametrize("lengths", [[], [3], [5, 0], [6, -1]])
def test_documents_must_add_up(lengths):
    with pytest.raises(ValueError, match="lengths must be positive and sum"):
        Documents(np.arange(5, dtype=np.uint16), np.array(lengths, np.int64))

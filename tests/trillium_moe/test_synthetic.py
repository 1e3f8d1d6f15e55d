"""Every task is solved again from its text alone, by code that does not know how it was made."""

import collections
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillium_moe.config import ConfigError
from trillium_moe.data.examples import Draw, Kit
from trillium_moe.data.packing import Documents
from trillium_moe.data.synthetic import TASKS, make
from trillium_moe.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
TEXT = ("def area(width, height):\n    return width * height\n" * 40 + "# end of the file\n" * 9).encode()
DOCUMENTS = Documents(np.frombuffer(TEXT, np.uint8).astype(np.uint16), np.array([len(TEXT)]))
SYMBOLS = BYTES.vocab_size + np.arange(600)  # ids of a model with 872 tokens


def kits(dense):
    return Kit(BYTES, DOCUMENTS, dense=dense), Kit(BYTES, DOCUMENTS, BYTES.vocab_size + 600, dense=dense)


def needle(text, question):
    return ",".join(re.findall(rf"\n@{question[2:-1]}=(\d+)", text))


def variable(text, question):
    value = question[2:-1]
    while value.isalpha():
        value = dict(re.findall(r"\n@([a-z]+)=(\w{3})", text))[value]
    return value


def common(text, question):
    counts = collections.Counter(re.findall(r" ([a-z]{3})(?= |\n|$)", text))
    return " ".join(sorted(word for word, _ in counts.most_common(3)))


def frequent(text, question):
    counts = collections.Counter(re.findall(r" ([a-z]{3})(?= |\n|$)", text)).most_common(4)
    assert len({n for _, n in counts[:4]}) == len(counts[:4])  # no ties
    return " ".join(word for word, _ in counts[:3])


def ordinal(text, question):
    i, subject = re.fullmatch(r"\n(\d)\w\w ([a-z]{3}):", question).groups()
    return " " + re.findall(rf"\*{subject}: ([a-z]{{3}})\n", text)[int(i) - 1]


def graph(text, question):
    edges = re.findall(r"\n([a-z]{2})>([a-z]{2})", text)
    first = {b for a, b in edges if a == question[1:3]}
    return ",".join(sorted({b for a, b in edges if a in first}))


def document_qa(text, question):
    part = re.search(r"part ([a-z]{3})\?", question).group(1)
    keeper = re.search(rf"Part {part} is kept by ([a-z]{{3}})\.", text).group(1)
    if "Who" in question:
        return f" {keeper}"
    room = re.search(rf"\n{keeper} works in room ([a-z]{{3}})\.", text).group(1)
    if "room" in question:
        return f" {room}"
    return " " + re.search(rf"telephone of room {room} is (\d+)\.", text).group(1)


def count(text, question):
    return f" {len(re.findall(rf'colour: {question[14:-1]}\n', text))}"


def total(text, question):
    return f" {sum(map(int, re.findall(r'\nprice: (\d)\n', text)))}"


def join(text, question):
    owner = re.search(rf"box {question[-4:-1]} belongs to ([a-z]{{3}})\n", text).group(1)
    return " " + re.search(rf"\n{owner} lives in ([a-z]{{3}})\n", text).group(1)


def chunk_order(text, question):
    parts = re.split(r"\n\[([A-H])\]", text)[1:]
    chunks = dict(zip(parts[::2], parts[1::2]))
    size = len(next(iter(chunks.values())))
    whole = (TEXT * 3).decode()
    # where each chunk is followed by the next: try every beginning
    for start in range(len(TEXT)):
        expected = [whole[start + i * size : start + (i + 1) * size] for i in range(len(chunks))]
        if sorted(expected) == sorted(chunks.values()):
            order = [letter for want in expected for letter, have in chunks.items() if have == want]
            if len(order) == len(chunks):
                return "".join(order)
    raise AssertionError("the chunks are not a stretch of the text")


SOLVERS = {
    "needle": needle, "multi_key": needle, "multi_query": needle, "multi_value": needle, "needles": needle,
    "variable": variable, "common_words": common, "frequent_words": frequent, "ordinal": ordinal, "graph": graph,
    "document_qa": document_qa, "count": count, "total": total, "join": join,
}  # fmt: skip
ASK = re.compile(r"\n[^\n]*\Z")


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("name", SOLVERS)
def test_answers_follow_from_the_text(name, dense):
    kit, _ = kits(dense)
    for key, n in enumerate((160, 700, 2048)):
        example = make(name, kit, n, key)
        assert len(example.tokens) <= n and example.answers
        first = example.answers[0].start
        for answer in example.answers:
            before = BYTES.decode(example.tokens[: answer.start])
            text = BYTES.decode(example.tokens[:first])
            question = ASK.search(before).group()
            context = text[: text.rindex("\n")]
            assert SOLVERS[name](context, question) == BYTES.decode(example.tokens[answer.start : answer.stop])
            assert 0 <= answer.depth <= 1 and 0 < answer.chance <= 1


def test_chunks_in_order():
    kit, _ = kits(False)
    for key in range(3):
        example = make("chunk_order", kit, 400, key)
        (answer,) = example.answers
        text = BYTES.decode(example.tokens[: answer.start])
        assert chunk_order(text[: text.rindex("\n")], "") == BYTES.decode(example.tokens[answer.start :])


def test_palindrome():
    for kit in kits(False):
        example = make("palindrome", kit, 65, 0)
        half = len(example.tokens) // 2
        assert np.array_equal(example.tokens[:half], example.tokens[half + 1 :][::-1])
        assert [a.start for a in example.answers] == list(range(half + 1, 65))
        assert np.isin(example.tokens, kit.symbols).all() and kit.symbols[-1] == example.tokens[half]


def test_mqar():
    _, kit = kits(False)
    example = make("mqar", kit, 256, 3)
    ids = example.tokens - BYTES.vocab_size
    pairs = dict(zip(ids[:128:2], ids[1:128:2]))
    assert len(pairs) == 64 and len(example.answers) == 64
    assert all(pairs[ids[a.start - 1]] == ids[a.start] for a in example.answers)
    # every key is asked once, and no other place of the second part holds one
    assert sorted(ids[a.start - 1] for a in example.answers) == sorted(pairs)
    assert sum(i in pairs for i in ids[128:]) == 64


def test_stack():
    _, kit = kits(False)
    example = make("stack", kit, 900, 1)
    held, pops = collections.defaultdict(list), []
    for i, (op, stack, element) in enumerate((example.tokens - BYTES.vocab_size)[:900].reshape(-1, 3)):
        if op == 0:
            held[stack].append(element)
        else:
            assert held[stack].pop() == element
            pops.append(3 * i + 2)
    assert pops == [a.start for a in example.answers] and len(pops) > 50


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(TASKS)), st.integers(160, 900), st.integers(0, 1 << 40), st.booleans())
def test_examples_are_a_function_of_the_key(name, n, key, dense):
    kit, _ = kits(dense)
    a, b = make(name, kit, n, key), make(name, kit, n, key)
    assert np.array_equal(a.tokens, b.tokens) and a.answers == b.answers
    assert a.tokens.dtype == np.int32 and len(a.tokens) <= n
    stops = [0] + [x for answer in a.answers for x in (answer.start, answer.stop)]
    assert stops == sorted(stops) and stops[-1] <= len(a.tokens)
    other = make(name, kit, n, key + 1)
    assert len(other.tokens) != len(a.tokens) or not np.array_equal(other.tokens, a.tokens)


def test_training_shows_one_needle_and_many_at_every_length():
    """Powers of two from one to a full window, all as often: a long window with one needle is what is asked later."""
    for n, most in ((128, 6), (1024, 51)):
        counts = collections.Counter(len(make("needle", kits(True)[0], n, i).answers) for i in range(60))
        assert sorted(counts) == sorted({most >> i for i in range(most.bit_length())})
        assert min(counts.values()) > 0.3 * 60 / len(counts)


@pytest.mark.parametrize("name", ["needle", "variable"])
def test_a_million_tokens_do_not_run_out_of_keys(name):
    example = make(name, Kit(BYTES, DOCUMENTS, dense=True), 1 << 20, 0, 8)
    text = BYTES.decode(example.tokens)
    keys = re.findall(r"\n@([a-z]{3})=", text)
    assert len(example.answers) > 1000 and len(keys) == len(set(keys)) <= 26**3


def test_depths():
    kit, _ = kits(False)
    for depth in (0.0, 0.25, 1.0):
        (answer,) = make("needle", kit, 1000, 5, depth=depth).answers
        assert answer.depth == pytest.approx(depth, abs=0.02)


def test_draws_do_not_change():
    draw = Draw(1, 2)
    assert [draw.below(1000) for _ in range(4)] == [987, 800, 839, 577]
    assert sorted(draw.sample(50, 50)) == list(range(50))


def test_what_cannot_be_made():
    kit, _ = kits(False)
    with pytest.raises(ConfigError, match="config task='nedle': .*did you mean 'needle'"):
        make("nedle", kit, 100)
    with pytest.raises(ConfigError, match="config length=20: .* at least .* tokens"):
        make("document_qa", kit, 20)
    with pytest.raises(ConfigError, match="takes no depth"):
        make("count", kit, 500, depth=0.5)

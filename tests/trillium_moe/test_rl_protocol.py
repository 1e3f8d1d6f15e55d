"""The protocol: rendering and parsing are inverse on token ids, and the parser takes anything."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillium_moe.rl.config import SFTConfig
from trillium_moe.rl.env import Session, helped, make_env
from trillium_moe.rl.protocol import (
    AFTER_FINAL,
    ARGUMENTS,
    PARSE,
    RESPONSE,
    THINK,
    TOOLS,
    UNKNOWN_TOOL,
    Answer,
    Call,
    Param,
    Protocol,
    Tool,
)
from trillium_moe.rl.sft import ahead, only_last, trace, traced
from trillium_moe.rl.vocabulary import WORDS, WordTokenizer

P = Protocol(WordTokenizer())
MOVE = Tool("move", (Param("way", choices=("north", "south")),))
LOOK = (Tool("index"), Tool("read_page", (Param("page", 1, 8),)), MOVE)


def test_words_are_one_token_and_text_comes_back():
    t = WordTokenizer()
    assert t.encode(" read_page 17").tolist() == [t.word("read_page"), t.word("17")]
    assert len(set(t.ids.values())) == len(WORDS) and max(t.ids.values()) == t.vocab_size - 1


@given(st.text())
def test_any_text_is_encoded_without_loss(text):
    t = WordTokenizer()
    assert t.decode(t.encode(text)) == text.encode("utf-8", "replace").decode()
    assert t.num_bytes(t.encode(text)) == len(text.encode("utf-8", "replace"))


@pytest.mark.parametrize("action", [Call("index"), Call("read_page", ("3",)), Call("move", ("north",)), Answer("42")])
@pytest.mark.parametrize("think", ["", "3 7"])
def test_what_is_rendered_is_parsed(action, think):
    ids = P.turn(action, think)
    turn = P.parse(ids, LOOK)
    assert (turn.action, turn.error, turn.think) == (action, "", think)
    channels = P.channels(ids)
    assert len(channels) == len(ids)
    assert channels[-1] == (TOOLS if isinstance(action, Call) else RESPONSE) and (THINK in channels) == bool(think)


def test_a_prompt_ends_where_the_model_speaks():
    ids = P.prompt(LOOK, "find lemon", "low")
    assert P.show(ids).splitlines() == ["> system: index read_page page move way effort low", "> user: find lemon"]
    assert ids[0] == P.bos and ids[-1] == P.open
    assert P.observation("lemon 73")[-1] == P.open


@pytest.mark.parametrize("text, error", [
    ("flip", UNKNOWN_TOOL), ("read_page", ARGUMENTS), ("read_page 0", ARGUMENTS), ("read_page 9", ARGUMENTS),
    ("read_page 3 4", ARGUMENTS), ("move east", ARGUMENTS), ("move ²", ARGUMENTS), ("", UNKNOWN_TOOL),
])  # fmt: skip
def test_wrong_calls_are_named(text, error):
    ids = [*P.text("tools"), P.sep, *P.text(text), P.end]
    assert P.parse(ids, LOOK).error == error


def test_wrong_structure_is_named():
    call, answer = P.turn(Call("index")), P.turn(Answer("42"))
    assert P.parse([], LOOK).error == P.parse(call[:-1], LOOK).error == PARSE
    assert P.parse([*answer[:-1], P.close, P.open, *call], LOOK).error == AFTER_FINAL
    assert P.parse([*call[:-1], P.close, P.open, *call], LOOK).error == PARSE  # one call a turn
    assert P.parse([*call[:-1], P.bos, P.end], LOOK).error == PARSE  # structure inside content
    assert P.parse([*P.text("think"), P.sep, P.end], LOOK).error == PARSE  # a thought without an action


# ids that make structure likely, and any others
TOKENS = st.sampled_from([P.open, P.sep, P.close, P.end, P.bos, *P.text("think tools response index read_page 3")])


@settings(max_examples=300)
@given(st.lists(st.one_of(TOKENS, st.integers(0, WordTokenizer.vocab_size + 40)), max_size=24))
def test_the_parser_takes_anything(ids):
    turn = P.parse(ids, LOOK)
    assert (turn.action is None) == bool(turn.error)
    assert len(P.channels(ids)) == len(ids)
    assert isinstance(P.show(ids, np.ones(len(ids))), str)
    if isinstance(turn.action, Call):
        tool = next(t for t in LOOK if t.name == turn.action.tool)
        assert all(p.accepts(a) for p, a in zip(tool.params, turn.action.args, strict=True))


def test_of_a_lesson_in_answering_the_answer_alone_is_learned():
    rng = np.random.default_rng(0)
    env = make_env("read_page:entries=0:lines=1:values=64")
    sessions = [Session(env.episode(seed)) for seed in range(40)]
    played = [(s, trace(s, helped(rng), P, "", 192)) for s in sessions]
    answered = [(s, parts) for s, parts in played if s.end == "answer"]
    assert len(answered) > 20
    for session, parts in answered:
        (part,) = only_last(parts)
        learned = [t for t, m in zip(part.tokens, part.mask) if m]
        assert session.success == 1 and P.parse(learned, session.episode.tools).action == Answer(session.episode.value)


def test_traces_give_up_after_any_number_of_calls():
    rng = np.random.default_rng(0)
    env = make_env("flaky:keys=1:busy=0.35:stale=0.35:budget=7")
    def ends(give_up):
        played = [Session(env.episode(seed)) for seed in range(600)]
        for session in played:
            trace(session, traced(SFTConfig(give_up=give_up), rng, 7), P, "", 192)
        return [s.calls for s in played if s.end == "answer" and not s.success]

    assert not ends(0.0)
    calls = np.bincount(ends(1.0), minlength=8)
    # given up after c calls: c drawn, 1 of 7, and none of them fresh, 0.7 each; the seventh always is
    expected = 600 / 7 * 0.7 ** np.arange(8)
    assert calls[0] == calls[7] == 0 and np.all(abs(calls - expected)[1:7] < 4 * np.sqrt(expected[1:7]))


def test_items_made_ahead_are_the_same_and_errors_come_through():
    def numbers():
        yield from range(5)
        raise ValueError("the sixth")

    got = []
    with pytest.raises(ValueError, match="the sixth"):
        for i in ahead(numbers()):
            got.append(i)
    assert got == [0, 1, 2, 3, 4] and list(ahead(iter("ab"))) == ["a", "b"]

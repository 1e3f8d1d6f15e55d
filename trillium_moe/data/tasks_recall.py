"""Recall: needles in text, and the symbol tasks on which linear attention is compared (`training.md` B.3).

    needle, multi_key, multi_value, multi_query   records \n@key=123 in text (RULER's S-, MK-, MV-, MQ-NIAH)
    needles                                       the haystack is made of needles
    variable                                      \n@b=a: chains of assignments (RULER's variable tracking)
    mqar, palindrome, stack                       sequences of symbols, without text
"""

from __future__ import annotations

import numpy as np

from trillium_moe.config import ConfigError
from trillium_moe.data.examples import Draw, Example, Kit, Question

KEY, DIGITS = 3, 3  # letters of a key, digits of a value
NAMES = 26**KEY // 2  # keys of a window at most: half of what there is
STACKS = 64
GUESS = 10.0**-DIGITS  # a value out of the blue


def number(draw: Draw) -> str:
    return f"{draw.below(10**DIGITS):0{DIGITS}d}"


def record(key: str, value: str) -> str:
    return f"\n@{key}={value}"


def ask(key: str) -> str:
    return f"\n?{key}="


def _pairs(draw: Draw, k: int) -> list[tuple[str, str]]:
    return [(key, number(draw)) for key in draw.words(k, KEY)]


def _room(kit: Kit, n: int) -> int:
    """Pairs of a record and a question that fill the window, as far as there are keys."""
    each = kit.cost(record("abc", "123"), ask("abc"), "123") + 2  # a digit group may be two tokens
    if n < each:
        raise ConfigError(f"config length={n}: a needle and its question take {each} tokens; raise it")
    return min(n // each, NAMES)


def _some(draw: Draw, kit: Kit, n: int) -> int:
    """How many pairs a training example has: a full window, half of it, .. or one, all as likely at any length.

    One is the needle that is asked for in evaluation, which long windows must show, too.
    """
    most = _room(kit, n)
    return most >> draw.below(most.bit_length())


def _needles(draw: Draw, n: int, kit: Kit, keys: int, asked: int, depth: float | None = None) -> Example:
    """`keys` needles, of which `asked` are asked for."""
    if kit.dense:
        keys = asked = _some(draw, kit, n)
    pairs = _pairs(draw, keys)
    questions = [Question(ask(pairs[i][0]), pairs[i][1], (i,), GUESS) for i in draw.sample(keys, asked)]
    return kit.plant(draw, n, [record(*p) for p in pairs], questions, depth=depth)


def needle(draw: Draw, n: int, kit: Kit, depth: float | None = None) -> Example:
    """One needle in text."""
    return _needles(draw, n, kit, 1, 1, depth if not kit.dense else None)


def multi_key(draw: Draw, n: int, kit: Kit) -> Example:
    """Up to 16 needles, one question."""
    return _needles(draw, n, kit, min(16, _room(kit, n)), 1)


def multi_query(draw: Draw, n: int, kit: Kit) -> Example:
    """Up to 32 needles, each asked for."""
    count = min(32, _room(kit, n))
    return _needles(draw, n, kit, count, count)


def multi_value(draw: Draw, n: int, kit: Kit) -> Example:
    """A key with three values, all to be given in order; and others."""
    keys = max(1, _room(kit, n) // 4) if kit.dense else 1 + min(3, n // 512)
    names = draw.words(keys, KEY)
    records, values, where = [], [[] for _ in names], [[] for _ in names]
    for i in draw.shuffled(list(range(keys)) * 3):
        values[i].append(number(draw))
        where[i].append(len(records))
        records.append(record(names[i], values[i][-1]))
    questions = [Question(ask(names[i]), ",".join(values[i]), tuple(where[i]), GUESS**3)
                 for i in draw.sample(keys, keys if kit.dense else 1)]
    return kit.plant(draw, n, records, questions)


def needles(draw: Draw, n: int, kit: Kit) -> Example:
    """Nothing but needles; a sixteenth of the window asks."""
    most = _room(kit, n)
    asked = max(1, most // 8)
    pairs = _pairs(draw, 2 * most - asked - 1 if most > 1 else 1)
    questions = [Question(ask(pairs[i][0]), pairs[i][1], (i,), 1 / len(pairs))
                 for i in draw.sample(len(pairs), asked)]
    return kit.plant(draw, n, [record(*p) for p in pairs], questions, filler=False)


def variable(draw: Draw, n: int, kit: Kit) -> Example:
    """Chains of four assignments; the question is about a chain's last variable."""
    hops = 4
    chains = max(1, min(n // 32, NAMES) // hops) if kit.dense else 1 + min(3, n // 512)
    flat = draw.words(chains * hops, KEY)
    names = [flat[c * hops : (c + 1) * hops] for c in range(chains)]
    values = [number(draw) for _ in range(chains)]
    records, where = [], [[] for _ in range(chains)]
    for c in draw.shuffled(list(range(chains)) * hops):  # the links of a chain stand in order
        i = len(where[c])
        where[c].append(len(records))
        records.append(record(names[c][i], names[c][i - 1] if i else values[c]))
    questions = [Question(f"\n!{names[c][-1]}=", values[c], tuple(where[c]), GUESS)
                 for c in draw.sample(chains, chains if kit.dense else 1)]
    return kit.plant(draw, n, records, questions)


def mqar(draw: Draw, n: int, kit: Kit) -> Example:
    """Multi-query associative recall (Arora et al. 2023): pairs of symbols, then queries at power-law gaps.

    n / 4 pairs, at most half of the symbols as keys; the gap between a pair and its query is drawn with density
    proportional to gap^(a - 1), a = 0.01. Other places of the second part hold random values.
    """
    half = len(kit.symbols) // 2
    pairs = min(n // 4, half)
    if pairs < 1:
        raise ConfigError(f"config length={n}: mqar needs 4 tokens and 2 symbols; raise it")
    keys, values = draw.sample(half, pairs), half + draw.numbers(half, pairs)
    first = 2 * pairs
    slots = (n - first) // 2
    tokens = np.concatenate([np.stack([keys, values], 1).reshape(-1), half + draw.numbers(half, n - first)])
    free, answers = np.ones(slots, bool), []
    gaps = np.arange(1, slots + 1, dtype=float) ** (0.01 - 1)
    gaps = np.cumsum(gaps / gaps.sum())
    for i in range(min(pairs, slots)):
        slot = min(int(np.searchsorted(gaps, draw.uniform())), slots - 1)
        while not free[slot]:
            slot = (slot + 1) % slots
        free[slot] = False
        at = first + 2 * slot
        tokens[at], tokens[at + 1] = keys[i], values[i]
        answers.append((at + 1, 2 * i + 1))
    return kit.raw(tokens, sorted(answers), 1 / half)


def palindrome(draw: Draw, n: int, kit: Kit) -> Example:
    """Symbols, a mark, and the symbols backwards."""
    m = (n - 1) // 2
    word = draw.numbers(len(kit.symbols) - 1, m)
    tokens = np.concatenate([word, [len(kit.symbols) - 1], word[::-1]])
    return kit.raw(tokens, [(m + 1 + i, m - 1 - i) for i in range(m)], 1 / (len(kit.symbols) - 1))


def stack(draw: Draw, n: int, kit: Kit) -> Example:
    """Up to 64 stacks, used in turns: push, stack, element; or pop, stack, and the element that comes off."""
    stacks = min(STACKS, max(1, len(kit.symbols) // 4))
    push, pop, first = 0, 1, 2 + stacks
    elements = len(kit.symbols) - first
    held: list[list[tuple[int, int]]] = [[] for _ in range(stacks)]
    tokens, answers = [], []
    while len(tokens) + 3 <= n:
        full = [s for s in range(stacks) if held[s]]
        if full and draw.below(2):
            s = full[draw.below(len(full))]
            element, at = held[s].pop()
            answers.append((len(tokens) + 2, at))
            tokens += [pop, 2 + s, first + element]
        else:
            s, element = draw.below(stacks), draw.below(elements)
            held[s].append((element, len(tokens) + 2))
            tokens += [push, 2 + s, first + element]
    return kit.raw(np.array(tokens, np.int64), answers, 1 / elements)

"""Tasks over a whole window: counting, order, walks, facts in documents (`training.md` B.3).

    common_words, frequent_words   which words stand there most often (RULER's CWE and FWE)
    ordinal                        the i-th of several near-identical requests (as in MRCR)
    graph                          nodes two edges away (as in GraphWalks)
    document_qa                    one to three facts, planted in real documents
    count, total, join             over records that stand in documents of their own
    chunk_order                    a document cut up and shuffled: the order of its chunks
"""

from __future__ import annotations

import math

import numpy as np

from trillium_moe.data.examples import Answer, Draw, Example, Kit, Question
from trillium_moe.data.tasks_recall import number

COLOURS = ("red", "blue", "green", "white", "black")
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th")


def _listed(draw: Draw, n: int, kit: Kit, words: list[str], question: str, answer: list[str], chance: float) -> Example:
    """Words, one after another, and a question about all of them."""
    asked = Question(question, " ".join(answer), (0,), chance)
    room = n - kit.cost(asked.ask, asked.answer)
    texts, used = [], 0
    for word in words:
        text = f" {word}"
        used += kit.cost(text)
        if used > room:
            break
        texts.append(text)
    return kit.plant(draw, n, texts, [asked], filler=False)


def _repeats(kit: Kit, n: int, question: str, answers: int) -> int:
    """Words of three letters that fit beside a question with so many in its answer."""
    per_word = max(kit.cost(" abc"), 4)
    return max(answers + 1, (n - kit.cost(question) - answers * per_word) // per_word)


def common_words(draw: Draw, n: int, kit: Kit) -> Example:
    """Three words stand there five times as often as the others; name them, by the alphabet."""
    question, k = "\nmost common:", 3
    room = _repeats(kit, n, question, k)
    rare = max(1, room // 40)  # times that a common word stands there, a fifth of it for the others
    often = 5 * rare
    others = max(1, (room - k * often) // rare)
    words = draw.words(k + others, 3)
    bag = [w for w in words[:k] for _ in range(often)] + [w for w in words[k:] for _ in range(rare)]
    chance = 1 / math.comb(len(words), k)
    return _listed(draw, n, kit, draw.shuffled(bag[:room]), question, sorted(words[:k]), chance)


def frequent_words(draw: Draw, n: int, kit: Kit) -> Example:
    """Words with Zipf frequencies (exponent 2); name the three most frequent, in order."""
    question, k = "\nmost frequent:", 3
    room = _repeats(kit, n, question, k)
    share = 1 / np.arange(1, 17, dtype=float) ** 2
    counts = np.maximum(1, np.floor(room * share / share.sum()).astype(int))
    # ties would leave the order open
    counts[:k] = np.maximum(counts[:k], counts[k] + np.arange(k, 0, -1))
    words = draw.words(len(counts), 3)
    bag = [w for w, c in zip(words, counts) for _ in range(c)]
    while len(bag) > room and len(counts) > k + 1:  # a short window holds fewer words
        counts, words = counts[:-1], words[:-1]
        bag = [w for w, c in zip(words, counts) for _ in range(c)]
    chance = 1 / math.perm(len(words), k)
    return _listed(draw, n, kit, draw.shuffled(bag), question, words[:k], chance)


def ordinal(draw: Draw, n: int, kit: Kit) -> Example:
    """Several lines about each of a few subjects; give the i-th one about a subject."""
    each = max(2, min(len(ORDINALS), n // 256))
    subjects = draw.words(2, 3)
    flat = draw.shuffled([subject for subject in subjects for _ in range(each)])
    values = draw.words(len(flat), 3)
    records = [f"\n*{subject}: {value}\n" for subject, value in zip(flat, values)]
    where = {subject: [i for i, s in enumerate(flat) if s == subject] for subject in subjects}
    every = [(subject, i) for subject in subjects for i in range(each)]
    picked = draw.shuffled(every) if kit.dense else [every[draw.below(len(every))]]
    questions = [Question(f"\n{ORDINALS[i]} {subject}:", f" {values[where[subject][i]]}", (where[subject][i],),
                          1 / each) for subject, i in picked]
    return kit.plant(draw, n, records, questions)


def graph(draw: Draw, n: int, kit: Kit) -> Example:
    """A list of edges, two out of every node; the nodes two edges away, by the alphabet."""
    nodes = max(4, min(26**2 // 2, (n - 48) // (2 * max(6, kit.cost("\nab>cd")))))
    names = draw.words(nodes, 2)
    out = {i: draw.sample(nodes - 1, 2) for i in range(nodes)}
    edges = draw.shuffled([(i, j + (j >= i)) for i in out for j in out[i]])
    start = draw.below(nodes)
    first = [b for a, b in edges if a == start]
    reached = sorted({names[b] for a, b in edges if a in first})
    evidence = tuple(i for i, (a, _) in enumerate(edges) if a == start or a in first)
    question = Question(f"\n{names[start]}>>", ",".join(reached), evidence, 1 / math.comb(nodes, len(reached)))
    return kit.plant(draw, n, [f"\n{names[a]}>{names[b]}" for a, b in edges], [question], filler=False)


def document_qa(draw: Draw, n: int, kit: Kit) -> Example:
    """Facts in real documents: a part's keeper, the keeper's room, the room's telephone. One to three are needed."""
    sets = max(1, min(4, n // 512))
    words = draw.words(3 * sets, 3)
    facts, needed = [], 1 + draw.below(3)
    for s in range(sets):
        part, keeper, room = words[3 * s : 3 * s + 3]
        facts += [(s, 0, f"\nPart {part} is kept by {keeper}.\n"), (s, 1, f"\n{keeper} works in room {room}.\n"),
                  (s, 2, f"\nThe telephone of room {room} is {number(draw)}.\n")]
    facts = draw.shuffled(facts)
    s = draw.below(sets)
    where = {j: i for i, (t, j, _) in enumerate(facts) if t == s}
    part, keeper, room = words[3 * s : 3 * s + 3]
    ask = {1: f"\nWho keeps part {part}?", 2: f"\nIn which room is the keeper of part {part}?",
           3: f"\nWhich telephone reaches the keeper of part {part}?"}[needed]
    answer = {1: keeper, 2: room, 3: facts[where[2]][2][-5:-2]}[needed]
    question = Question(ask, f" {answer}", tuple(where[j] for j in range(needed)), 1 / sets)
    return kit.plant(draw, n, [text for *_, text in facts], [question], apart=True)


def _entries(draw: Draw, n: int) -> int:
    return max(2, min(9, n // 128)) - draw.below(2)


def count(draw: Draw, n: int, kit: Kit) -> Example:
    """How many documents have a colour."""
    colours = [COLOURS[draw.below(len(COLOURS))] for _ in range(_entries(draw, n))]
    asked = colours[draw.below(len(colours))]
    evidence = tuple(i for i, c in enumerate(colours) if c == asked)
    question = Question(f"\nhow many are {asked}?", f" {len(evidence)}", evidence, 1 / len(colours))
    return kit.plant(draw, n, [f"\ncolour: {c}\n" for c in colours], [question], apart=True)


def total(draw: Draw, n: int, kit: Kit) -> Example:
    """The sum of prices that stand in different documents."""
    prices = [1 + draw.below(9) for _ in range(_entries(draw, n))]
    question = Question("\ntotal price?", f" {sum(prices)}", tuple(range(len(prices))), 1 / (8 * len(prices) + 1))
    return kit.plant(draw, n, [f"\nprice: {p}\n" for p in prices], [question], apart=True)


def join(draw: Draw, n: int, kit: Kit) -> Example:
    """Some documents name the owner of a box, others the town of an owner: the town of a box."""
    pairs = max(1, min(16, n // 192))
    boxes, owners, towns = (draw.words(pairs, 3) for _ in range(3))
    records = draw.shuffled([f"\nbox {b} belongs to {o}\n" for b, o in zip(boxes, owners)]
                            + [f"\n{o} lives in {t}\n" for o, t in zip(owners, towns)])
    picked = draw.sample(pairs, pairs if kit.dense else 1)
    questions = [
        Question(f"\ntown of box {boxes[i]}?", f" {towns[i]}",
                 (records.index(f"\nbox {boxes[i]} belongs to {owners[i]}\n"),
                  records.index(f"\n{owners[i]} lives in {towns[i]}\n")), 1 / pairs)
        for i in picked
    ]  # fmt: skip
    return kit.plant(draw, n, records, questions, apart=True)


def chunk_order(draw: Draw, n: int, kit: Kit) -> Example:
    """A stretch of text in chunks, shuffled and lettered; the letters in the order of the text."""
    k = max(2, min(8, n // 64))
    marks = [kit.encode(f"\n[{chr(65 + i)}]") for i in range(k)]
    ask = kit.encode("\norder:")
    # the chunk that stands i-th is the order[i]-th of the text
    order = draw.sample(k, k)
    answer = kit.encode("".join(chr(65 + order.index(i)) for i in range(k)))
    size = max(1, (n - sum(map(len, marks)) - len(ask) - len(answer)) // k)
    text = kit.haystack(draw, k * size)
    parts = [part for i in range(k) for part in (marks[i], text[order[i] * size : (order[i] + 1) * size])]
    tokens = np.concatenate([*parts, ask, answer]).astype(np.int32)
    if len(tokens) > n:
        tokens = tokens[-n:]
    stop = len(tokens)
    return Example(tokens, (Answer(stop - len(answer), stop, 0.0, 1 / math.factorial(k)),))

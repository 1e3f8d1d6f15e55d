"""What a model reads from pictures that it has not seen, task by task, beside what it would get without looking.

An answer is exact if the most probable token is the right one at every place of it, its end included: just what greedy
decoding gives. Captions have no single right answer, so for them the share of right tokens and the loss count. `chance`
is the score of the best constant answer; a model given the picture of another example of the task must not be better.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trillium_moe.config import Config
from trillium_moe.data.picture_tasks import Example
from trillium_moe.data.pictures import Drawer, Encoded, build_picture_row, no_pictures, room_of
from trillium_moe.data.tokenizer import Tokenizer
from trillium_moe.model.context import Context
from trillium_moe.model.vision import images_of
from trillium_moe.shapes import PyTree
from trillium_moe.train.loss import cross_entropy
from trillium_moe.train.state import model_def
from trillium_moe.train.step import in_mesh

FREE = ("captions",)  # tasks without a single right answer


class Score(NamedTuple):
    """Of one task."""

    accuracy: float  # share of exact answers; for captions of right tokens
    chance: float  # of the best constant answer; for captions of the most common token
    loss: float  # nats per token of the answers
    n: int  # examples


def make_suite(drawer: Drawer, n: int, seed: int = 0) -> dict[str, list[Example]]:
    """n held-out examples of every kind of question, the same for every run; all captions that are held out."""
    out: dict[str, list[Example]] = {}
    for number, (name, task) in enumerate(drawer.tasks.items()):
        if hasattr(task, "everything"):
            out[name] = list(task.everything(True))
            continue
        rng, found = np.random.default_rng([seed, number]), {}
        for _ in range(100 * n):
            example = task(rng, True)
            kept = found.setdefault(example.task, [])
            if len(kept) < n:
                kept.append(example)
            if all(len(kept) == n for kept in found.values()) and sum(map(len, found.values())) >= n:
                if rng.random() < 0.05:  # a few more draws: a rare kind of question may not have come yet
                    break
        out |= found
    return out


def exchanged(examples: Sequence[Example]) -> list[Example]:
    """Every text with the pictures of the next example."""
    return [replace(e, pictures=other.pictures) for e, other in zip(examples, [*examples[1:], examples[0]])]


def make_predict(config: Config, mesh: Mesh | None = None) -> Callable[[PyTree, PyTree, Any], tuple[Any, Any]]:
    """f(params, router_bias, batch) -> (most probable tokens [B,T], nats of the targets [B,T]), jitted."""
    graphdef = model_def(config.model)[0]
    placed = {} if mesh is None else {"out_shardings": NamedSharding(mesh, P())}

    @functools.partial(jax.jit, **placed)
    @in_mesh(mesh)
    def predict(params, router_bias, batch):
        model = nnx.merge(graphdef, params, router_bias)
        h, _ = model.hidden(batch["tokens"], Context(batch["segment_ids"]), images_of(batch))

        def row(xs):
            logits = model.logits(xs[0])
            return jnp.argmax(logits, -1).astype(jnp.int32), cross_entropy(logits, xs[1])

        return jax.lax.map(row, (h, batch["targets"]))

    return predict


def batches_of(
    documents: Sequence[Encoded], config: Config, pad_id: int, rows: int
) -> Iterator[tuple[dict[str, np.ndarray], list[tuple[int, int, int]]]]:
    """Batches that hold every document once, in order, and (row, first token, document) of those in each."""
    room, filled, current = room_of(config), [], []
    tokens = patches = 0
    for i, d in enumerate(documents):
        if not room.holds(tokens + len(d.ids), patches + len(d.patches)) and current:
            filled.append(current)
            current, tokens, patches = [], 0, 0
        current.append(i)
        tokens, patches = tokens + len(d.ids), patches + len(d.patches)
    filled.append(current)
    for first in range(0, len(filled), rows):
        built, where = [], []
        for r, members in enumerate(filled[first : first + rows]):
            built.append(build_picture_row([documents[i] for i in members], room, pad_id))
            starts = np.cumsum([0] + [len(documents[i].ids) for i in members])
            where += [(r, int(s), i) for s, i in zip(starts, members)]
        empty = dict(zip(("patches", "place"), no_pictures(room)))
        empty = {name: empty.get(name, np.zeros_like(x)) for name, x in built[0].items()}
        built += [empty] * (rows - len(built))
        yield {name: np.stack([row[name] for row in built]) for name in built[0]}, where


class Answer(NamedTuple):
    """What the model would say, token by token given the right ones before."""

    predicted: np.ndarray
    expected: np.ndarray
    nats: np.ndarray


def answers(
    predict: Callable[[dict], Any], documents: Sequence[Encoded], config: Config, pad_id: int
) -> list[Answer]:
    """The model's answer to every document, in order; `predict` is `make_predict`'s for a batch."""
    out: dict[int, Answer] = {}
    pending = []
    for batch, where in batches_of(documents, config, pad_id, config.data.batch_size):
        pending.append((predict(batch), where))
    for results, where in pending:
        predicted, nats = jax.device_get(results)
        for r, start, i in where:
            d = documents[i]
            at = start + np.flatnonzero(d.loss) - 1  # a token is predicted at the place before it
            out[i] = Answer(predicted[r, at], d.ids[d.loss], nats[r, at])
    return [out[i] for i in range(len(documents))]


def score(task: str, found: Sequence[Answer]) -> Score:
    """The score of the answers to one task."""
    loss = float(np.concatenate([a.nats for a in found]).mean())
    if task in FREE:
        expected = np.concatenate([a.expected for a in found])
        right = np.concatenate([a.predicted for a in found]) == expected
        return Score(float(right.mean()), float(np.bincount(expected).max() / len(expected)), loss, len(found))
    right = [np.array_equal(a.predicted, a.expected) for a in found]
    constant = Counter(a.expected.tobytes() for a in found).most_common(1)[0][1] / len(found)
    return Score(float(np.mean(right)), constant, loss, len(found))


class Suite:
    """The held-out examples of a config's tasks, and the program that answers them."""

    def __init__(self, config: Config, tokenizer: Tokenizer, mesh: Mesh | None = None,
                 place: Callable[[dict], Any] = lambda batch: batch):
        self.config, self.tokenizer, self.place = config, tokenizer, place
        self.drawer = Drawer(config, tokenizer)
        self.examples = make_suite(self.drawer, config.images.eval_examples)
        self.predict = make_predict(config, mesh)
        self.found: dict[str, list[Answer]] = {}  # of the last call, pictures as they are

    def __call__(self, params: PyTree, router_bias: PyTree) -> dict[str, dict[str, Score]]:
        """{"true": scores by task, "exchanged": the same with the pictures exchanged}."""
        out: dict[str, dict[str, Score]] = {"true": {}, "exchanged": {}}
        run = lambda batch: self.predict(params, router_bias, self.place(batch))
        for task, examples in self.examples.items():
            for kind, shown in (("true", examples), ("exchanged", exchanged(examples))):
                found = answers(run, [self.drawer.encode(e) for e in shown], self.config, self.tokenizer.pad_id)
                out[kind][task] = score(task, found)
                if kind == "true":
                    self.found[task] = found
        return out

    def said(self, per_task: int) -> list[tuple[Example, str]]:
        """The first examples of each task, and what the model answered in the last call, token by token."""
        decode = lambda a: self.tokenizer.decode(a.predicted[:-1])
        return [(e, decode(a)) for task, examples in self.examples.items()
                for e, a in itertools.islice(zip(examples, self.found.get(task, ())), per_task)]


def as_metrics(scores: dict[str, dict[str, Score]]) -> dict[str, float]:
    """Flat: vision/words, vision/words_chance, vision/words_exchanged, vision/captions_loss."""
    out = {}
    for task, s in scores["true"].items():
        out |= {f"vision/{task}": s.accuracy, f"vision/{task}_chance": s.chance,
                f"vision/{task}_exchanged": scores["exchanged"][task].accuracy, f"vision/{task}_loss": s.loss}
    return out


def table(scores: dict[str, dict[str, Score]]) -> Iterable[str]:
    """Lines for a terminal."""
    yield f"{'task':12} {'exact':>7} {'chance':>7} {'pictures exchanged':>19} {'nats/token':>11} {'n':>5}"
    for task, s in scores["true"].items():
        other = scores["exchanged"][task].accuracy
        yield f"{task:12} {s.accuracy:7.1%} {s.chance:7.1%} {other:19.1%} {s.loss:11.3f} {s.n:5d}"

"""Supervised training on traces that a policy without a model plays: the protocol, and no strategy.

Few random traces find what is asked for, and their answers are a few tokens among many: a small model has learnt the
calls long before it copies what it read. So some traces are lessons in answering: their calls, half of them the
oracle's, are context that the loss leaves out, and only the answer is learned. What is learned of calls is random.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from trillium_moe.rl import batch, env
from trillium_moe.rl.config import RLConfig, SFTConfig
from trillium_moe.rl.env import Session
from trillium_moe.rl.protocol import Protocol, Turn
from trillium_moe.rl.rollout import Rollout
from trillium_moe.rl.trajectory import Part


def trace(session: Session, policy: env.Policy, protocol: Protocol, effort: str, limit: int) -> list[Part]:
    """A trajectory as `Rollout` would record it. One that would pass `limit` tokens ends before."""
    parts, turn = [Part()], 0
    parts[-1].give(protocol.prompt(session.episode.tools, session.episode.question, effort), 0)
    while not session.done:
        action = policy(session.episode)
        said = protocol.turn(action)
        if len(parts[-1]) + len(said) > limit:
            break
        parts[-1].sample(said, [0.0] * len(said), 0, turn)
        outcome = session.step(Turn(action))
        turn += 1
        if outcome.done:
            break
        if outcome.compacted is not None:
            parts.append(Part())
            parts[-1].give(protocol.prompt(session.episode.tools, outcome.compacted, effort), turn)
        else:
            observation = protocol.observation(outcome.observation)
            if len(parts[-1]) + len(observation) > limit:
                break
            parts[-1].give(observation, turn)
    return [part for part in parts if any(part.mask)]


def traces(config: RLConfig, rollout: Rollout, start: int) -> Iterator[Part]:
    """Endless parts of traces of train tasks from number `start` on."""
    number = start
    while True:
        (t,) = rollout.new_group(number, samples=1)
        session = rollout.session(t)
        rng = np.random.default_rng([config.seed, number, 7])
        lesson = rng.random() < config.sft.answers
        policy = env.helped(rng) if lesson else traced(config.sft, rng, session.episode.budget)
        parts = trace(session, policy, rollout.protocol, t.effort, config.rollout.max_tokens)
        number += 1
        if lesson:
            parts = only_last(parts) if session.end == "answer" else []
        yield from parts


def traced(c: SFTConfig, rng: np.random.Generator, budget: int) -> env.Policy:
    """The policy of a trace that is no lesson."""
    if c.policy == "oracle":
        return env.oracle
    tired = c.give_up and rng.random() < c.give_up
    return env.explorer(rng, patience=int(rng.integers(1, budget + 1)) if tired else 0)


def only_last(parts: list[Part]) -> list[Part]:
    """The last part, of which only the last turn is learned."""
    part = parts[-1]
    last = max(part.turn)
    part.mask = [int(mask and turn == last) for turn, mask in zip(part.turn, part.mask)]
    return [part]


def batches(config: RLConfig, rollout: Rollout, steps: int, first: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """One batch of whole traces a step; every step has traces of its own."""
    size = config.rows * config.row
    for step in range(first, first + steps):
        sequences, filled = [], 0
        for part in traces(config, rollout, (1 << 24) + (step << 10)):
            s = batch.sequence(part, np.zeros(0))
            if filled + len(s["tokens"]) > 0.9 * size:  # what first fit surely has room for
                break
            sequences.append(s)
            filled += len(s["tokens"])
        batch.weigh(sequences, "reinforce", config.row)
        yield next(batch.micro_batches(sequences, config.row, config.rows))


def ahead(items: Iterator) -> Iterator:
    """The same items, each made in another thread while the one before is in use."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = pool.submit(next, items, None)
            yield item

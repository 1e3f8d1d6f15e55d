"""Rollouts: state reuse against prefilling everything again, and what a trajectory records."""

import dataclasses
import functools
import zlib

import jax
import numpy as np
import pytest

from tests.models import random_variables
from tests.trillium_moe.test_cache import close, config
from trillium_moe.config import KDAConfig
from trillium_moe.infer.engine import Decoded, Engine, EngineConfig
from trillium_moe.rl.config import RolloutConfig, TaskConfig
from trillium_moe.rl.env import explorer
from trillium_moe.rl.protocol import GIVEN, TOOLS, Protocol
from trillium_moe.rl.rollout import Rollout
from trillium_moe.rl.trajectory import Trajectory
from trillium_moe.rl.vocabulary import WordTokenizer

MODEL = config(n_layers=2, vocab_size=480, kda=KDAConfig(n_heads=2, head_dim=8, implementation="reference"))
SIZES = EngineConfig(slots=8, capacity=384, chunks=(24,), steps=5)
ROLLOUT = RolloutConfig(groups=1, samples=8, max_message=10, max_tokens=384)


@functools.cache
def weights():
    return random_variables(MODEL, std=0.3, noise=0.1)[1:]


class Scripted(Engine):
    """An engine that says what a policy plays: decoding appends given tokens, and remembers closed slots."""

    def __init__(self, say):
        super().__init__(MODEL, *weights(), SIZES)
        self.say, self.closed = say, []

    def decode(self):
        tokens = np.full((SIZES.slots, 10), -1, np.int32)
        said = {int(slot): self.say(int(slot)) for slot in np.flatnonzero(self.left > 0)}
        before = self.prefilled
        self.extend_all(said)
        self.prefilled = before
        for slot, ids in said.items():
            tokens[slot, : len(ids)] = ids
        self.left[:] = 0
        return Decoded(tokens, np.zeros(tokens.shape, np.float32))

    def close(self, slot):
        self.closed.append(slot)
        super().close(slot)


def scripted(spec, rollout=ROLLOUT, stop=0.0):
    """(engine, rollout) in which every sample plays random calls: a function of what it is and of the turn."""
    protocol = Protocol(WordTokenizer())

    def say(slot):
        r = next(r for r in out.running if r.slot == slot)
        rng = np.random.default_rng([zlib.crc32(r.trajectory.id.encode()), r.trajectory.turns])
        return protocol.turn(explorer(rng, stop)(r.session.episode))

    class Watched(Rollout):
        def _turn(self, running, *args):
            self.running = running
            return super()._turn(running, *args)

    engine = Scripted(say)
    out = Watched(engine, protocol, TaskConfig(envs=(spec,)), rollout, seed=0)
    return engine, out


def test_fork_and_extend_equal_a_full_prefill_after_twenty_turns():
    engine, rollout = scripted("read_page:budget=19:pages=4")
    group = rollout.new_group(0)
    rollout.run([group], version=3)
    assert [t.turns for t in group] == [20] * 8 and all(t.end == "budget" for t in group)
    assert len({tuple(t.parts[0].tokens) for t in group}) == 8
    assert rollout.counts.saved >= 0.8
    print(f"prefill tokens saved at K=8, 20 turns: {rollout.counts.saved:.1%}")
    fresh = Engine(MODEL, *weights(), SIZES)
    slots = [fresh.open() for _ in group]
    fresh.extend_all({slot: t.parts[0].tokens for slot, t in zip(slots, group)})
    for mine, slot, t in zip(engine.closed, slots, group):
        n = len(t.parts[0]) - 1
        assert engine.length[mine] == fresh.length[slot] == n and engine.pending[mine] == fresh.pending[slot]
        for a, b in zip(engine.cache.mla, fresh.cache.mla):
            close(a.values[mine, :n], b.values[slot, :n])
        jax.tree.map(lambda a, b, i=mine, j=slot: close(a[i], b[j]), engine.cache.kda, fresh.cache.kda)
    assert engine.free and sorted(engine.free) == list(range(8))


def test_a_trajectory_is_what_the_environment_saw():
    _, rollout = scripted("read_page:budget=3")
    (t, *_) = group = rollout.new_group(4)
    rollout.run([group], version=7)
    part = t.parts[0]
    assert len({len(x) for x in (part.tokens, part.mask, part.logprob, part.version, part.turn, part.channel)}) == 1
    shown = rollout.protocol.show(part.tokens, part.mask).splitlines()
    assert shown[1].startswith("  user: find")
    assert [line[:8] for line in shown if line.startswith(">")] == ["> tools:"] * 4
    mask = np.array(part.mask, bool)
    assert set(np.array(part.version)[mask]) == {7} and set(np.array(part.version)[~mask]) == {-1}
    assert set(np.array(part.channel)[~mask]) == {GIVEN} and set(np.array(part.channel)[mask]) == {TOOLS}
    assert t.calls == 4 and t.rewards == [-0.02] * 4 and t.sampled == mask.sum()
    session = rollout.session(dataclasses.replace(t, turns=2))
    assert session.calls == 2  # played again from the tokens alone
    assert Trajectory.from_json(t.to_json()) == t


def test_compaction_begins_a_new_part():
    engine, rollout = scripted("memory:facts=4:every=2:budget=6")
    group = rollout.new_group(1)
    rollout.run([group], version=0)
    for t in group:
        assert len(t.parts) >= 3 and all(sum(p.mask) for p in t.parts)
        turns = [turn for p in t.parts for turn in sorted({u for u, m in zip(p.turn, p.mask) if m})]
        assert turns == list(range(t.turns))
        assert all(p.tokens[0] == rollout.protocol.bos for p in t.parts)
    assert sorted(engine.free) == list(range(8))


def test_a_pause_keeps_what_was_said():
    """Rollouts that stop when a third is done, under newer and newer policies, play the same episodes as one."""
    whole = scripted("read_page:pages=3", stop=0.7)[1]
    want = [whole.new_group(i, samples=4) for i in range(2)]
    whole.run(want, version=0)
    engine, rollout = scripted("read_page:pages=3", stop=0.7)
    groups = [rollout.new_group(i, samples=4) for i in range(2)]
    unfinished = []
    for version in range(9):
        rollout.run(groups, version, pause=min(1.0, (version + 1) / 3))
        unfinished.append(sum(not t.done for g in groups for t in g))
        assert sorted(engine.free) == list(range(8))
    assert 0 < unfinished[0] < 8 and unfinished[-1] == 0
    for t, w in zip((t for g in groups for t in g), (t for g in want for t in g)):
        assert (t.parts[0].tokens, t.rewards, t.end, t.errors) == (w.parts[0].tokens, w.rewards, w.end, w.errors)
        assert (np.diff(t.versions) >= 0).all() and set(w.versions) == {0}
    assert max(len(set(t.versions)) for g in groups for t in g) > 1  # some span several policies


@pytest.mark.parametrize("limit, end", [({"max_tokens": 60}, "context"), ({"max_message": 3}, "overlong"),
                                        ({"max_seconds": 1e-9}, "time")])
def test_limits_end_a_trajectory(limit, end):
    engine, rollout = scripted("read_page", rollout=dataclasses.replace(ROLLOUT, **limit))
    if end == "overlong":
        engine.say = lambda slot: rollout.protocol.text("tools index index")
    group = rollout.new_group(0)
    rollout.run([group], version=0)
    assert {t.end for t in group} == {end} and all(t.success == 0 for t in group)
    assert all(len(p) <= rollout.config.max_tokens for t in group for p in t.parts)

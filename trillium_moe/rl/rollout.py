"""Rollouts on the inference engine: groups forked from one prefill, observations appended, pauses between policies.

All running trajectories take a turn together: one decoding program samples the messages, Python runs the tools, one
prefill program appends what they said. No shape depends on the episodes.

A rollout stops when a fraction `pause` of the trajectories in flight has finished. Unfinished ones keep their tokens
and go on first in the next rollout, under newer weights: their context is prefilled again with those, so that the
log-probability stored with a token is exactly that of its policy version. A group is complete when all its samples are.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from trillium_moe.infer.engine import Engine
from trillium_moe.infer.sampling import Sampling
from trillium_moe.rl.config import RolloutConfig, TaskConfig
from trillium_moe.rl.env import Environment, Session, make_env
from trillium_moe.rl.protocol import Protocol
from trillium_moe.rl.trajectory import Group, Part, Trajectory


@dataclass
class Counts:
    """Work of a rollout, in tokens."""

    prefilled: int = 0  # that went through prefill
    naive: int = 0  # that would have, had every turn prefilled its whole history
    decoded: int = 0
    forward: int = 0  # rows x steps of all programs, idle rows included: what the rollout cost

    @property
    def saved(self) -> float:
        """Share of prefill tokens saved by forking and extending."""
        return 1 - self.prefilled / self.naive if self.naive else 0.0


@dataclass
class Running:
    """A trajectory in a slot."""

    trajectory: Trajectory
    session: Session
    slot: int
    began: float = field(default_factory=time.monotonic)


class Rollout:
    """Samples trajectories of the tasks that `tasks` describes."""

    def __init__(self, engine: Engine, protocol: Protocol, tasks: TaskConfig, config: RolloutConfig, seed: int):
        self.engine, self.protocol, self.tasks, self.config, self.seed = engine, protocol, tasks, config, seed
        self.envs: list[Environment] = [make_env(spec) for spec in tasks.envs]
        self.counts = Counts()

    # --- tasks

    def new_group(self, number: int, split: str = "train", samples: int = 0) -> Group:
        """The samples of task `number`, none of which has begun. Environments and efforts take turns."""
        efforts = self.tasks.efforts or ("",)
        env = number % len(self.envs)
        effort = efforts[number // len(self.envs) % len(efforts)]
        make = lambda k: Trajectory(number, k, env, self.seed + number, split, effort)
        return [make(k) for k in range(samples or self.config.samples)]

    def session(self, trajectory: Trajectory) -> Session:
        """The session of a trajectory, by playing its complete turns again."""
        episode = self.envs[trajectory.env].episode(trajectory.seed, trajectory.split)
        session = Session(episode, self.tasks.call_cost)
        for turn in range(trajectory.turns):
            ids = next(ids for part in trajectory.parts if (ids := part.sampled(turn)))
            session.step(self.protocol.parse(ids, episode.tools))
        return session

    # --- running

    def run(self, groups: Sequence[Group], version: int, *, pause: float = 1.0, greedy: bool = False) -> None:
        """Continues the unfinished trajectories of `groups` until the fraction `pause` of them is done.

        Of those that are unfinished now: counted over all, groups that each wait for one sample would never go on.
        """
        todo = sum(not t.done for group in groups for t in group)
        done = 0
        running = self._start(groups)
        while running and done < pause * todo:
            before = len(running)
            running = self._turn(running, version, greedy)
            done += before - len(running)
        for r in running:
            self.engine.close(r.slot)

    def _start(self, groups: Sequence[Group]) -> list[Running]:
        """Puts all unfinished trajectories into slots: those that go on by prefill, new groups by forks."""
        engine, running, feed, forks = self.engine, [], {}, []
        for group in groups:
            fresh = [t for t in group if not len(t.parts[0])]
            for t in group:
                if t.done or t in fresh[1:]:
                    continue
                running.append(Running(t, self.session(t), engine.open()))
                if t in fresh:
                    episode = running[-1].session.episode
                    t.parts[-1].give(self.protocol.prompt(episode.tools, episode.question, t.effort), 0)
                    forks.append((running[-1], fresh[1:]))
                feed[running[-1].slot] = t.parts[-1].tokens
        self._feed(feed)
        for first, others in forks:
            if not others:
                continue
            for t, slot in zip(others, engine.fork(first.slot, len(others))):
                t.parts[-1].give(first.trajectory.parts[-1].tokens, 0)
                running.append(Running(t, self.session(t), slot))
                self.counts.naive += len(t.parts[-1])
        return running

    def _feed(self, tokens: dict[int, list[int]]) -> None:
        if not tokens:
            return
        prefilled, computed = self.engine.prefilled, self.engine.computed
        self.engine.extend_all(tokens)
        self.counts.prefilled += self.engine.prefilled - prefilled
        self.counts.forward += self.engine.computed - computed
        self.counts.naive += sum(int(self.engine.length[slot]) + 1 for slot in tokens)

    def _turn(self, running: list[Running], version: int, greedy: bool) -> list[Running]:
        """One call of decode, the tools of the turns it completed, their observations. Returns who goes on."""
        engine, c = self.engine, self.config
        for r in running:
            if engine.left[r.slot] == 0:
                t = r.trajectory
                said = len(t.parts[-1].sampled(t.turns))  # of a turn that a pause cut
                seed = zlib.crc32(f"{self.seed}/{t.id}/{t.turns}/{said}/{t.split}".encode())
                engine.start(r.slot, c.max_message - said, Sampling(0.0 if greedy else c.temperature, seed=seed),
                             (self.protocol.end,))
        computed = engine.computed
        decoded = engine.decode()
        self.counts.forward += engine.computed - computed
        feed, on = {}, []
        for r in running:
            t, part, slot = r.trajectory, r.trajectory.parts[-1], r.slot
            n = int((decoded.tokens[slot] >= 0).sum())
            part.sample(decoded.tokens[slot, :n].tolist(), decoded.logprobs[slot, :n].tolist(), version, t.turns)
            self.counts.decoded += n
            if engine.left[slot] == 0:
                observation = self._act(r)
                if observation:
                    feed[r.slot] = observation
            if t.done:
                engine.close(r.slot)
            else:
                on.append(r)
        self._feed(feed)
        return on

    def _act(self, r: Running) -> list[int]:
        """Runs the turn that was just completed; returns what the model is given next."""
        t, part, session, c = r.trajectory, r.trajectory.parts[-1], r.session, self.config
        ids = part.sampled(t.turns)
        part.channel[-len(ids) :] = self.protocol.channels(ids)
        t.potentials.append(session.episode.potential())
        outcome = session.step(self.protocol.parse(ids, session.episode.tools))
        if not outcome.done and ids[-1] != self.protocol.end:
            outcome = session.finish("overlong", outcome.reward)
        observation: list[int] = []
        if not outcome.done:
            new = outcome.compacted
            prompt = new is not None
            observation = (self.protocol.prompt(session.episode.tools, new, t.effort) if prompt
                           else self.protocol.observation(outcome.observation))
            held = 0 if prompt else len(part)
            if held + len(observation) + c.max_message > c.max_tokens:
                outcome = session.finish("context", outcome.reward)
            elif c.max_seconds and time.monotonic() - r.began > c.max_seconds:
                outcome = session.finish("time", outcome.reward)
        t.rewards.append(outcome.reward)
        t.turns += 1
        t.calls, t.success, t.public = session.calls, session.success, session.public
        t.errors, t.used = dict(session.errors), dict(session.used)
        t.end = session.end
        if outcome.done:
            return []
        if outcome.compacted is not None:  # nothing of the old context is left
            self.engine.close(r.slot)
            r.slot = self.engine.open()
            t.parts.append(Part())
        t.parts[-1].give(observation, t.turns)
        return observation

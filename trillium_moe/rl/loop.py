"""The run: format SFT, then RL, then the arm that only went on with SFT. One command; resumes where it was stopped.

A checkpoint holds the train state and, as JSON, every trajectory that is not trained on yet: those paused on the way
and those that wait. What a rollout did since the checkpoint is sampled again, with the same seeds and weights, so a
killed run goes on as if it had not been: no trajectory is lost, none is trained on twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from trillium_moe.config import ConfigError, check
from trillium_moe.infer.engine import Engine, EngineConfig
from trillium_moe.rl import batch, credit, sft
from trillium_moe.rl.config import RLConfig
from trillium_moe.rl.protocol import Protocol
from trillium_moe.rl.rollout import Counts, Rollout
from trillium_moe.rl.step import logprobs, make_update, policy_step
from trillium_moe.rl.trajectory import Group, Trajectory
from trillium_moe.rl.vocabulary import WordTokenizer
from trillium_moe.shapes import PyTree
from trillium_moe.train import checkpoint
from trillium_moe.train.metrics import MetricWriter
from trillium_moe.train.state import TrainState, init_state, model_def, optimizer
from trillium_moe.train.step import make_train_step

EVAL_TASKS = 1 << 26  # task numbers of evaluations begin here


@dataclass
class Work:
    """What is sampled and not trained on yet, and how far the tasks are. Lives in the checkpoint."""

    next_group: int = 0
    open: list[Group] = field(default_factory=list)  # groups with unfinished samples
    queue: list[list[Group]] = field(default_factory=list)  # batches that wait for their update
    b0: dict[str, float] = field(default_factory=dict)  # tokens a trajectory of each environment took at first
    forward: int = 0  # computation so far, in tokens of one forward pass; a training token counts three
    dropped: int = 0  # groups that were too old
    uniform: int = 0  # groups without a difference in reward
    trained: int = 0  # trajectories

    def to_json(self) -> dict[str, Any]:
        groups = lambda gs: [[t.to_json() for t in g] for g in gs]
        return {**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
                "open": groups(self.open), "queue": [groups(b) for b in self.queue]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Work:
        groups = lambda gs: [[Trajectory.from_json(t) for t in g] for g in gs]
        return cls(**{**values, "open": groups(values["open"]), "queue": [groups(b) for b in values["queue"]]})


class Run:
    """Engine, programs and tasks of one config. Everything compiles once and serves all phases."""

    def __init__(self, config: RLConfig):
        self.config = config
        self.protocol = Protocol(WordTokenizer())
        check(config.model.vocab_size >= WordTokenizer.vocab_size, "model.vocab_size", config.model.vocab_size,
              f"must be at least {WordTokenizer.vocab_size}, the task vocabulary")
        self.sft_config = config.training(config.sft.optim, config.sft.steps)
        self.rl_config = config.training(config.optim, config.updates)
        self.update = make_update(self.rl_config)
        self.rollout: Rollout | None = None

    def engine(self, params: PyTree, router_bias: PyTree) -> Rollout:
        """The rollout with these weights."""
        c = self.config.rollout
        if self.rollout is None:
            sizes = EngineConfig(slots=c.groups * c.samples, capacity=c.max_tokens, chunks=c.chunks, steps=c.steps)
            engine = Engine(self.config.model, params, router_bias, sizes)
            self.rollout = Rollout(engine, self.protocol, self.config.task, c, self.config.seed * 1_000_003)
        else:
            self.rollout.engine.load(params, router_bias)
        return self.rollout

    # --- phases

    def init(self) -> TrainState:
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.jit(lambda: init_state(self.sft_config), compiler_options=options)()

    def fresh(self, params: PyTree, router_bias: PyTree) -> TrainState:
        """The state that RL begins with: copies of the weights, an empty optimizer."""
        copy = functools.partial(jax.tree.map, jnp.copy)
        params = copy(params)
        return TrainState(jnp.zeros((), jnp.int32), params, copy(router_bias), optimizer(self.rl_config).init(params))

    def supervise(self, state: TrainState, steps: int, first: int = 0, show=None) -> TrainState:
        """SFT on traces."""
        config = self.sft_config if first == 0 else self.config.training(self.config.sft.optim, steps)
        step = make_train_step(config)
        rollout = self.engine(state.params, state.router_bias)
        for i, rows in enumerate(sft.batches(self.config, rollout, steps, first)):
            state, metrics = step(state, rows)
            if show and (i + 1) % 50 == 0:
                show(f"sft {i + 1}/{steps}  loss {float(metrics['train/loss']):.3f}")
        return state

    def collect(self, state: TrainState, work: Work, version: int) -> tuple[list[Group], Counts]:
        """One rollout: complete groups whose samples differ in reward. Unfinished ones stay in `work`."""
        c = self.config.rollout
        rollout = self.rollout
        rollout.counts = Counts()
        out: list[Group] = []
        for attempt in range(1 + c.refill):
            while len(work.open) < c.groups:
                work.open.append(rollout.new_group(work.next_group))
                work.next_group += 1
            rollout.run(work.open, version, pause=c.pause)
            whole = [g for g in work.open if all(t.done for t in g)]
            work.open = [g for g in work.open if not all(t.done for t in g)]
            if not work.b0:
                self._first_lengths(whole, work)
            useful = [g for g in whole if np.ptp(self.advantages(g, work, version)[1]) > 1e-9]
            work.uniform += len(whole) - len(useful)
            self._seen = [*(self._seen if attempt else []), *whole]
            out += useful
            if len(out) >= c.groups // 2:
                break
        work.forward += rollout.counts.forward
        return out, rollout.counts

    def _first_lengths(self, groups: list[Group], work: Work) -> None:
        for e, spec in enumerate(self.config.task.envs):
            lengths = [t.sampled for g in groups for t in g if t.env == e]
            work.b0[spec] = self.config.effort.b0 or float(np.mean(lengths or [0.0]))

    def budget(self, t: Trajectory, work: Work, update: int) -> float:
        """Sampled tokens that a trajectory may have; 0: no budget."""
        c, task = self.config.effort, self.config.task
        return credit.tau_of(c, t.effort, task.efforts, update) * work.b0[task.envs[t.env]] if c.tau else 0.0

    def advantages(self, group: Group, work: Work, update: int):
        budget = self.budget(group[0], work, update)
        return credit.group_advantages(group, self.config.task, self.config.objective, budget)

    def learn(
        self, state: TrainState, groups: list[Group], work: Work, update: int, reference: tuple | None = None,
        teachers: dict | None = None, distill: float = 0.0,
    ) -> tuple[TrainState, dict[str, Any]]:
        """One policy update from complete groups.

        Args:
          reference: (params, router bias) that objective.kl pulls towards.
          teachers: (env, effort) -> (params, router bias), with distill: the clip of the token rewards.
        """
        c, kinds = self.config, defaultdict(list)
        sequences = []
        for group in groups:
            for t, advantage in zip(group, self.advantages(group, work, update)[0]):
                own = [batch.sequence(part, advantage) for part in t.parts if any(part.mask)]
                kinds[(t.env, t.effort) if teachers else ()] += own
                sequences += own
        batch.weigh(sequences, c.objective.name, c.rollout.max_tokens)

        def rows():
            for key, own in kinds.items():
                for rows in batch.micro_batches(own, c.row, c.rows):
                    if teachers:
                        rows["teacher"] = logprobs(c.model, *teachers[key], rows)
                    if c.objective.kl:
                        rows["reference"] = logprobs(c.model, *reference, rows)
                    yield rows

        state, metrics = policy_step(self.rl_config, c.objective, self.update, state, rows(), distill)
        work.forward += 3 * metrics["rl/micro_batches"] * c.rows * c.row
        work.trained += sum(map(len, groups))
        ages = np.concatenate([update - t.versions for g in groups for t in g])
        metrics |= {"rl/age_mean": float(ages.mean()), "rl/age_max": int(ages.max()),
                    "rl/ages_A": np.bincount(ages, minlength=1)}
        return state, metrics

    def evaluate(self, params: PyTree, router_bias: PyTree, greedy: bool = False, n: int = 0) -> list[Trajectory]:
        """Held-out tasks, one trajectory each, always the same tasks."""
        rollout = self.engine(params, router_bias)
        n, slots = n or self.config.eval_tasks, rollout.engine.config.slots
        groups = [rollout.new_group(EVAL_TASKS + i, "heldout", samples=1) for i in range(n)]
        for at in range(0, n, slots):
            rollout.run(groups[at : at + slots], version=0, greedy=greedy)
        return [t for g in groups for t in g]


def describe(trajectories: list[Trajectory], prefix: str, task) -> dict[str, float]:
    """Means over trajectories, and by environment and effort where there are several."""
    def means(ts, name):
        errors = defaultdict(int)
        for t in ts:
            for kind, n in t.errors.items():
                errors[kind] += n
        return {
            f"{name}/success": float(np.mean([t.success for t in ts])), f"{name}/calls": float(np.mean([t.calls for t in ts])),
            f"{name}/tokens": float(np.mean([t.sampled for t in ts])), f"{name}/turns": float(np.mean([t.turns for t in ts])),
            f"{name}/length": float(np.mean([t.length for t in ts])),
            f"{name}/verifier_gap": float(np.mean([t.public - t.success for t in ts])),
            **{f"{name}/error_{kind}": n / len(ts) for kind, n in errors.items()},
        }  # fmt: skip

    out = means(trajectories, prefix)
    out[f"{prefix}/reward"] = float(np.mean([t.reward for t in trajectories]))
    for e, spec in enumerate(task.envs) if len(task.envs) > 1 else ():
        out |= means([t for t in trajectories if t.env == e], f"{prefix}_{spec.split(':')[0]}")
    for effort in task.efforts if len(task.efforts) > 1 else ():
        out |= means([t for t in trajectories if t.effort == effort], f"{prefix}_{effort}")
    return out

"""What a run of reinforcement learning does: SFT steps, rollouts, updates, evaluations. `loop` puts them in order."""


from __future__ import annotations

import copy
import dataclasses
import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillium_moe.config import check
from trillium_moe.infer.engine import EngineConfig
from trillium_moe.infer.exact import BLOCK, make_engine
from trillium_moe.rl import batch, credit, sft
from trillium_moe.rl.config import RLConfig, TaskConfig
from trillium_moe.rl.protocol import Protocol
from trillium_moe.rl.rollout import Counts, Rollout
from trillium_moe.rl.step import logprobs, make_update, policy_step
from trillium_moe.rl.trajectory import Group, Trajectory
from trillium_moe.rl.vocabulary import WordTokenizer
from trillium_moe.shapes import PyTree
from trillium_moe.train.state import TrainState, init_state, optimizer

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
        self.sft_update = make_update(self.sft_config)
        self.rollout: Rollout | None = None
        self.seen: list[Group] = []  # all complete groups of the last rollout

    def with_config(self, config: RLConfig) -> Run:
        """The run of another seed, with the same compiled programs."""
        check(dataclasses.replace(config, seed=0, name="") == dataclasses.replace(self.config, seed=0, name=""), "seed",
              config.seed, "is all that may differ between runs that share programs")
        out = copy.copy(self)
        out.config, out.rollout = config, None
        out.sft_config = dataclasses.replace(self.sft_config, seed=config.seed)
        return out

    def engine(self, params: PyTree, router_bias: PyTree) -> Rollout:
        """The rollout with these weights."""
        c = self.config.rollout
        if self.rollout is None:
            sizes = EngineConfig(slots=c.groups * c.samples, capacity=c.max_tokens, chunks=c.chunks, steps=c.steps,
                                 exact=c.exact)
            engine = make_engine(self.config.model, params, router_bias, sizes)
            self.rollout = Rollout(engine, self.protocol, self.config.task, c, self.config.seed * 1_000_003)
        else:
            self.rollout.engine.load(params, router_bias)
        return self.rollout

    # --- phases

    def initial(self) -> TrainState:
        """The state before SFT; to be jitted, or to learn its shapes."""
        return init_state(self.sft_config)

    def init(self) -> TrainState:
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        return jax.jit(self.initial, compiler_options=options)()

    def fresh(self, params: PyTree, router_bias: PyTree) -> TrainState:
        """The state that RL begins with: copies of the weights, an empty optimizer."""
        own = functools.partial(jax.tree.map, jnp.copy)
        params = own(params)
        return TrainState(jnp.zeros((), jnp.int32), params, own(router_bias), optimizer(self.rl_config).init(params))

    def supervise(self, state: TrainState, steps: int, first: int = 0, show=None, update=None) -> TrainState:
        """SFT on traces.

        Args:
          first: number of the first step, which decides what traces it has.
          update: optimizer program; by default that of config.sft.optim.
        """
        update = update or self.sft_update
        rollout = self.engine(state.params, state.router_bias)
        for i, rows in enumerate(sft.ahead(sft.batches(self.config, rollout, steps, first))):
            if self.config.objective.kl:  # the same program as RL's
                rows |= {"reference": np.zeros_like(rows["sampler"]), "kl": np.float32(0)}
            state, metrics = policy_step(self.sft_config, self.config.objective, update, state, [rows], imitate=True)
            if show and ((i + 1) % 50 == 0 or i + 1 == steps):
                show(f"sft {i + 1}/{steps}  loss {metrics['rl/loss']:.3f}")
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
            self._first_lengths(whole, work)
            differ = lambda g: self.config.teachers or np.ptp(self.advantages(g, work, version)[1]) > 1e-9
            useful = [g for g in whole if differ(g)]
            work.uniform += len(whole) - len(useful)
            self.seen = [*(self.seen if attempt else []), *whole]
            out += useful
            if len(out) >= c.groups // 2:
                break
        work.forward += rollout.counts.forward
        return out, rollout.counts

    def iterate(self, state: TrainState, work: Work, update: int) -> dict[str, Any]:
        """Sees to it that a batch waits in `work.queue`: rolls out if none does, drops groups that became too old.
        Returns metrics of the rollout, none if there was none."""
        c, metrics = self.config.rollout, {}
        if not work.queue:
            self.engine(state.params, state.router_bias)
            for _ in range(c.lag + 1):
                groups, counts = self.collect(state, work, update)
                work.queue.append(groups)
            metrics = describe([t for g in self.seen for t in g], "rollout", self.config.task)
            metrics |= {"rollout/prefill_saved": counts.saved, "rollout/prefilled": counts.prefilled}
        if c.max_age:
            young = [g for g in work.queue[0] if all(update - t.versions.min() <= c.max_age for t in g)]
            work.dropped += len(work.queue[0]) - len(young)
            work.queue[0] = young
        return metrics

    def measure(self, state: TrainState) -> dict[str, float]:
        """Held-out metrics, sampled (`heldout/`) and greedy (`greedy/`)."""
        weights = (state.params, state.router_bias)
        return {**describe(self.evaluate(*weights), "heldout", self.config.task),
                **describe(self.evaluate(*weights, greedy=True), "greedy", self.config.task)}

    def _first_lengths(self, groups: list[Group], work: Work) -> None:
        """Sets b0 of the environments that have none yet."""
        for e, spec in enumerate(self.config.task.envs):
            lengths = [t.sampled for g in groups for t in g if t.env == e]
            if lengths and spec not in work.b0:
                work.b0[spec] = self.config.effort.b0 or float(np.mean(lengths))

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
        kl = np.float32(credit.kl_of(c.objective, update))

        def rows():
            for key, own in kinds.items():
                for rows in batch.micro_batches(own, c.row, c.rows, BLOCK if c.rollout.exact else 1):
                    if teachers:
                        rows["teacher"] = logprobs(c.model, *teachers[key], rows)
                    if c.objective.kl:
                        rows |= {"reference": logprobs(c.model, *reference, rows), "kl": kl}
                    yield rows

        state, metrics = policy_step(self.rl_config, c.objective, self.update, state, rows(), distill)
        passes = 3 + bool(c.objective.kl) + bool(teachers)  # those of the reference and of a teacher are forward only
        work.forward += passes * metrics["rl/micro_batches"] * c.rows * c.row
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


def describe(trajectories: list[Trajectory], prefix: str, task: TaskConfig) -> dict[str, float]:
    """Means over trajectories, and by environment and effort where there are several."""
    out = _means(trajectories, prefix)
    for e, spec in enumerate(task.envs) if len(task.envs) > 1 else ():
        out |= _means([t for t in trajectories if t.env == e], f"{prefix}_{spec.split(':')[0]}")
    for effort in task.efforts if len(task.efforts) > 1 else ():
        out |= _means([t for t in trajectories if t.effort == effort], f"{prefix}_{effort}")
    return out


def _means(ts: list[Trajectory], prefix: str) -> dict[str, float]:
    if not ts:
        return {}
    counts: dict[str, int] = defaultdict(int)
    for t in ts:
        for kind, n in t.errors.items():
            counts[f"error_{kind}"] += n
        for tool, n in t.used.items():
            counts[f"calls_{tool}"] += n
    mean = lambda get: float(np.mean([get(t) for t in ts]))
    return {
        f"{prefix}/success": mean(lambda t: t.success), f"{prefix}/reward": mean(lambda t: t.reward),
        f"{prefix}/calls": mean(lambda t: t.calls), f"{prefix}/turns": mean(lambda t: t.turns),
        f"{prefix}/tokens": mean(lambda t: t.sampled), f"{prefix}/length": mean(lambda t: t.length),
        f"{prefix}/verifier_gap": mean(lambda t: t.public - t.success),
        **{f"{prefix}/{name}": n / len(ts) for name, n in counts.items()},
    }  # fmt: skip

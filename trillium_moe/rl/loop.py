"""The run: format SFT, then RL, then the arm that only went on with SFT. One command; resumes where it was stopped.

A checkpoint holds the train state and, as JSON, every trajectory that is not trained on yet: those paused on the way
and those that wait. What a rollout did since the checkpoint is sampled again, with the same seeds and weights, so a
killed run goes on as if it had not been: no trajectory is lost, none is trained on twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillium_moe.config import check
from trillium_moe.infer.engine import Engine, EngineConfig
from trillium_moe.rl import batch, credit, sft
from trillium_moe.rl.config import RLConfig, TaskConfig
from trillium_moe.rl.protocol import Protocol
from trillium_moe.rl.rollout import Counts, Rollout
from trillium_moe.rl.step import logprobs, make_update, policy_step
from trillium_moe.rl.trajectory import Group, Trajectory
from trillium_moe.rl.vocabulary import WordTokenizer
from trillium_moe.shapes import PyTree
from trillium_moe.train.state import TrainState, init_state, optimizer
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
        self.sft_step = make_train_step(self.sft_config)
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
        own = functools.partial(jax.tree.map, jnp.copy)
        params = own(params)
        return TrainState(jnp.zeros((), jnp.int32), params, own(router_bias), optimizer(self.rl_config).init(params))

    def supervise(self, state: TrainState, steps: int, first: int = 0, show=None) -> TrainState:
        """SFT on traces."""
        rollout = self.engine(state.params, state.router_bias)
        for i, rows in enumerate(sft.batches(self.config, rollout, steps, first)):
            state, metrics = self.sft_step(state, rows)
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
    errors: dict[str, int] = defaultdict(int)
    for t in ts:
        for kind, n in t.errors.items():
            errors[kind] += n
    mean = lambda get: float(np.mean([get(t) for t in ts]))
    return {
        f"{prefix}/success": mean(lambda t: t.success), f"{prefix}/reward": mean(lambda t: t.reward),
        f"{prefix}/calls": mean(lambda t: t.calls), f"{prefix}/turns": mean(lambda t: t.turns),
        f"{prefix}/tokens": mean(lambda t: t.sampled), f"{prefix}/length": mean(lambda t: t.length),
        f"{prefix}/verifier_gap": mean(lambda t: t.public - t.success),
        **{f"{prefix}/error_{kind}": n / len(ts) for kind, n in errors.items()},
    }  # fmt: skip


# --- the command


def train(config: RLConfig, workdir: epath.PathLike, run: Run | None = None, *, progress: bool = True) -> bool:
    """Format SFT, RL, and the SFT-only arm in `workdir`; goes on from its newest checkpoint. False: a signal ended it.

    Args:
      run: of the same config but for the seed; its compiled programs are used again.

    Raises:
      ConfigError: for a workdir that holds a run of another config.
      CheckpointError: if checkpoints exist but none can be used.
    """
    # late: it brings matplotlib, which a rollout alone can do without
    from trillium_moe.train.loop import stop_signals

    workdir = epath.Path(workdir)
    _same_run(config, workdir)
    save_config(config, workdir)
    run = (run or Run(config)).with_config(config)
    began = time.perf_counter()

    def show(text: str) -> None:
        if progress:
            print(f"{time.perf_counter() - began:7.1f} s  {config.name} seed {config.seed}  {text}", file=sys.stderr,
                  flush=True)

    with stop_signals() as stop:
        start = _start(run, workdir, show)
        if stop:
            return False
        state, work = _learn(run, workdir, start, stop, show)
        if stop and int(state.step) < config.updates:
            return False
        if config.sft_only and not (workdir / "sft_only.jsonl").exists():
            _sft_only(run, workdir, start, work.forward, show)
    return True


def _start(run: Run, workdir: epath.Path, show) -> TrainState:
    """The policy that RL begins with: from its checkpoint, or by SFT."""
    config, folder = run.config, workdir / "sft"
    if checkpoint.steps(folder):
        return checkpoint.restore(folder, jax.eval_shape(lambda: init_state(run.sft_config))).state
    state = run.supervise(run.init(), config.sft.steps, show=show)
    with checkpoint.open_checkpoints(folder, keep=1) as checkpoints:
        checkpoint.save(checkpoints, config.sft.steps, state, {})
    return state


def _learn(run: Run, workdir: epath.Path, start: TrainState, stop: list[str], show) -> tuple[TrainState, Work]:
    """RL from `start`, or from the newest checkpoint."""
    config = run.config
    reference = (start.params, start.router_bias)
    teachers = load_teachers(config) if config.teachers else None
    state, work = run.fresh(*reference), Work()
    if checkpoint.steps(workdir):
        restored = checkpoint.restore(workdir, jax.eval_shape(lambda: state))
        checkpoint.set_aside(workdir, after=restored.step)
        state, work = restored.state, Work.from_json(restored.data_state)
        show(f"goes on after update {restored.step}")
    u = int(state.step)
    with checkpoint.open_checkpoints(workdir, config.keep) as checkpoints, MetricWriter(workdir, u) as writer:
        trained = _Log(workdir / "trained.jsonl", u)
        if u == 0:
            writer.write(0, run.measure(state))
        saved = u
        while u < config.updates and not stop:
            began = time.perf_counter()
            metrics = run.iterate(state, work, u)
            sampled = time.perf_counter()
            groups = work.queue.pop(0)
            if groups:
                state, learned = run.learn(state, groups, work, u, reference, teachers, config.teacher_clip)
            else:
                state, learned = dataclasses.replace(state, step=state.step + 1), {}  # nothing to learn from
            u += 1
            trained.write(u, [t.id for g in groups for t in g])
            metrics |= learned | {"rl/dropped_groups": work.dropped, "rl/uniform_groups": work.uniform,
                                  "rl/waiting": len(work.open), "rl/forward_tokens": work.forward,
                                  "perf/rollout_seconds": sampled - began,
                                  "perf/learn_seconds": time.perf_counter() - sampled}
            due = u == config.updates or config.eval_every and u % config.eval_every == 0
            if due:
                metrics |= run.measure(state)
            entropy = metrics.get("rl/entropy", 1.0)
            if entropy < config.entropy_floor:
                show(f"alarm: update {u}: entropy {entropy:.4f} nats a token is below entropy_floor="
                     f"{config.entropy_floor}: the policy hardly explores any more")
            if due or u == 1 or u % config.log_every == 0:
                writer.write(u, metrics)
                show(_line(u, metrics))
            if u == config.updates or config.checkpoint_every and u % config.checkpoint_every == 0:
                writer.sync()
                checkpoint.save(checkpoints, u, state, work.to_json())
                saved = u
        if saved != u:
            writer.sync()
            checkpoint.save(checkpoints, u, state, work.to_json())
            show(f"stopped by {stop[0]} after update {u}: saved; the same command resumes")
        if u == config.updates:
            _write_samples(run, state, workdir)
    return state, work


def _sft_only(run: Run, workdir: epath.Path, start: TrainState, forward: int, show) -> None:
    """The other arm: SFT goes on from the same start for as much computation, with fresh traces."""
    config = run.config
    steps = max(1, forward // (3 * config.sft.rows * config.row))
    state = jax.tree.map(jnp.copy, start)
    lines, every = [], -(-steps // 4)
    for at in range(0, steps, every):
        state = run.supervise(state, min(every, steps - at), config.sft.steps + at)
        lines.append({"step": at + every, "share": min(1.0, (at + every) / steps), **run.measure(state)})
        show(f"sft only {min(steps, at + every)}/{steps}  {_success(lines[-1])}")
    (workdir / "sft_only.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def load_teachers(config: RLConfig) -> dict[tuple[int, str], tuple[PyTree, PyTree]]:
    """Policies of the experts' runs by (environment, effort) of this run.

    Raises:
      ConfigError: if an environment and effort has no expert, or a directory holds no run of the same model.
    """
    out = {}
    for folder in config.teachers:
        own = load_config(folder, RLConfig)
        check(own.model == config.model, "teachers", folder, "was trained with another model; give both the same")
        _, params, bias = model_def(own.model)
        state = checkpoint.restore(folder, {"params": params, "router_bias": bias}, partial=True).state
        for spec in own.task.envs:
            for effort in own.task.efforts or ("",):
                if spec in config.task.envs:
                    out[config.task.envs.index(spec), effort] = (state["params"], state["router_bias"])
    for e, spec in enumerate(config.task.envs):
        for effort in config.task.efforts or ("",):
            check((e, effort) in out, "teachers", config.teachers, f"none has learned {spec} with effort {effort!r}")
    return out


def _same_run(config: RLConfig, workdir: epath.Path) -> None:
    if not (workdir / "config.json").exists():
        return
    theirs = load_config(workdir, RLConfig)
    free = {"updates": 1, "log_every": 1, "eval_every": 0, "checkpoint_every": 0, "keep": 1, "name": ""}
    if dataclasses.replace(config, **free) != dataclasses.replace(theirs, **free):
        ours, others = dataclasses.asdict(config), dataclasses.asdict(theirs)
        differ = [key for key in ours if key not in free and ours[key] != others[key]]
        raise ConfigError(f"config {', '.join(differ)}: workdir={str(workdir)!r} holds another run; name a new "
                          "workdir, or give the config it was started with")


def _line(u: int, m: dict[str, Any]) -> str:
    parts = [f"update {u:4d}", f"success {m['rollout/success']:.2f}" if "rollout/success" in m else "no rollout",
             f"calls {m['rollout/calls']:.2f}" if "rollout/calls" in m else ""]
    if "rl/entropy" in m:
        parts.append(f"entropy {m['rl/entropy']:.3f}")
    return "  ".join(filter(None, [*parts, _success(m)]))


def _success(m: dict[str, Any]) -> str:
    if "heldout/success" not in m:
        return ""
    return (f"held-out success {m['heldout/success']:.3f} (greedy {m['greedy/success']:.3f}), "
            f"calls {m['heldout/calls']:.2f}")


def _write_samples(run: Run, state: TrainState, workdir: epath.Path) -> None:
    """`trajectories.txt`: some held-out trajectories as people read them."""
    texts = []
    for t in run.evaluate(state.params, state.router_bias, n=min(8, run.config.eval_tasks)):
        shown = "\n  -- the context was dropped --\n".join(run.protocol.show(p.tokens, p.mask) for p in t.parts)
        spec = run.config.task.envs[t.env]
        effort = f" effort {t.effort}" if t.effort else ""
        texts.append(f"{spec} task {t.seed}{effort}: {t.end}, success {t.success:g}, {t.calls} calls, "
                     f"{t.sampled} tokens sampled\n{shown}\n")
    (workdir / "trajectories.txt").write_text("\n".join(texts))


class _Log:
    """Lines of {"update", "trajectories"}: what every update was trained on."""

    def __init__(self, path: epath.Path, update: int):
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.lines = [line for line in lines if json.loads(line)["update"] <= update]
        path.write_text("".join(line + "\n" for line in self.lines))

    def write(self, update: int, ids: list[str]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"update": update, "trajectories": ids}) + "\n")

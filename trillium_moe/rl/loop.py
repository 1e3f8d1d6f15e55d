"""The run: format SFT, then RL, then the arm that only went on with SFT. One command; resumes where it was stopped.

A checkpoint holds the train state and, as JSON, every trajectory that is not trained on yet: those paused on the way
and those that wait. What a rollout did since the checkpoint is sampled again, with the same seeds and weights, so a
killed run goes on as if it had not been: no trajectory is lost, none is trained on twice.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from typing import Any

import jax
from etils import epath

from trillium_moe.config import ConfigError, check
from trillium_moe.config_files import load_config, save_config
from trillium_moe.rl.config import RLConfig
from trillium_moe.rl.run import Run, Work
from trillium_moe.shapes import PyTree
from trillium_moe.train import checkpoint
from trillium_moe.train.metrics import MetricWriter
from trillium_moe.train.state import TrainState, model_def


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
    """The policy that RL begins with: another run's, or from the checkpoint of SFT, or by SFT."""
    config, folder = run.config, workdir / "sft"
    if config.start:
        return run.fresh(*_policy(config.start, config))
    if checkpoint.steps(folder):
        return checkpoint.restore(folder, jax.eval_shape(run.initial)).state
    state = run.supervise(run.init(), config.sft.steps, show=show)
    with checkpoint.open_checkpoints(folder, keep=1) as checkpoints:
        checkpoint.save(checkpoints, config.sft.steps, state, {})
    return state


def _learn(run: Run, workdir: epath.Path, start: TrainState, stop: list[str], show) -> tuple[TrainState, Work]:
    """RL from `start`, or from the newest checkpoint."""
    config = run.config
    reference = (start.params, start.router_bias)
    teachers, clip = (load_teachers(config), config.teacher_clip) if config.teachers else (None, 0.0)
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
                state, learned = run.learn(state, groups, work, u, reference, teachers, clip)
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
    """The other arm: SFT goes on from the same start for as much computation, with fresh traces and RL's optimizer."""
    config = run.config
    steps = max(1, forward // (3 * config.rows * config.row))
    state = run.fresh(start.params, start.router_bias)
    lines, every = [], -(-steps // 4)
    for at in range(0, steps, every):
        state = run.supervise(state, min(every, steps - at), config.sft.steps + at, update=run.update)
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
        own, policy = load_config(folder, RLConfig), _policy(folder, config)
        for spec in own.task.envs:
            for effort in own.task.efforts or ("",):
                if spec in config.task.envs:
                    out[config.task.envs.index(spec), effort] = policy
    for e, spec in enumerate(config.task.envs):
        for effort in config.task.efforts or ("",):
            check((e, effort) in out, "teachers", config.teachers, f"none has learned {spec} with effort {effort!r}")
    return out


def _policy(folder: str, config: RLConfig) -> tuple[PyTree, PyTree]:
    """(params, router bias) of a run of the same model, or of its SFT: RUN/sft. Raises ConfigError, CheckpointError."""
    run = epath.Path(folder)
    own = load_config(run.parent if run.name == "sft" else run, RLConfig)
    check(own.model == config.model, "model", folder, "this run was trained with another model; give both the same")
    _, params, bias = model_def(own.model)
    state = checkpoint.restore(folder, {"params": params, "router_bias": bias}, partial=True).state
    return state["params"], state["router_bias"]


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

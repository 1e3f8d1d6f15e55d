"""A ladder of runs with growing windows: each begins with the state that the one before ended with.

    workdir/<stage>/            a run as `train.loop.train` leaves it, with its checkpoints and report
    workdir/<stage>/long.json   evaluation of its last checkpoint
    workdir/<stage>/gate.json   what the gate after it measured and said; with it the stage is done
    workdir/ladder.html, table.md

A stage takes over parameters, optimizer, router bias and step count. Its data are a stream of their own (another row
length, another order), a function of (seed, window, row). The same call resumes a ladder wherever it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from etils import epath

from trillium_moe.config import Config, check, check_choice
from trillium_moe.data.pipeline import make_pipeline
from trillium_moe.data.synthetic import TASKS
from trillium_moe.evals.heldout import heldout
from trillium_moe.evals.long import LongConfig, evaluate
from trillium_moe.infer.generate import LoadedModel, load_model
from trillium_moe.parallel.mesh import check_mesh, make_mesh
from trillium_moe.train.ladder_report import write_ladder
from trillium_moe.train.loop import train
from trillium_moe.train.metrics import read_metrics
from trillium_moe.train.step import make_eval_step

GATES = ("warn", "stop")


class GateError(RuntimeError):
    """A stage that did not pass its gate. The message is one line and says what was measured."""


@dataclass(frozen=True)
class Gate:
    """What a stage has to reach before the next one begins (`training.md` B.2, 7)."""

    policy: str = "warn"  # warn: say so and go on; stop: end the ladder
    short_loss: float = 0.01  # nats that the loss at the first window may have risen since the stage before
    needle: float = 0.99  # least accuracy of task `needle` at the stage's window
    hard: str = "multi_query"  # task whose accuracy at the stage's window must have risen since the stage before

    def __post_init__(self):
        check_choice("gate", self.policy, GATES)
        check_choice("hard", self.hard, tuple(TASKS))

    def verdicts(self, window: int, now: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[str]:
        """What `now` lacks; both are {"short_loss": nats, "cells": cells of `evals.long`}."""
        out = []
        needle, hard = (accuracy(now["cells"], task, window) for task in ("needle", self.hard))
        if needle is not None and needle < self.needle:
            out.append(f"needle at {window:,} tokens is {needle:.1%}, the gate asks for {self.needle:.1%}")
        if before is None:
            return out
        rise = now["short_loss"] - before["short_loss"]
        if rise > self.short_loss:
            out.append(f"the loss at the first window rose by {rise:.4f} nats, the gate allows {self.short_loss}")
        was = accuracy(before["cells"], self.hard, window)
        if None not in (hard, was) and hard <= was < 1:
            out.append(f"{self.hard} at {window:,} tokens went from {was:.1%} to {hard:.1%}, the gate asks for a rise")
        return out


def accuracy(cells: list[dict[str, Any]], task: str, length: int) -> float | None:
    """Accuracy of a cell, None if it was not measured."""
    return next((c["accuracy"] for c in cells if c["task"] == task and c["length"] == length), None)


def climb(
    stages: dict[str, Config],
    workdir: epath.PathLike,
    suite: Callable[[Config], LongConfig],
    gate: Gate = Gate(),
    *,
    progress: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, dict[str, Any]]:
    """Trains, evaluates and judges every stage in turn; those that are done are not run again.

    Args:
      stages: as `configs.stages.ladder` makes them; `train.start` of all but the first is filled in here.
      suite: what to evaluate after the stage of a config.
      say: is told what was measured, line by line.

    Returns:
      The gate's measurements of every stage that is done; fewer stages than given if a signal stopped the ladder.

    Raises:
      ConfigError: for a stage that its mesh cannot hold, found before any stage runs; and as `train`.
      CheckpointError: if the stage before left no checkpoint.
      GateError: if a stage did not pass and the gate stops.
    """
    workdir = epath.Path(workdir)
    for config in stages.values():
        check_mesh(config, make_mesh(config.mesh).shape)
    short = _ShortLoss(next(iter(stages.values())))
    results: dict[str, dict[str, Any]] = {}
    start, before = "", None
    for name, config in stages.items():
        folder = workdir / name
        if start:
            config = replace(config, train=replace(config.train, start=start))
        if not (folder / "gate.json").exists():
            if start and (epath.Path(start) / "tokenizer.json").exists():
                folder.mkdir(parents=True, exist_ok=True)
                (epath.Path(start) / "tokenizer.json").copy(folder / "tokenizer.json", overwrite=True)
            if not train(config, folder, progress=progress).finished:
                return results
            model = load_model(folder)
            say(f"{name}: {config.data.seq_len:,} tokens a row, step {model.step:,}")
            long = evaluate(model.config.model, model.params, model.router_bias, model.tokenizer,
                            _heldout_documents(model), suite(config), say)
            (folder / "long.json").write_text(json.dumps(long, indent=1) + "\n")
            now = {"stage": name, "window": config.data.seq_len, "steps": config.train.steps - config.train.first_step,
                   "rows": config.data.batch_size, "short_loss": short(model), "cells": long["cells"],
                   "text": long["text"], **_measured(folder)}
            now["failed"] = gate.verdicts(config.data.seq_len, now, before)
            (folder / "gate.json").write_text(json.dumps(now, indent=1) + "\n")
        now = json.loads((folder / "gate.json").read_text())
        same = {"window": config.data.seq_len, "steps": config.train.steps - config.train.first_step}
        differ = {key: now[key] for key, value in same.items() if now[key] != value}
        check(not differ, "stages", name, f"{str(folder)!r} holds another stage ({differ}, not {same}); name a new "
              "workdir, or give the ladder it was started with")
        results[name], before, start = now, now, str(folder)
        write_ladder(workdir, results)
        for line in now["failed"]:
            say(f"gate after {name}: {line}")
        last = name == next(reversed(stages))
        if now["failed"] and gate.policy == "stop" and not last:
            raise GateError(f"gate after {name}: {'; '.join(now['failed'])}; train the stage longer, or --gate=warn")
    return results


def _measured(folder: epath.Path) -> dict[str, float]:
    """Speed and memory of a stage, from its metrics."""
    lines = read_metrics(folder)
    rates = sorted(line["perf/tokens_per_second"] for line in lines if "perf/tokens_per_second" in line)
    out = {"tokens_per_second": rates[len(rates) // 2]} if rates else {}
    peak = [line["perf/peak_bytes"] for line in lines if "perf/peak_bytes" in line]
    return out | ({"peak_bytes": max(peak)} if peak else {})


def _heldout_documents(model: LoadedModel):
    return make_pipeline(model.config, "heldout", tokenizer=model.tokenizer, threads=0).rows.documents


class _ShortLoss:
    """Held-out loss in nats per token at the window of the first stage."""

    def __init__(self, first: Config):
        self.config, self._step = first, make_eval_step(first)

    def __call__(self, model: LoadedModel) -> float:
        held = make_pipeline(self.config, "heldout", tokenizer=model.tokenizer, threads=0)
        out = heldout(self._step, model.params, model.router_bias, iter(held), model.tokenizer.token_bytes,
                      self.config.train.eval_batches)
        return out["heldout/loss"]

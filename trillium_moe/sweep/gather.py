"""What the runs of a sweep found: one row per run, one row per arm, and what the difference from the baseline is worth.

The unit of every loss is nats per token of the held-out split, at the last step. With s the standard deviation over
seeds, pooled over an arm and the baseline, a difference within 2 s is called no difference: whether a change shows in
one run is what matters to the person who will make one. Beside a mean stands its 95% interval (Student).
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from etils import epath
from scipy.stats import t as student

from trillium_moe.config import Config
from trillium_moe.sweep.execute import read_outcome
from trillium_moe.sweep.measures import MEASURES
from trillium_moe.sweep.plan import Run, Sweep
from trillium_moe.train.facts import read_facts
from trillium_moe.train.flops import step_flops
from trillium_moe.train.metrics import read_metrics

LOSS = "heldout/loss"


@dataclass(frozen=True)
class Result:
    """One run, as far as it came."""

    run: Run
    status: str  # missing, running, finished, diverged, failed
    reason: str
    lines: list[dict[str, Any]]  # its metrics
    facts: dict[str, Any]
    peak_bytes: int
    probed: dict[str, float] = field(default_factory=dict)  # of its last model

    @property
    def loss(self) -> float | None:
        """Held-out nats per token at the end; None unless the run is finished."""
        found = [line[LOSS] for line in self.lines if LOSS in line]
        return found[-1] if found and self.status == "finished" else None

    @property
    def tokens_per_step(self) -> int:
        return self.run.config.data.batch_size * self.run.config.data.seq_len

    @property
    def tokens(self) -> int:
        """Trained on so far."""
        return self.tokens_per_step * (self.lines[-1]["step"] if self.lines else 0)

    @property
    def rate(self) -> float:
        """Tokens per second of training, median of the logged steps; nan if none was timed."""
        rates = [line["perf/tokens_per_second"] for line in self.lines if "perf/tokens_per_second" in line]
        return float(np.median(rates)) if rates else math.nan

    @property
    def seconds(self) -> float:
        """Time in training, without compilation, evaluation and checkpoints."""
        return self.tokens / self.rate

    def measure(self, name: str) -> float | None:
        """Of the run's metrics, or of its last model where a probe measured it."""
        return self.probed[name] if name in self.probed else MEASURES[name].read(self.lines)


def gather(sweep: Sweep, workdir: epath.PathLike) -> list[Result]:
    """Every run of the sweep, in its order, whether or not it has begun."""
    results = []
    for run in sweep.runs:
        outcome, folder = read_outcome(workdir, run), epath.Path(workdir) / run.folder
        results.append(Result(run, outcome["status"], outcome.get("reason", ""), read_metrics(folder),
                              read_facts(folder), outcome.get("peak_bytes", 0), outcome.get("probed", {})))
    return results


@dataclass(frozen=True)
class Row:
    """One arm over its seeds. Values are None where no run gives them."""

    name: str
    rung: str
    tuned: str  # the overrides that were chosen for this arm, as text
    results: list[Result]
    losses: np.ndarray  # of finished runs
    mean: float | None = None
    interval: float | None = None  # half-width of the mean's 95% interval; None with one seed
    deviation: float | None = None  # over seeds
    difference: float | None = None  # from the baseline of the same rung
    pooled: float | None = None  # seed deviation, arm and baseline together
    paired: tuple[float, float] | None = None  # mean and 95% half-width of the differences between runs of one seed
    verdict: str = ""

    def count(self, status: str) -> int:
        return sum(r.status == status for r in self.results)

    def values(self, name: str) -> list[float]:
        """A measure of the finished runs that have it."""
        return [v for v in (r.measure(name) for r in self.results if r.status == "finished") if v is not None]

    def average(self, name: str) -> float | None:
        """A measure, over the runs that have it; None unless more than half of the finished runs have."""
        values = self.values(name)
        return float(np.mean(values)) if 2 * len(values) > self.count("finished") else None

    def text(self, name: str) -> str:
        """The average as tables and pictures show it."""
        value, have, done = self.average(name), len(self.values(name)), self.count("finished")
        if value is None and done:
            return f"{MEASURES[name].missing} in {done - have} of {done}" if have else MEASURES[name].missing
        return _number(value, MEASURES[name].digits)


def summarise(sweep: Sweep, results: Sequence[Result]) -> list[Row]:
    """Rows in the order of the sweep, the baseline first within its rung; of tuned choices only the best."""
    by_key: dict[tuple[str, str], list[Row]] = {}
    for i in range(0, len(results), len(sweep.seeds)):
        group = list(results[i : i + len(sweep.seeds)])
        arm = group[0].run.arm
        tuned = ", ".join(part.label for part in arm.parts if part.role == "tuned")
        row = _with_statistics(Row(arm.family, arm.rung, tuned, group, _losses(group)))
        by_key.setdefault((arm.rung, arm.family), []).append(row)
    best = {key: min(rows, key=_rank) for key, rows in by_key.items()}
    rungs = dict.fromkeys(rung for rung, _ in best)
    order = sorted(best, key=lambda key: (list(rungs).index(key[0]), key[1] != sweep.baseline))
    return [_compared(best[key], best.get((key[0], sweep.baseline))) for key in order]


def _losses(results: Sequence[Result]) -> np.ndarray:
    return np.array([r.loss for r in results if r.loss is not None], float)


def _rank(row: Row) -> tuple:
    """Best first: no run lost, then the lowest loss."""
    return row.count("diverged") + row.count("failed"), math.inf if row.mean is None else row.mean


def _with_statistics(row: Row) -> Row:
    n = len(row.losses)
    if not n:
        return row
    deviation = float(row.losses.std(ddof=1)) if n > 1 else None
    interval = _half_width(row.losses) if n > 1 else None
    return dataclasses.replace(row, mean=float(row.losses.mean()), deviation=deviation, interval=interval)


def _compared(row: Row, base: Row | None) -> Row:
    if row.count("diverged"):
        return dataclasses.replace(row, verdict=f"diverged ({row.count('diverged')} of {len(row.results)})")
    if row.mean is None:
        return dataclasses.replace(row, verdict="no finished run")
    if base is None or base.mean is None or row.name == base.name:
        return dataclasses.replace(row, verdict="baseline" if base is not None and row.name == base.name else "")
    difference = row.mean - base.mean
    degrees = len(row.losses) + len(base.losses) - 2
    if degrees < 1:
        return dataclasses.replace(row, difference=difference, verdict="one seed: cannot be judged")
    squares = sum(((x.losses - x.losses.mean()) ** 2).sum() for x in (row, base))
    pooled = math.sqrt(squares / degrees)
    if abs(difference) <= 2 * pooled:
        verdict = "no difference"
    else:
        verdict = "better" if difference < 0 else "worse"
    return dataclasses.replace(row, difference=difference, pooled=pooled, paired=_paired(row, base), verdict=verdict)


def _paired(row: Row, base: Row) -> tuple[float, float] | None:
    """Mean of the differences seed by seed, and half of its 95% interval."""
    pairs = _differences(row, base)
    return (float(pairs.mean()), _half_width(pairs)) if len(pairs) > 1 else None


def _differences(row: Row, base: Row) -> np.ndarray:
    """Between runs of one seed, which read the same data in the same order."""
    of_base = {r.run.seed: r.loss for r in base.results if r.loss is not None}
    return np.array([r.loss - of_base[r.run.seed] for r in row.results if r.loss is not None and r.run.seed in of_base])


def seed_noise(rows: Sequence[Row]) -> list[str]:
    """What a difference of two arms is worth by all arms of a rung together, which know it better than two of them."""
    out = []
    for rung in dict.fromkeys(row.rung for row in rows):
        arms = [row for row in rows if row.rung == rung and row.mean is not None and not row.count("diverged")]
        base = next((row for row in arms if row.verdict == "baseline"), None)
        single = _spread([row.losses for row in arms])
        pairs = _spread([_differences(row, base) for row in arms if row is not base]) if base else None
        if len(arms) < 3 or base is None or single is None or pairs is None:
            continue
        n = len(base.losses)
        interval = student.ppf(0.975, single[1]) * single[0] * math.sqrt(2 / n)
        paired = student.ppf(0.975, pairs[1]) * pairs[0] / math.sqrt(n)
        out.append(f"seeds{f' at {rung}' if rung else ''}: one run's loss deviates by {single[0]:.4f} (all arms, "
                   f"{single[1]} degrees of freedom); a difference of two means of {n} is known to ± {interval:.4f} "
                   f"(95%), taken seed by seed to ± {paired:.4f}")
    return out


def _spread(groups: Sequence[np.ndarray]) -> tuple[float, int] | None:
    """(standard deviation within the groups, its degrees of freedom)."""
    degrees = sum(len(group) - 1 for group in groups if len(group))
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in groups if len(group))
    return (math.sqrt(squares / degrees), degrees) if degrees else None


def _half_width(values: np.ndarray) -> float:
    """Of the 95% interval of a mean (Student)."""
    return float(student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))


# --- tables


def _number(value: float | None, digits: int, sign: bool = False) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:+,.{digits}f}" if sign else f"{value:,.{digits}f}"


def columns(sweep: Sweep, rows: Sequence[Row]) -> dict[str, list[str]]:
    """The table as text, by column."""
    tuned, rungs = any(row.tuned for row in rows), any(row.rung for row in rows)
    mean = lambda row, values: float(np.mean(values)) if len(values) else None
    done = lambda row: [r for r in row.results if r.status == "finished"]
    table = {"size": [row.rung for row in rows]} if rungs else {}
    table["arm"] = [row.name for row in rows]
    if tuned:
        table["tuned to"] = [row.tuned for row in rows]
    table["runs"] = [_runs(row) for row in rows]
    table["held-out loss, nats/token"] = [
        _number(row.mean, 4) + (f" ± {row.interval:.4f}" if row.interval is not None else "") for row in rows]
    table["seed deviation"] = [_number(row.deviation, 4) for row in rows]
    table["difference"] = [_number(row.difference, 4, sign=True) for row in rows]
    table["seed by seed"] = [f"{row.paired[0]:+.4f} ± {row.paired[1]:.4f}" if row.paired else "-" for row in rows]
    size = lambda row: f" ({abs(row.difference) / row.pooled:.1f} seed deviations)" if row.pooled else ""
    table["verdict"] = [row.verdict + size(row) for row in rows]
    for name in sweep.measures:
        table[MEASURES[name].title] = [row.text(name) for row in rows]
    table["tokens"] = [_number(mean(row, [r.tokens for r in done(row)]), 0) for row in rows]
    return table


def timing(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The columns that depend on the machine."""
    mean = lambda values: float(np.mean(values)) if values else None
    done = lambda row: [r for r in row.results if r.status == "finished"]
    return {
        "tokens/s": [_number(mean([r.rate for r in done(row)]), 0) for row in rows],
        "training, s": [_number(mean([r.seconds for r in done(row)]), 1) for row in rows],
        "peak memory, GiB": [_number(mean([r.peak_bytes / 2**30 for r in done(row)]), 2) for row in rows],
    }


def _runs(row: Row) -> str:
    others = [f"{row.count(s)} {s}" for s in ("diverged", "failed", "running", "missing") if row.count(s)]
    return ", ".join([f"{row.count('finished')} of {len(row.results)}", *others])


def config_hash(config: Config) -> str:
    return hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode()).hexdigest()[:10]


def markdown(sweep: Sweep, results: Sequence[Result], rows: Sequence[Row]) -> str:
    """The table and what must stand beside it."""
    table = columns(sweep, rows) | timing(rows)
    lines = [f"# {sweep.question}", "", "| " + " | ".join(table) + " |", "|" + " --- |" * len(table)]
    lines += ["| " + " | ".join(cells) + " |" for cells in zip(*table.values())]
    lines += ["", NOTE, ""] + [f"- {line}" for line in (*seed_noise(rows), *provenance(sweep, results))]
    lost = [f"- {r.run.arm.name}, seed {r.run.seed}: {r.status}: {r.reason}" for r in results if r.reason]
    lines += ["", "Runs that did not come to a good end:", "", *lost] if lost else []
    lines += ["", f"Published: {sweep.published}"] if sweep.published else []
    return "\n".join(lines) + "\n"


NOTE = ("Loss: mean over seeds, ± the 95% interval of the mean. Difference: from the baseline. \"No difference\" is a "
        "difference within two standard deviations over seeds (of the arm and the baseline, pooled). Seed by seed: "
        "mean and 95% interval of the differences between runs of one seed, which share their data: it is the narrower "
        "one where that makes them alike.")


def provenance(sweep: Sweep, results: Sequence[Result]) -> list[str]:
    """What the numbers were made with."""
    seen = lambda key: sorted({r.facts[key] for r in results if r.facts.get(key)})
    config = sweep.base
    flops = step_flops(config).model / (config.data.batch_size * config.data.seq_len)
    return [
        f"model: {config.model.n_layers} layers, width {config.model.d_model}, "
        f"{flops / 1e6:,.1f} MFLOP a token forward and backward (baseline config)",
        f"data: {config.data.source} ({config.data.tokenizer} tokens), {config.data.batch_size} x "
        f"{config.data.seq_len} tokens a step, {config.train.steps} steps; seeds {', '.join(map(str, sweep.seeds))}",
        f"config {config_hash(config)} (baseline); every run's own is in its config.json and runs.csv",
        f"git commit: {', '.join(seen('git_commit')) or 'unknown (not a repository)'}",
        f"hardware: {', '.join(seen('hardware')) or 'none yet'}; {', '.join(seen('versions'))}",
    ]


def write_tables(sweep: Sweep, results: Sequence[Result], workdir: epath.PathLike) -> str:
    """Writes runs.csv (a row per run), table.csv and table.md (a row per arm). Returns the Markdown."""
    workdir, rows = epath.Path(workdir), summarise(sweep, results)
    per_run = [{
        "arm": r.run.arm.name, "size": r.run.arm.rung, "seed": r.run.seed, "status": r.status, "reason": r.reason,
        "heldout_loss": r.loss, "tokens": r.tokens, **{name: r.measure(name) for name in sweep.measures},
        "tokens_per_second": None if math.isnan(r.rate) else round(r.rate, 1),
        "training_seconds": None if math.isnan(r.rate) else round(r.seconds, 2), "peak_bytes": r.peak_bytes,
        "overrides": json.dumps(r.run.arm.overrides), "config_hash": config_hash(r.run.config),
        "git_commit": r.facts.get("git_commit", ""), "hardware": r.facts.get("hardware", ""), "folder": r.run.folder,
    } for r in results]
    (workdir / "runs.csv").write_text(_csv(list(per_run[0]), [list(row.values()) for row in per_run]))
    table = columns(sweep, rows) | timing(rows)
    (workdir / "table.csv").write_text(_csv(list(table), [list(cells) for cells in zip(*table.values())]))
    text = markdown(sweep, results, rows)
    (workdir / "table.md").write_text(text)
    return text


def _csv(header: list[str], rows: list[list[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return out.getvalue()

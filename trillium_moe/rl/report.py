"""`report.html` of the runs of one directory: all seeds in one picture, the oracle's and chance's lines drawn."""

from __future__ import annotations

import base64
import html
import json
from typing import Any

import numpy as np
from etils import epath
from matplotlib.figure import Figure

from trillium_moe.config import check
from trillium_moe.config_files import load_config
from trillium_moe.rl.config import RLConfig
from trillium_moe.rl.env import Session, make_env, oracle, play
from trillium_moe.train import figures, report
from trillium_moe.train.figures import AMBER, BLUE, MUTED, TEAL
from trillium_moe.train.metrics import read_arrays, read_metrics
from trillium_moe.train.report_page import PAGE

CAPTIONS = {
    "success": "Held-out tasks, a line a seed. Dashed: the oracle, and an answer without a call. Amber: SFT that "
               "went on from the same start, for as much computation. Right: calls of an episode, in all and of every "
               "tool. Where they fall towards the oracle's, the policy knows where to look.",
    "training": "Rollouts, and the entropy of the policy: at zero it explores no more.",
    "objective": "Left: tokens that the objective cut off. Middle: mean distance between the trainer's and the "
                 "sampler's log-probability of a token. Right: age of trained tokens.",
    "state": "By forking groups and extending observations, against prefilling the whole history at every turn.",
    "effort": "Success against tokens written, one line a seed, at the last evaluation.",
    "load": "Experts of every layer in the last update that was logged: neutral is the mean load.",
    "errors": "Errors per trajectory in the rollouts.",
}  # fmt: skip
WIDE = ("success", "objective", "training")


def runs(workdir: epath.PathLike) -> dict[str, tuple[epath.Path, RLConfig]]:
    """Runs below a directory by name, or the run that it is. Raises ConfigError if there is none."""
    workdir = epath.Path(workdir)
    folders = [workdir] if (workdir / "metrics.jsonl").exists() else sorted(
        p.parent for p in workdir.glob("*/metrics.jsonl"))
    check(len(folders) > 0, "workdir", str(workdir), "holds no run of experiments.rl")
    return {p.name: (p, load_config(p, RLConfig)) for p in folders}


def bounds(config: RLConfig, n: int = 200) -> dict[str, float]:
    """Calls and success of the oracle, and the success of an answer without a call, over held-out tasks."""
    envs = [make_env(spec) for spec in config.task.envs]
    episodes = [envs[i % len(envs)].episode(10**9 + i, "heldout") for i in range(n)]
    chance = float(np.mean([e.chance for e in episodes[:32]]))
    played = [play(Session(e), oracle) for e in episodes]
    return {"oracle_success": float(np.mean([s.success for s in played])),
            "oracle_calls": float(np.mean([s.calls for s in played])), "chance": chance}


def sft_only(folder: epath.Path) -> list[dict[str, Any]]:
    path = folder / "sft_only.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(workdir: epath.PathLike) -> dict[str, Any]:
    """Start, end and the other arm of every seed, as numbers and as lines of text."""
    out: dict[str, Any] = {"runs": {}, "text": []}
    for name, (folder, config) in runs(workdir).items():
        lines = [m for m in read_metrics(folder) if "heldout/success" in m]
        if not out.get("oracle_success"):
            out |= bounds(config)
        if not lines:
            continue
        first, last, other = lines[0], lines[-1], sft_only(folder)
        pick = lambda m: {key: round(m[key], 4) for key in ("heldout/success", "greedy/success", "heldout/calls")}
        row = {"updates": last["step"], "start": pick(first), "end": pick(last)}
        show = lambda m: (f"success {m['heldout/success']:.3f} (greedy {m['greedy/success']:.3f}), "
                          f"{m['heldout/calls']:.2f} calls")
        text = f"{name}: start {show(first)}; after {last['step']} updates {show(last)}"
        if other:
            row["sft_only"] = pick(other[-1])
            text += f"; SFT only {show(other[-1])}"
        out["runs"][name] = row
        out["text"].append(text)
    out["text"].append(f"oracle: success {out['oracle_success']:.3f}, {out['oracle_calls']:.2f} calls; "
                       f"an answer without a call: {out['chance']:.3f}")
    return out


# --- pictures


def _lines(axes, all_lines, key, color, label="", **kw):
    for i, lines in enumerate(all_lines):
        points = [(m["step"], m[key]) for m in lines if key in m]
        if points:
            axes.plot(*zip(*points), color=color, label=label if i == 0 else "", **kw)
    axes.set_xlabel("update")


@figures.styled
def success(all_lines, others, config, marks) -> Figure:
    """Held-out success, sampled and greedy, and calls, against the oracle's, a guess's, and the SFT-only arm's."""
    figure = Figure(figsize=figures.WIDE)
    left, middle, right = figure.subplots(1, 3)
    last = max((m["step"] for lines in all_lines for m in lines), default=1)
    for axes, key, title in ((left, "heldout/success", "Held-out success, sampled"),
                             (middle, "greedy/success", "Held-out success, greedy"),
                             (right, "heldout/calls", "Calls of an episode")):
        _lines(axes, all_lines, key, BLUE, "RL", marker="o", ms=3)
        for i, lines in enumerate(others):
            if not lines:
                continue
            start = next((m[key] for m in all_lines[i] if key in m), None)
            x = [0.0, *(m["share"] * last for m in lines)]
            axes.plot(x, [start, *(m[key] for m in lines)], color=AMBER, label="SFT only" if i == 0 else "")
        axes.set_title(title)
    for axes in (left, middle):
        for value, name in ((marks["oracle_success"], "oracle"), (marks["chance"], "no call")):
            axes.axhline(value, color=MUTED, ls="--", lw=1, label=f"{name} {value:.2f}")
        axes.set_ylim(-0.03, 1.05)
    right.axhline(marks["oracle_calls"], color=MUTED, ls="--", lw=1, label=f"oracle {marks['oracle_calls']:.2f}")
    tools = sorted({key for lines in all_lines for m in lines for key in m if key.startswith("heldout/calls_")})
    for key, style in zip(tools if len(tools) <= 3 else (), (":", "-.", (0, (5, 2)))):
        filled = [[{**m, key: m.get(key, 0.0)} for m in lines if "heldout/calls" in m] for lines in all_lines]
        _lines(right, filled, key, TEAL, key.removeprefix("heldout/calls_"), ls=style)
    right.set_ylim(bottom=0)
    left.legend(fontsize=8)
    right.legend(fontsize=8, loc="lower left", ncols=3)
    return figure


@figures.styled
def training(all_lines, others, config, marks) -> Figure:
    figure = Figure(figsize=figures.WIDE)
    left, middle, right = figure.subplots(1, 3)
    _lines(left, all_lines, "rollout/success", BLUE, "success")
    _lines(left, all_lines, "rollout/reward", TEAL, "reward")
    left.set_title("Rollouts")
    left.legend(fontsize=8.5)
    _lines(middle, all_lines, "rl/entropy", BLUE)
    middle.axhline(config.entropy_floor, color=AMBER, ls="--", lw=1)
    middle.set_title("Entropy, nats a token")
    middle.set_ylim(bottom=0)
    _lines(right, all_lines, "rollout/tokens", BLUE, "written")
    _lines(right, all_lines, "rollout/length", TEAL, "in all")
    right.set_title("Tokens of a trajectory")
    right.legend(fontsize=8.5)
    return figure


@figures.styled
def objective(all_lines, others, config, marks) -> Figure:
    figure = Figure(figsize=figures.WIDE)
    left, middle, right = figure.subplots(1, 3)
    _lines(left, all_lines, "rl/masked", BLUE)
    left.set_title("Tokens cut off")
    _lines(middle, all_lines, "rl/log_ratio", BLUE)
    middle.set_title("|log π / μ|, nats")
    ages = marks["ages"]
    right.bar(range(len(ages)), ages / max(1, ages.sum()), color=BLUE)
    right.set_title("Age of trained tokens")
    right.set_xlabel("policy versions")
    return figure


@figures.styled
def state(all_lines, others, config, marks) -> Figure:
    figure = Figure(figsize=figures.SIZE)
    axes = figure.subplots()
    _lines(axes, all_lines, "rollout/prefill_saved", BLUE)
    axes.set_title("Prefill tokens saved")
    axes.set_ylim(0, 1)
    return figure


@figures.styled
def effort(all_lines, others, config, marks) -> Figure | None:
    if len(config.task.efforts) < 2:
        return None
    figure = Figure(figsize=figures.SIZE)
    axes = figure.subplots()
    for lines in all_lines:
        last = [m for m in lines if "heldout/success" in m][-1]
        points = [(last[f"heldout_{e}/tokens"], last[f"heldout_{e}/success"]) for e in config.task.efforts]
        axes.plot(*zip(*points), color=BLUE, marker="o")
        for name, point in zip(config.task.efforts, points):
            axes.annotate(name, point, xytext=(6, -10), textcoords="offset points", color=MUTED)
    axes.set_title("Success by effort")
    axes.set_xlabel("tokens written")
    axes.set_ylim(0, 1.05)
    return figure


@figures.styled
def errors(all_lines, others, config, marks) -> Figure | None:
    keys = sorted({key for lines in all_lines for m in lines for key in m if key.startswith("rollout/error_")})
    if not keys:
        return None
    figure = Figure(figsize=figures.SIZE)
    axes = figure.subplots()
    for key, color in zip(keys, (BLUE, TEAL, AMBER, MUTED, "#8f5fd7", "#c0392b", "#3f7d3a")):
        filled = [[{**m, key: m.get(key, 0.0)} for m in lines if "rollout/success" in m] for lines in all_lines]
        _lines(axes, filled, key, color, key.removeprefix("rollout/error_").replace("_", " "))
    axes.set_title("Errors a trajectory")
    axes.legend(fontsize=8.5)
    return figure


PICTURES = {"success": success, "training": training, "objective": objective, "state": state,
            "effort": effort, "errors": errors}


def write_report(workdir: epath.PathLike) -> epath.Path:
    """Writes `report.html` and `figures/` into a directory of runs. Raises ConfigError if there is none."""
    workdir, found = epath.Path(workdir), runs(workdir)
    folders = [folder for folder, _ in found.values()]
    config = next(iter(found.values()))[1]
    all_lines, others = [read_metrics(f) for f in folders], [sft_only(f) for f in folders]
    numbers = summary(workdir)
    arrays = [read_arrays(f)[1] for f in folders]
    ages = [a["rl/ages_A"] for a in arrays if "rl/ages_A" in a]
    marks = numbers | {"ages": sum((np.pad(a, (0, max(map(len, ages)) - len(a))) for a in ages), np.zeros(1))
                       if ages else np.zeros(1)}
    drawn = {name: draw(all_lines, others, config, marks) for name, draw in PICTURES.items()}
    drawn["load"] = figures.expert_load(arrays[0].get("router/load_LE"), config.training(config.optim, 1))
    plates, folder = [], workdir / "figures"
    folder.mkdir(exist_ok=True)
    for name, figure in drawn.items():
        if figure is None:
            continue
        png = report.png(figure)
        (folder / f"{name}.png").write_bytes(png)
        wide = " class=wide" if name in WIDE else ""
        plates.append(f'<figure{wide}><img alt="{name}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
                      f"<figcaption>{html.escape(CAPTIONS[name])}</figcaption></figure>")
    samples = folders[0] / "trajectories.txt"
    text = samples.read_text() if samples.exists() else ""
    done = all(row["updates"] >= config.updates for row in numbers["runs"].values()) and bool(numbers["runs"])
    page = PAGE
    for key, value in {
        "title": html.escape(config.name),
        "done": "done" if done else "", "state": "finished" if done else "in progress",
        "subtitle": html.escape(f"reinforcement learning · {', '.join(config.task.envs)} · {config.objective.name} · "
                                f"{len(folders)} seeds"),
        "cards": _cards(numbers), "plates": "\n".join(plates),
        "sample": f"<h2>Held-out trajectories</h2><pre>{html.escape(text)}</pre>" if text else "",
        "facts": "<br>".join(map(html.escape, numbers["text"])), "config": report.config_tables(config, RLConfig()),
    }.items():  # fmt: skip
        page = page.replace(f"@{key}@", value)
    (workdir / "report.html").write_text(page)
    return workdir / "report.html"


def _cards(numbers: dict[str, Any]) -> str:
    rows = list(numbers["runs"].values())
    mean = lambda arm, key: float(np.mean([row[arm][key] for row in rows if arm in row]))
    cards = []
    for arm, label in (("start", "held-out success after SFT"), ("end", "after RL"), ("sft_only", "SFT only, as long")):
        if any(arm in row for row in rows):
            cards += [(label, f"{mean(arm, 'heldout/success'):.2f}"),
                      (f"calls {label.removeprefix('held-out success ')}", f"{mean(arm, 'heldout/calls'):.2f}")]
    return "".join(f"<div><b>{value}</b><span>{html.escape(label)}</span></div>" for label, value in cards)

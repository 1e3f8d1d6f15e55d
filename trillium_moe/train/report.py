"""`report.html` of a run: one self-contained page, written from what the run directory holds so far."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trillium_moe.config import Config
from trillium_moe.config_files import load_config
from trillium_moe.train import figures
from trillium_moe.train.counts import human
from trillium_moe.train.facts import read_facts
from trillium_moe.train.figures_vision import vision_accuracy
from trillium_moe.train.metrics import array_steps, read_arrays, read_metrics
from trillium_moe.train.report_page import PAGE

CAPTIONS = {
    "loss": (
        "Left: the loss of logged steps; with many of them faint, and their running mean on top. It "
        "should fall fast, then bend. Right: loss on text the model never trains on. Below the dashed"
        " line it uses context; above it, counting bytes would do better."
    ),
    "load": (
        "One row per MoE layer, one column per expert. Neutral is the mean load, orange too many "
        "tokens, blue too few. A balanced router leaves the picture nearly blank; a cell of full blue "
        "is a dead expert."
    ),
    "history": (
        "The same picture at five moments of the run, all in one scale: bands that stay are experts the balancing does "
        "not reach."
    ),
    "routing": (
        "Left: how far the idlest expert of a layer is below the mean, mean over layers; 1 is an expert without "
        "tokens. Middle: entropy of the loads (1 is even) and the range of the router bias. Right: the share of a "
        "token's experts that changed since the evaluation before, on the same held-out tokens."
    ),
    "balance": (
        "Line: mean over layers; shaded up to the worst layer. Sampling alone leaves the dashed "
        "floor, √(2 ln n / q) for n experts with q tokens each: a line that reaches it is as balanced"
        " as can be."
    ),
    "depth": (
        "Each row is what one sublayer reads: the live sum of its own block, the sealed sums of "
        "earlier blocks, the embedding. It starts even across what exists (grey cells do not exist "
        "yet); structure is learned."
    ),
    "decay": (
        "Dots are channels, bars the middle half, thin lines 5 to 95 percent, circles medians. Layers"
        " should cover orders of magnitude: short half-lives see the last few tokens, long ones the "
        "whole context."
    ),
    "optimizer": (
        "The norm should settle after warm-up. Spikes that come back mean a learning rate too high or"
        " odd data. Below: the learning rate."
    ),
    "vision": (
        "Held-out pictures, one curve for each kind of question. Dotted: the best constant answer. Crosses: the same "
        "questions with the pictures exchanged; above the dotted line they would mean that the text gives it away."
    ),
    "pictures": (
        "What the model answered about held-out pictures at the last evaluation, token by token given the right ones "
        "before; the right answer is in grey where they differ."
    ),
    "speed": "Without compilation, evaluation and checkpoints. Dips are the machine, not the model.",
}


WIDE = ("loss", "history", "routing", "vision", "pictures")  # pictures that take the page's full width


def write_report(workdir: epath.PathLike) -> epath.Path:
    """Writes `report.html`, and its pictures into `figures/`. Returns the page's path.

    Raises:
      ConfigError: if the directory holds no config.
    """
    workdir = epath.Path(workdir)
    config = load_config(workdir)
    lines = read_metrics(workdir)
    step, arrays = read_arrays(workdir)
    facts = read_facts(workdir)
    pictures = {
        "loss": figures.losses(lines, facts.get("order0_bits_per_byte")),
        "load": figures.expert_load(arrays.get("router/load_LE"), config),
        "history": figures.load_history(_loads(workdir), config),
        "balance": figures.balance(lines),
        "routing": figures.routing(lines),
        "depth": figures.depth_attention(arrays.get("attn_res/weights_SN")),
        "decay": figures.half_lives(arrays.get("kda/log_decay_LHK"), config),
        "optimizer": figures.optimizer(lines, config),
        "speed": figures.throughput(lines),
        "vision": vision_accuracy(lines),
    }
    folder = workdir / "figures"
    folder.mkdir(exist_ok=True)
    shown = {}
    for name, figure in pictures.items():
        if figure is not None:
            shown[name] = png(figure)
            (folder / f"{name}.png").write_bytes(shown[name])
    if (workdir / "pictures.png").exists():  # drawn at the end of training, by the process that had the model
        shown["pictures"] = (workdir / "pictures.png").read_bytes()
    sample = (workdir / "sample.txt").read_text() if (workdir / "sample.txt").exists() else ""
    page = workdir / "report.html"
    page.write_text(_page(config, lines, step, facts, shown, sample))
    return page


def _loads(workdir: epath.Path) -> list[tuple[int, np.ndarray]]:
    """(step, load_LE) of every step whose arrays were written."""
    found = (read_arrays(workdir, step) for step in array_steps(workdir))
    return [(step, arrays["router/load_LE"]) for step, arrays in found if "router/load_LE" in arrays]


def _page(config: Config, lines: list[dict], array_step: int, facts: dict, shown: dict[str, bytes], sample: str) -> str:
    last = lines[-1] if lines else {}
    done = last.get("step", 0)
    state = "finished" if done >= config.train.steps else f"step {done:,} of {config.train.steps:,}"
    notes = {"load": f" Step {array_step:,}.", "depth": f" Step {array_step:,}.", "decay": f" Step {array_step:,}."}
    plates = "\n".join(
        f'<figure class="{"wide" if name in WIDE else ""}"><img alt="{name}" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{html.escape(CAPTIONS[name])}{notes.get(name, '')}</figcaption></figure>"
        for name, png in shown.items())
    if not shown:
        plates = '<p class="empty">No step has been logged yet.</p>'
    parts = {
        "title": html.escape(config.name),
        "state": state,
        "done": "done" if done >= config.train.steps else "",
        "subtitle": html.escape(" · ".join(_subtitle(config, facts))),
        "cards": "".join(f"<div><b>{value}</b><span>{html.escape(label)}</span></div>"
                         for label, value in _cards(config, lines, facts)),
        "plates": plates,
        "sample": f"<section><h2>Sample</h2><pre>{html.escape(sample)}</pre></section>" if sample else "",
        "facts": _table(_facts(config, facts)),
        "config": config_tables(config, Config()),
    }
    page = PAGE
    for name, value in parts.items():
        page = page.replace(f"@{name}@", value)
    return page


def _subtitle(config: Config, facts: dict) -> list[str]:
    out = [f"{config.model.n_layers} layers, width {config.model.d_model}, context {config.data.seq_len:,}"]
    if "started" in facts:
        out.append(f"started {facts['started'][:16].replace('T', ' ')} UTC")
    if "hardware" in facts:
        out.append(facts["hardware"])
    return out


def _cards(config: Config, lines: list[dict], facts: dict) -> list[tuple[str, str]]:
    """The numbers to see first: (label, value)."""
    newest: dict[str, float] = {}
    for line in lines:
        newest.update(line)
    out = []
    if "heldout/bits_per_byte" in newest:
        out.append(("held-out bits per byte", f"{newest['heldout/bits_per_byte']:.3f}"))
    if "train/loss" in newest:
        out.append(("training loss, nats per token", f"{newest['train/loss']:.3f}"))
    if "router/max_violation" in newest:
        floor = f" (floor {newest['router/floor']:.2f})" if "router/floor" in newest else ""
        out.append((f"MaxVio{floor}", f"{newest['router/max_violation']:.2f}"))
    out.append(("tokens trained on", human(newest.get("step", 0) * config.data.batch_size * config.data.seq_len)))
    rates = figures.series(lines, "perf/tokens_per_second")[1]
    if len(rates):
        out.append(("tokens per second, median", f"{np.median(rates):,.0f}"))
    if "parameters" in facts:
        counts = facts["parameters"]
        active = human(counts["active_text_without_input_embedding"])
        out.append((f"parameters, {active} active", human(counts["total"])))
    return out


def _facts(config: Config, facts: dict) -> dict[str, Any]:
    counts = facts.get("parameters", {})
    rows = {
        "parameters": f"{counts['total']:,}" if counts else "",
        "active per token, without input embedding": f"{counts['active_text_without_input_embedding']:,}"
        if counts else "",
        "tokens per step": f"{config.data.batch_size * config.data.seq_len:,}",
        "order-0 entropy of the held-out text": f"{facts['order0_bits_per_byte']:.3f} bits per byte"
        if facts.get("order0_bits_per_byte") else "",
        "hardware": facts.get("hardware", ""),
        "versions": facts.get("versions", ""),
        "git commit": facts.get("git_commit", ""),
    }
    return {key: value for key, value in rows.items() if value}


def config_tables(config: Any, default: Any) -> str:
    """HTML of a config dataclass by section, with what differs from `default` coloured."""
    sections = _sections(dataclasses.asdict(config), dataclasses.asdict(default))
    return "".join(f"<div><h3>{name}</h3>{_table(values)}</div>" for name, values in sections.items())


def _sections(ours: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Fields by section; those that differ from the defaults are marked in `_table` by a trailing star."""
    sections: dict[str, dict[str, Any]] = {"run": {}}

    def walk(name: str, values: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                walk(key if name == "run" else f"{name}.{key}", value, usual[key])
            else:
                star = " *" if value != usual[key] else ""
                sections.setdefault(name, {})[key + star] = value if value != "" else "—"

    walk("run", ours, default)
    return sections


def _table(rows: Mapping[str, Any]) -> str:
    cells = (f'<tr{" class=changed" if key.endswith(" *") else ""}><th>{html.escape(key.removesuffix(" *"))}</th>'
             f"<td>{html.escape(str(value))}</td></tr>" for key, value in rows.items())
    return f"<table>{''.join(cells)}</table>"


def png(figure: Figure) -> bytes:
    """The picture as the report embeds it."""
    content = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(content, format="png", dpi=160, metadata={"Software": None})
    return content.getvalue()

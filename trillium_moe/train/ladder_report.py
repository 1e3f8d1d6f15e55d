"""The page and the table of a ladder: what every stage can do at every length."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping
from typing import Any

from etils import epath

from trillium_moe.evals import long_figures
from trillium_moe.train.report import png
from trillium_moe.train.report_page import PAGE

CAPTIONS = {
    "heat": "Share of needles found, by where they lie (0: the beginning) and how much text there is. Rows past a "
            "stage's window are lengths it was not trained at.",
    "lift": "Each stage should lift the next length and keep the ones before. Bands: 95 percent intervals; dotted: "
            "chance.",
    "text": "Held-out text, nats per token over positions from 2^k on: a model that uses its window keeps falling.",
}
WIDE = ("heat", "lift")


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: a row per stage and task, a column per length; below it, what each stage trained on."""
    lengths = sorted({c["length"] for r in results.values() for c in r["cells"]})
    tasks = list(dict.fromkeys(c["task"] for r in results.values() for c in r["cells"]))
    lines = ["| after stage | task | " + " | ".join(f"{n:,}" for n in lengths) + " |",
             "| --- | --- |" + " --- |" * len(lengths)]
    for task in tasks:
        for name, result in results.items():
            cells = {c["length"]: c for c in result["cells"] if c["task"] == task}
            row = [f"{100 * cells[n]['accuracy']:.1f} ({cells[n]['n']})" if n in cells else "" for n in lengths]
            lines.append(f"| {name} | {task} | " + " | ".join(row) + " |")
    lines += ["", "Percent right, teacher-forced (answers).", "",
              "| stage | window | steps x rows | tokens | tokens/s | peak memory | loss at the first window, nats | "
              "context gain, nats | gate |", "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    for name, r in results.items():
        gain = [t["gain"] for t in r["text"] if t["length"] == r["window"]]
        rate, peak = r.get("tokens_per_second"), r.get("peak_bytes")
        lines.append(
            f"| {name} | {r['window']:,} | {r['steps']:,} x {r['rows']} | {r['steps'] * r['rows'] * r['window']:,} | "
            + (f"{rate:,.0f}" if rate else "") + " | " + (f"{peak / 2**30:.1f} GiB" if peak else "")
            + f" | {r['short_loss']:.4f} | " + (f"{gain[0]:.4f}" if gain else "") + " | "
            + ("; ".join(r["failed"]) or "passed") + " |")
    return "\n".join(lines) + "\n"


def write_ladder(workdir: epath.PathLike, results: Mapping[str, Mapping[str, Any]]) -> epath.Path:
    """Writes `table.md`, `ladder.html` and the pictures in `figures/`. Returns the page's path."""
    workdir = epath.Path(workdir)
    (workdir / "figures").mkdir(parents=True, exist_ok=True)
    (workdir / "table.md").write_text(table(results))
    pictures = {"heat": long_figures.needle_maps(results), "lift": long_figures.lifts(results),
                "text": long_figures.text_losses(results)}
    plates = []
    for name, figure in pictures.items():
        if figure is None:
            continue
        content = png(figure)
        (workdir / "figures" / f"{name}.png").write_bytes(content)
        plates.append(f'<figure class="{"wide" if name in WIDE else ""}"><img alt="{name}" '
                      f'src="data:image/png;base64,{base64.b64encode(content).decode()}">'
                      f"<figcaption>{html.escape(CAPTIONS[name])}</figcaption></figure>")
    last = list(results.values())[-1]
    at_window = [c for c in last["cells"] if c["length"] == last["window"]]
    parts = {
        "title": "Context ladder", "state": f"{len(results)} stages", "done": "done",
        "subtitle": html.escape(" → ".join(f"{r['window']:,}" for r in results.values()) + " tokens"),
        "cards": "".join(f"<div><b>{c['accuracy']:.1%}</b><span>{c['task']} at {c['length']:,}</span></div>"
                         for c in at_window),
        "plates": "\n".join(plates), "sample": "", "facts": f"<pre>{html.escape(table(results))}</pre>", "config": "",
    }
    page = PAGE
    for name, value in parts.items():
        page = page.replace(f"@{name}@", value)
    path = workdir / "ladder.html"
    path.write_text(page)
    return path

"""`report.html` of a sweep: one self-contained page, written from what its run directories hold so far."""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Mapping, Sequence

from etils import epath
from matplotlib.figure import Figure

from trillium_moe.sweep import figures
from trillium_moe.sweep.gather import (
    NOTE,
    Result,
    Row,
    columns,
    config_hash,
    provenance,
    seed_noise,
    summarise,
    timing,
)
from trillium_moe.sweep.ladder import ladder_figure, ladder_table
from trillium_moe.sweep.plan import Sweep
from trillium_moe.train.report import png
from trillium_moe.train.report_page import PAGE

CAPTIONS = {
    "differences": "A dot is a run, a bar the mean of an arm's seeds. Inside the grey band a difference is what "
                   'another seed does as well, and the verdict is "no difference".',
    "loss": "Left: what a token teaches. Right: what a second teaches; an arm that learns more per token may learn "
            "less per second. Running means.",
    "balance": "A rule is quick if its curve is soon between the dashed lines, and good if it stays there. Below the "
               "floor no rule can stay: it is what random tokens do under perfect balance.",
    "ladder": "Loss against compute for each size, with the fitted power laws. The horizontal distance between two "
              "curves is the effective speed-up.",
}
WIDE = ("differences", "loss", "balance", "ladder")


def write_report(sweep: Sweep, results: Sequence[Result], workdir: epath.PathLike) -> epath.Path:
    """Writes `report.html`, and its pictures into `figures/`. Returns the page's path."""
    workdir, rows = epath.Path(workdir), summarise(sweep, results)
    pictures: dict[str, Figure | None] = {
        "ladder": ladder_figure(sweep, rows),
        "differences": figures.differences(rows) if not any(row.rung for row in rows) else None,
        "balance": figures.balance(rows) if "steps_to_balance" in sweep.measures else None,
        "loss": figures.loss_curves(rows),
    }
    for name in sweep.measures:
        pictures[name] = figures.bars(rows, name)
    folder = workdir / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    shown = {}
    for name, figure in pictures.items():
        if figure is not None:
            shown[name] = png(figure)
            (folder / f"{name}.png").write_bytes(shown[name])
    page = workdir / "report.html"
    page.write_text(_page(sweep, results, rows, shown))
    return page


def _page(sweep: Sweep, results: Sequence[Result], rows: Sequence[Row], shown: Mapping[str, bytes]) -> str:
    done = sum(r.status in ("finished", "diverged") for r in results)
    plates = [_plate("Result", _grid(columns(sweep, rows)), NOTE)]
    extra = ladder_table(sweep, rows)
    if extra:
        plates.append(_plate("Scaling", _grid(extra), "Power laws of loss over compute, and how much more compute the "
                             "baseline would need for the same loss."))
    plates += [
        f'<figure class="{"wide" if name in WIDE else ""}"><img alt="{name}" '
        f'src="data:image/png;base64,{base64.b64encode(image).decode()}">'
        f"<figcaption>{html.escape(CAPTIONS.get(name, ''))}</figcaption></figure>" for name, image in shown.items()]
    plates.append(_plate("Cost", _grid({"arm": [_name(row) for row in rows], **timing(rows)}),
                         "Runs that share a device slow one another down: compare times only within a sweep that ran "
                         "one at a time."))
    parts = {
        "title": html.escape(sweep.question),
        "state": f"{done} of {len(results)} runs",
        "done": "done" if done == len(results) else "",
        "subtitle": html.escape(sweep.published and f"Published: {sweep.published}"),
        "cards": "".join(f"<div><b>{html.escape(v)}</b><span>{html.escape(k)}</span></div>" for k, v in _cards(rows)),
        "plates": "\n".join(plates),
        "sample": _runs(results),
        "facts": "<br>".join(html.escape(line) for line in (*seed_noise(rows), *provenance(sweep, results))),
        "config": _config(sweep),
    }
    page = PAGE
    for name, value in parts.items():
        page = page.replace(f"@{name}@", value)
    return page


def _name(row: Row) -> str:
    return f"{row.rung}: {row.name}" if row.rung else row.name


def _cards(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The numbers to see first: (label, value)."""
    base = next((row for row in rows if row.verdict == "baseline"), None)
    out = []
    if base is not None and base.mean is not None:
        out.append((f"held-out loss of the baseline, {_name(base)}", f"{base.mean:.4f}"))
        if base.deviation is not None:
            out.append(("its deviation over seeds", f"{base.deviation:.4f}"))
    judged = [row for row in rows if row.difference is not None]
    for verdict in ("better", "worse"):
        named = [row for row in judged if row.verdict == verdict]
        names = f": {_name(named[0])}" if len(named) == 1 else ""
        out.append((f"{verdict} than the baseline", f"{len(named)}{names}"))
    out.append(("no difference", str(sum(row.verdict == "no difference" for row in judged))))
    lost = sum(row.count("diverged") for row in rows)
    if lost:
        out.append(("diverged runs", str(lost)))
    return out


def _plate(title: str, body: str, caption: str) -> str:
    return (f'<figure class="wide"><h3>{html.escape(title)}</h3><div style="overflow-x:auto">{body}</div>'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>")


def _grid(table: Mapping[str, Sequence[str]]) -> str:
    """A table with a heading row; the first column and verdicts read from the left."""
    side = lambda name: "left" if name in ("size", "arm", "verdict", "runs", "tuned to") else "right"
    cell = lambda tag, name, text: (f'<{tag} style="text-align:{side(name)};padding:4px 14px 4px 0">'
                                    f"{html.escape(text)}</{tag}>")
    head = "".join(cell("th", name, name) for name in table)
    body = "".join(f"<tr>{''.join(cell('td', name, text) for name, text in zip(table, row))}</tr>"
                   for row in zip(*table.values()))
    return f"<table><tr>{head}</tr>{body}</table>"


def _runs(results: Sequence[Result]) -> str:
    """Every run with its config's hash; what went wrong stands in red letters of its own."""
    rows = [{"arm": f"{r.run.arm.rung}: {r.run.arm.name}" if r.run.arm.rung else r.run.arm.name,
             "seed": str(r.run.seed), "status": r.status,
             "held-out loss": "-" if r.loss is None else f"{r.loss:.4f}", "config": config_hash(r.run.config),
             "commit": r.facts.get("git_commit", "") or "-", "folder": r.run.folder, "reason": r.reason}
            for r in results]
    table = {name: [row[name] for row in rows] for name in rows[0]}
    if not any(table["reason"]):
        del table["reason"]
    return f'<details><summary>Runs</summary><div class="panel" style="overflow-x:auto">{_grid(table)}</div></details>'


def _config(sweep: Sweep) -> str:
    """The base config, group by group."""
    def rows(values: Mapping) -> str:
        return "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(str(v))}</td></tr>" for k, v in values.items()
                       if not isinstance(v, dict))

    def groups(name: str, values: Mapping) -> str:
        own = f"<div><h3>{html.escape(name)}</h3><table>{rows(values)}</table></div>"
        return own + "".join(groups(f"{name}.{k}" if name != "run" else k, v)
                             for k, v in values.items() if isinstance(v, dict))

    return groups("run", dataclasses.asdict(sweep.base))

"""Pictures of what a model reads from pictures: accuracy over the run, and examples with their answers."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from trillium_moe.data.picture_tasks import Example
from trillium_moe.train.figures import BLUE, GRID, MUTED, WIDE, Lines, series, styled

COLUMNS = 8
GOOD, BAD = "#0f9b8e", "#b4540a"


@styled
def vision_accuracy(lines: Lines) -> Figure | None:
    """One panel for each kind of question: exact answers, chance, and with the pictures exchanged."""
    suffixes = ("_chance", "_exchanged", "_loss")
    tasks = sorted({key.removeprefix("vision/") for line in lines for key in line
                    if key.startswith("vision/") and not key.endswith(suffixes)})
    if not tasks:
        return None
    columns = min(6, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(WIDE[0], 0.4 + 2.3 * rows))
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).reshape(-1)
    for axes in panels[len(tasks):]:
        axes.set_visible(False)
    for axes, task in zip(panels, tasks):
        axes.set_title(task.replace("_", " "))
        axes.plot(*series(lines, f"vision/{task}"), color=BLUE, marker="o", ms=4, mec="white", mew=0.8)
        axes.plot(*series(lines, f"vision/{task}_exchanged"), color=MUTED, marker="x", ms=4, ls="none")
        chance = series(lines, f"vision/{task}_chance")[1]
        axes.axhline(chance[-1], color=MUTED, ls=":", lw=1.2)
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
        axes.set_xlabel("step")
    return figure


def picture_plate(said: Sequence[tuple[Example, str]]) -> bytes:
    """A PNG: every example's picture, its question and the answer given."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, "backend": "agg", "font.size": 8.5}):
        rows = -(-len(said) // COLUMNS)
        figure = Figure(figsize=(1.6 * COLUMNS, 2.05 * rows), facecolor="white", layout="constrained")
        panels = figure.subplots(rows, COLUMNS, squeeze=False).reshape(-1)
        for axes in panels:
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        for axes, (example, answer) in zip(panels, said):
            picture = example.pictures[0]
            axes.imshow(picture[0] if isinstance(picture, list) else picture, interpolation="nearest")
            axes.spines[:].set(visible=True, color=GRID)
            right = answer == example.answer
            legible = "".join(c if c.isprintable() else "\N{MIDDLE DOT}" for c in answer)
            lines = textwrap.wrap(f"{textwrap.shorten(example.prompt, 40)} {legible}", 22)[:3]
            axes.set_title("\n".join(lines), fontsize=8.5, color=GOOD if right else BAD, loc="left")
            if not right:
                axes.annotate(textwrap.shorten(example.answer, 30), (0, -0.06), xycoords="axes fraction", color=MUTED,
                              va="top", annotation_clip=False)
        content = io.BytesIO()
        FigureCanvasAgg(figure)
        figure.savefig(content, format="png", dpi=110, metadata={"Software": None})
        return content.getvalue()

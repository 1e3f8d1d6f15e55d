"""Every notebook runs top to bottom, draws something, and is the same in both of its forms.

Cells of the .py files are executed here without Jupyter, which the test environment does not hold; `make notebooks`
runs the .ipynb files in it.
"""

import ast
import json
import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
QUICK = {"decay_and_tiles": 2, "quantile_balancing": 2}  # pictures of each, at least
SLOW = {"agent": 4, "attention_residuals": 4, "first_steps": 8, "long_context": 3, "pod_plan": 1}


def cells(path: Path) -> list[tuple[str, str]]:
    """(kind, source) of the cells of a jupytext percent file."""
    body = re.sub(r"\A# ---\n.*?\n# ---\n", "", path.read_text(), flags=re.S)
    out = []
    for part in re.split(r"^# %%", body, flags=re.M)[1:]:
        first, _, rest = part.partition("\n")
        kind = "markdown" if "[markdown]" in first else "code"
        rest = rest.strip("\n")
        out.append((kind, re.sub(r"^# ?", "", rest, flags=re.M) if kind == "markdown" else rest))
    return out


def run(path: Path) -> list[Figure]:
    """Executes the code cells in one namespace. Returns the figures that they have as value or open in pyplot."""
    import matplotlib.pyplot as plt

    namespace, pictures = {"__name__": "__main__"}, []
    for number, (kind, source) in enumerate(cells(path)):
        if kind != "code":
            continue
        tree = ast.parse(source, filename=f"{path.name}, cell {number}")
        last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path.name}, cell {number}", "exec"), namespace)
        value = None if last is None else eval(compile(last, f"{path.name}, cell {number}", "eval"), namespace)
        opened = [plt.figure(i) for i in plt.get_fignums()]
        pictures += opened + ([value] if isinstance(value, Figure) and value not in opened else [])
        plt.close("all")
    return pictures


def assert_not_empty(figure: Figure) -> None:
    """Some of its axes hold data, and the picture of it is not of one colour."""
    assert any(axes.has_data() for axes in figure.axes)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3]
    assert (pixels != pixels[0, 0]).any(-1).mean() > 0.01


def check(name: str, pictures: int, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(matplotlib, "rcParams", matplotlib.rcParams.copy())
    matplotlib.use("agg")
    drawn = run(NOTEBOOKS / f"{name}.py")
    assert len(drawn) >= pictures
    for figure in drawn:
        assert_not_empty(figure)


@pytest.mark.parametrize("name", QUICK)
def test_quick_notebook_runs(name, tmp_path, monkeypatch):
    check(name, QUICK[name], tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_slow_notebook_runs(name, tmp_path, monkeypatch):
    check(name, SLOW[name], tmp_path, monkeypatch)


def test_no_notebook_is_forgotten():
    assert {path.stem for path in NOTEBOOKS.glob("*.py")} == {*QUICK, *SLOW}
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {*QUICK, *SLOW}


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_both_forms_are_the_same(name):
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    theirs = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert theirs == cells(NOTEBOOKS / f"{name}.py"), "run `make notebooks`"

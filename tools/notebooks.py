"""Executes notebooks/*.py and writes each with its outputs as .ipynb: python tools/notebooks.py [NAME ...]

The .py file (jupytext percent format) is the source. Needs the extra `notebooks`.
"""

import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in sys.argv[1:] or sorted(path.stem for path in (ROOT / "notebooks").glob("*.py")):
        print(name, flush=True)
        notebook = jupytext.read(ROOT / "notebooks" / f"{name}.py")
        NotebookClient(notebook, timeout=1200, kernel_name="python3",
                       resources={"metadata": {"path": str(ROOT / "notebooks")}}).execute()
        for i, cell in enumerate(notebook.cells):
            cell.id = f"cell-{i}"  # else a random one, new in every diff
            cell.metadata = {}
            if cell.cell_type == "code":  # progress bars and warnings are of one machine
                cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
        notebook.metadata.pop("widgets", None)
        notebook.metadata.get("language_info", {}).pop("version", None)
        nbformat.write(notebook, ROOT / "notebooks" / f"{name}.ipynb")


if __name__ == "__main__":
    main()

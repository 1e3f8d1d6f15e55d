"""`run.json` of a run: what only the training process knows, and what a figure needs beside it to be believed."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
from etils import epath

from trillium_moe.config import Config
from trillium_moe.train.counts import count_modules, totals


def write_facts(workdir: epath.PathLike, config: Config, **more: Any) -> None:
    """Writes `run.json`: what the report says about a run."""
    path = epath.Path(workdir) / "run.json"
    before = read_facts(workdir)  # a resumed run began when its first part did
    facts = {
        "started": before.get("started") or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": _hardware(),
        "versions": f"Python {platform.python_version()}, "
                    + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax")),
        "git_commit": git_commit(),
        "parameters": totals(count_modules(config.model)),
        **more,
    }
    path.write_text(json.dumps(facts, indent=2) + "\n")


def read_facts(workdir: epath.PathLike) -> dict[str, Any]:
    """What `write_facts` wrote; {} where no run has begun."""
    path = epath.Path(workdir) / "run.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _hardware() -> str:
    """`8 × NVIDIA H200`, or the processor and its cores."""
    if jax.default_backend() != "cpu":
        hosts = f" on {jax.process_count()} hosts" if jax.process_count() > 1 else ""
        return f"{jax.device_count()} × {jax.devices()[0].device_kind}{hosts}"
    info = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
              ] if info.exists() else []
    return f"{os.cpu_count()} cores, {(models or [platform.processor() or platform.machine()])[0]}"


def git_commit() -> str:
    """Commit of the source tree, with "+ changes" if it has any; "" outside a repository."""
    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    try:
        return git("rev-parse", "--short=12", "HEAD") + (" + changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""

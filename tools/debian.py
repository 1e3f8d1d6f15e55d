"""Debian packages as sources of data: fetched with apt-get's own sources, unpacked without installing anything."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


class Missing(Exception):
    """A package cannot be had: one line that says why, and what to do."""


def unpack(package: str, size: str, folder: Path) -> Path:
    """The package's files below `folder`, which is empty. Needs apt-get and dpkg-deb; no rights of an administrator."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise Missing(f"no {program} here: the pictures come from a Debian package; images.path takes any others")
    print(f"fetching {package} ({size})")
    done = subprocess.run(["apt-get", "download", package], cwd=folder, capture_output=True, text=True)
    packages = list(folder.glob("*.deb"))
    if done.returncode or not packages:
        reason = (done.stderr.strip().splitlines() or ["nothing came"])[-1]
        raise Missing(f"apt-get could not fetch {package}: {reason}; try `apt-get update` first")
    subprocess.run(["dpkg-deb", "-x", packages[0], folder], check=True)
    return folder


def collect(file: Path, package: str, size: str, pictures: Callable[[Path], list[dict[str, str]]]) -> int:
    """Makes `file`, JSON lines of pictures with texts, from a package, unless it is there. Returns the exit code.

    Args:
      pictures: (folder of the unpacked package) -> lines {"image": name relative to `file`, "text": ..}. It writes the
        pictures beside `file`.
    """
    if file.exists():
        print(f"{file} is there")
        return 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as temporary:
        try:
            lines = pictures(unpack(package, size, Path(temporary)))
        except Missing as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    part = file.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    part.replace(file)  # last: it says that all is there
    print(f"{file}: {len(lines)} pictures with texts")
    return 0

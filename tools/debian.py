"""Debian packages as sources of data: fetched with apt-get's own sources, unpacked without installing anything."""

import shutil
import subprocess
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

"""Debian's tuxpaint-stamps-default as captioned pictures: python tools/stamps.py DIRECTORY

785 pictures with captions by people (GPL-2), fetched with apt-get's own sources, unpacked without installing anything:
DIRECTORY/stamps/**.png and DIRECTORY/captions.jsonl. Needs apt-get and dpkg-deb; no rights of an administrator.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "tuxpaint-stamps-default"


def main(directory: str) -> int:
    out = Path(directory)
    if (out / "captions.jsonl").exists():
        print(f"{out / 'captions.jsonl'} is there")
        return 0
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            print(f"error: no {program} here: the pictures come from a Debian package; images.path takes any others",
                  file=sys.stderr)
            return 1
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        print(f"fetching {PACKAGE} (161 MB)")
        done = subprocess.run(["apt-get", "download", PACKAGE], cwd=temporary, capture_output=True, text=True)
        packages = list(Path(temporary).glob("*.deb"))
        if done.returncode or not packages:
            reason = (done.stderr.strip().splitlines() or ["nothing came"])[-1]
            print(f"error: apt-get could not fetch {PACKAGE}: {reason}; try `apt-get update` first", file=sys.stderr)
            return 1
        subprocess.run(["dpkg-deb", "-x", packages[0], temporary], check=True)
        root = Path(temporary, "usr/share/tuxpaint/stamps")
        lines = []
        for picture in sorted(root.rglob("*.png")):
            text = picture.with_suffix(".txt")
            caption = text.read_text(encoding="utf-8", errors="replace").splitlines()[:1] if text.exists() else []
            if not caption or not caption[0].strip():
                continue  # a mirrored or a help picture
            name = picture.relative_to(root)
            (out / "stamps" / name).parent.mkdir(parents=True, exist_ok=True)
            picture.replace(out / "stamps" / name)
            lines.append(json.dumps({"image": f"stamps/{name}", "text": caption[0].strip()}))
    part = out / "captions.part"
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.replace(out / "captions.jsonl")  # last: it says that all is there
    print(f"{out / 'captions.jsonl'}: {len(lines)} captioned pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 2 else __doc__)

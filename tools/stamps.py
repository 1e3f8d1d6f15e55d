"""Debian's tuxpaint-stamps-default as captioned pictures: python tools/stamps.py DIRECTORY

785 pictures with captions by people (GPL-2): DIRECTORY/stamps/**.png and DIRECTORY/captions.jsonl.
"""

import json
import sys
import tempfile
from pathlib import Path

from debian import Missing, unpack

PACKAGE = "tuxpaint-stamps-default"


def main(directory: str) -> int:
    out = Path(directory)
    if (out / "captions.jsonl").exists():
        print(f"{out / 'captions.jsonl'} is there")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        try:
            root = unpack(PACKAGE, "161 MB", Path(temporary)) / "usr/share/tuxpaint/stamps"
        except Missing as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
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

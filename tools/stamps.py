"""Debian's tuxpaint-stamps-default as captioned pictures: python tools/stamps.py DIRECTORY

785 pictures with captions by people (GPL-2): DIRECTORY/stamps/**.png and DIRECTORY/captions.jsonl.
"""

import sys
from pathlib import Path

from debian import collect


def main(directory: str) -> int:
    out = Path(directory)

    def stamps(unpacked: Path) -> list[dict[str, str]]:
        root, lines = unpacked / "usr/share/tuxpaint/stamps", []
        for picture in sorted(root.rglob("*.png")):
            text = picture.with_suffix(".txt")
            caption = text.read_text(encoding="utf-8", errors="replace").splitlines()[:1] if text.exists() else []
            if not caption or not caption[0].strip():
                continue  # a mirrored or a help picture
            name = picture.relative_to(root)
            (out / "stamps" / name).parent.mkdir(parents=True, exist_ok=True)
            picture.replace(out / "stamps" / name)
            lines.append({"image": f"stamps/{name}", "text": caption[0].strip()})
        return lines

    return collect(out / "captions.jsonl", "tuxpaint-stamps-default", "161 MB", stamps)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 2 else __doc__)

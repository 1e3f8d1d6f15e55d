"""Debian's fonts-noto-color-emoji as pictures with names: python tools/emoji.py DIRECTORY

Some 1,400 drawings of things (SIL Open Font License) with their Unicode names: DIRECTORY/emoji/*.png and
DIRECTORY/emoji.jsonl, for images.named.
"""

import sys
import unicodedata
from pathlib import Path

from debian import collect
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

SIZE, ROOM = 109, (136, 128)  # the only size of a bitmap font, and the pixels of its drawings
KINDS = ("So", "Sm", "Po")  # Unicode categories: symbols and punctuation; the font's letters and digits are plain ones


def draw(font: str, out: Path) -> list[dict[str, str]]:
    """A PNG in `out` for every character of the font that has a name, and the lines of the JSONL beside it."""
    out.mkdir(exist_ok=True)
    set_font, lines = ImageFont.truetype(font, SIZE, layout_engine=ImageFont.Layout.BASIC), []
    for code in sorted(FT2Font(font).get_charmap()):
        name = unicodedata.name(chr(code), "")
        if not name or unicodedata.category(chr(code)) not in KINDS:
            continue
        image = Image.new("RGBA", ROOM)
        ImageDraw.Draw(image).text((0, 0), chr(code), font=set_font, embedded_color=True)
        box = image.getchannel("A").getbbox()
        if box is None:
            continue
        image.crop(box).save(out / f"{code:x}.png")
        lines.append({"image": f"{out.name}/{code:x}.png", "text": name.lower()})
    return lines


def main(directory: str) -> int:
    out = Path(directory)
    drawings = lambda unpacked: draw(str(next(unpacked.rglob("NotoColorEmoji.ttf"))), out / "emoji")
    return collect(out / "emoji.jsonl", "fonts-noto-color-emoji", "10 MB", drawings)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 2 else __doc__)

"""Debian's Open Clip Art as pictures with names: python tools/clipart.py DIRECTORY

Some 3,300 drawings (public domain) with where they lie and what their file is called, "animals birds: penguin":
DIRECTORY/clipart/**.png and DIRECTORY/clipart.jsonl, for images.named. Sets of icons, stars, patterns and gradients are
left out, and so is every drawing that looks like a picture of DIRECTORY/stamps (`tools/stamps.py`), which took some of
its pictures from this library: those are to be new to a model that has read this.
"""

import re
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
from debian import collect
from PIL import Image
from tqdm import tqdm

LEFT_OUT = ("computer/icons", "computer/buttons", "shapes/stars", "shapes/jigsaw", "special", "unsorted/duplicates",
            "recreation/games/cards", "signs_and_symbols/led")
STORED = 256  # pixels of the longer side: more than any model here looks at
warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # they come from a signed package
ALIKE = 0.9  # correlation of two pictures from which on they count as the same


def words(name: str) -> str:
    """The words of a file or folder name, without numbers. Some end with the name of whoever drew it."""
    found = re.findall(r"[a-z]+", name.lower())
    return " ".join(w for w in found if w not in ("aiga", "and", "of", "svg", "the")) or " ".join(found)


def text_of(name: Path) -> str:
    """The words of the folders, and of the file if it has any."""
    folders = " ".join(map(words, name.parent.parts))
    return ": ".join(filter(None, (folders, words(name.stem))))


def open_picture(path: Path) -> Image.Image:
    """What is drawn in it, without the transparent border, RGBA."""
    image = Image.open(path).convert("RGBA")
    return image.crop(image.getchannel("A").getbbox())


def look(image: Image.Image) -> np.ndarray:
    """The picture on white, 16 by 16, of mean 0 and length 1: the product of two is how alike they are."""
    ground = Image.new("RGBA", image.size, "white")
    ground.alpha_composite(image)
    x = np.asarray(ground.convert("RGB").resize((16, 16), Image.Resampling.BOX), np.float32).ravel()
    x = x - x.mean()
    return x / (np.linalg.norm(x) + 1e-6)


def store(path: Path, to: Path, known: np.ndarray) -> str:
    """What became of the picture: stored (smaller), known (it looks like one of them) or large (for Pillow)."""
    try:
        image = open_picture(path)
    except Image.DecompressionBombError:
        return "large"
    if (known @ look(image)).max() > ALIKE:
        return "known"
    image.thumbnail((STORED, STORED), Image.Resampling.LANCZOS)
    to.parent.mkdir(parents=True, exist_ok=True)
    image.save(to)
    return "stored"


def main(directory: str) -> int:
    out = Path(directory)
    stamps = sorted((out / "stamps").rglob("*.png"))
    if not stamps:
        print(f"error: no pictures in {out / 'stamps'} to leave out; run `python tools/stamps.py {out}` first",
              file=sys.stderr)
        return 1

    def drawings(unpacked: Path) -> list[dict[str, str]]:
        root = unpacked / "usr/share/openclipart/png"
        names = [path.relative_to(root) for path in sorted(root.rglob("*.png")) if not path.is_symlink()]
        names = [name for name in names if not str(name).startswith(LEFT_OUT)]
        known = np.stack([look(open_picture(path)) for path in stamps])
        # three minutes, most of them for some posters of 100 megapixels
        became = [store(root / name, out / "clipart" / name, known) for name in tqdm(names, desc="drawings")]
        counts = Counter(became)
        print(f"left out: {counts['known']} that look like a stamp, {counts['large']} too large to read")
        return [{"image": f"clipart/{name}", "text": text_of(name)}
                for name, what in zip(names, became) if what == "stored"]

    return collect(out / "clipart.jsonl", "openclipart-png", "131 MB", drawings)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) == 2 else __doc__)

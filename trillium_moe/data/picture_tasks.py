"""Pictures with exact labels that need no download, each drawn from a random generator: what the stream is made of.

    digits    handwritten digits: 1,797 of scikit-learn, enlarged (extra `vision`)
    numbers   a printed digit in some font
    letters   one to three letters at random, to begin with
    words     a printed word; the fonts and the words of the held-out split are not those of the training split
    lines     two or three short words, one below the other
    shapes    coloured shapes: how many, where, which colour
    charts    bars: which is the tallest, how tall is one
    boards    3 x 3 boards of crosses and noughts: what is in a row
    svg       shapes to SVG code, and whether a code is that of the picture
    photos    crops of scikit-image's and scikit-learn's photographs: what they show (extra `vision`)
    glyphs    any character of a font: its Unicode name
    signs     a letter or digit as `glyphs` draws it, small to large: itself
    captions  captioned pictures of files (images.path), see `picture_files`
    named     pictures of other files (images.named) and what they show
    folders   the pictures of images.path: the folders that they lie in

A task is a function of (generator, whether held out) to an `Example`. Its held-out split differs from what is trained
on in more than the random numbers wherever that is possible: other handwriting, words, fonts, parts of a photograph.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from trillium_moe.config import ConfigError, ImagesConfig, check, check_choice
from trillium_moe.data.picture_glyphs import glyph, name_of
from trillium_moe.data.picture_text import Fonts, some_letters, some_word, varied, written

COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (235, 200, 40),
           "purple": (150, 60, 180), "black": (20, 20, 20)}
SHAPES = ("circle", "square", "triangle")
ALL_AT_ONCE = 0.7  # share of the training scenes whose shapes are counted all at once, and of those told all colours
ALONE = 0.3  # share of the training scenes with one shape: easy ones, to begin with
PLACES = 0.5  # share of those that are asked where a shape is


@dataclass(frozen=True)
class Example:
    """Pictures, then a text: the prompt carries no loss, the answer does.

    pictures: each a picture, or a list of up to model.vision.frames frames that share one picture's tokens.
    more: further prompts with their answers about the same pictures; of training alone, an evaluation asks once.
    """

    pictures: tuple[Image.Image | list[Image.Image], ...]
    prompt: str
    answer: str
    task: str
    more: tuple[tuple[str, str], ...] = ()


Task = Callable[[np.random.Generator, bool], Example]


# --- text


def make_words(fonts: Fonts, name: str) -> Task:
    def task(rng, held):
        if name == "letters":
            texts = [some_letters(rng, 1, 3)]
        else:
            texts = [some_word(rng, held) for _ in range(1 if name == "words" else rng.integers(2, 4))]
        if held:
            image = written(rng, texts, fonts.draw(rng, True, 14, 20))
        else:
            image = varied(rng, texts, fonts, 13, 21)
        return Example((image,), "read: ", " ".join(texts), name)

    return task


def make_numbers(fonts: Fonts) -> Task:
    def task(rng, held):
        digit = str(rng.integers(10))
        return Example((written(rng, [digit], fonts.draw(rng, held, 16, 26)),), "digit? ", digit, "numbers")

    return task


def make_glyphs(fonts: Fonts, most: int, name: str) -> Task:
    def task(rng, held):
        if name == "signs":  # the shortest text that says what is seen: three times as many fit into a row
            image, code = glyph(rng, fonts, held, most, latin=1.0)
            return Example((image,), "sign: ", chr(code), name)
        image, code = glyph(rng, fonts, held, most)
        return Example((image,), "name: ", name_of(code), name)

    return task


# --- drawings


def _scene(rng: np.random.Generator, kinds: list[tuple[str, str]], side: int = 56) -> tuple[Image.Image, np.ndarray]:
    """Shapes (kind, colour) that do not touch, and their centres in pixels."""
    placed: list[tuple[int, int, int]] = []
    while len(placed) < len(kinds):
        r = int(rng.integers(6, 11))
        for _ in range(30):
            x, y = rng.integers(r + 1, side - r - 1, 2).tolist()
            if all(max(abs(x - a), abs(y - b)) > r + s + 1 for a, b, s in placed):
                placed.append((x, y, r))
                break
        else:
            placed = []  # no room left: anew
    image = Image.new("RGB", (side, side), tuple(int(c) for c in rng.integers(225, 256, 3)))
    draw = ImageDraw.Draw(image)
    for (kind, colour), (x, y, r) in zip(kinds, placed):
        _shape(draw, kind, COLOURS[colour], x, y, r)
    return image, np.array([place[:2] for place in placed])


def _shape(draw: ImageDraw.ImageDraw, kind: str, colour: tuple, x: int, y: int, r: int) -> None:
    match kind:
        case "circle":
            draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
        case "square":
            draw.rectangle((x - r, y - r, x + r, y + r), fill=colour)
        case _:
            draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)


def shapes(rng: np.random.Generator, held: bool) -> Example:
    """Counts are 1 to 4, places one of four quarters, colours one of six: all equally often.

    A scene of the training split is asked for numbers and colours, often of all three kinds at once, and some for a
    place: it takes tens of thousands of pictures to tell the kinds apart, and the more is said of each, the fewer.
    """
    pick = lambda options: options[rng.integers(len(options))]
    asked, others, question = pick(SHAPES), list(SHAPES), ("count", "count", "position", "colour")[rng.integers(4)]
    others.remove(asked)
    n = int(rng.integers(1, 5)) if question == "count" else 1
    n_others = rng.integers(0, 5 - n) if question == "count" else rng.integers(1, 4)
    if not held and rng.random() < ALONE:
        n, n_others = 1, 0
    kinds = [(asked, pick(list(COLOURS))) for _ in range(n)]
    kinds += [(pick(others), pick(list(COLOURS))) for _ in range(n_others)]
    kinds = [kinds[i] for i in rng.permutation(len(kinds))]
    image, centres = _scene(rng, kinds)
    questions = _questions(kinds, centres)
    if (question, asked) not in questions:  # neither left nor right, or neither top nor bottom
        return shapes(rng, held)
    if held:
        return Example((image,), *questions[question, asked], question)
    turns = []
    for about, prompt in (("count", "counts? "), ("colour", "colours? "), ("position", "")):
        own = {shape: questions[about, shape][1] for shape in SHAPES if (about, shape) in questions}
        if own and prompt and rng.random() < ALL_AT_ONCE:
            turns.append((prompt, " ".join(own.get(shape, "-") for shape in SHAPES)))
        elif own and (prompt or rng.random() < PLACES):
            turns.append(questions[about, asked if asked in own else pick(list(own))])
    (prompt, answer), *more = (turns[i] for i in rng.permutation(len(turns)))
    return Example((image,), prompt, answer, question, tuple(more))


def _questions(kinds: list[tuple[str, str]], centres: np.ndarray) -> dict[tuple[str, str], tuple[str, str]]:
    """All that can be asked about a scene: (question, shape) -> (prompt, answer). Place and colour of a shape that is
    there once; no place for one near the middle."""
    out = {}
    for shape in SHAPES:
        at = [i for i, (kind, _) in enumerate(kinds) if kind == shape]
        out["count", shape] = f"{shape}s? ", str(len(at))
        if len(at) == 1:
            out["colour", shape] = f"colour {shape}? ", kinds[at[0]][1]
            x, y = centres[at[0]] - 28
            if min(abs(x), abs(y)) >= 3:
                place = f"{'top' if y < 0 else 'bottom'} {'left' if x < 0 else 'right'}"
                out["position", shape] = f"where {shape}? ", place
    return out


def make_charts(fonts: Fonts) -> Task:
    """Three to five bars of different heights, 1 to 9, over lines at every unit."""
    def task(rng, held):
        n = int(rng.integers(3, 6))
        heights, names = rng.permutation(np.arange(1, 10))[:n], "abcde"[:n]
        image = Image.new("RGB", (112, 112), "white")
        draw, font = ImageDraw.Draw(image), fonts.draw(rng, held, 13, 15)
        wide = 104 // n
        for unit in range(1, 10):
            draw.line((4, 92 - 10 * unit, 108, 92 - 10 * unit), fill=(215, 215, 215))
        for i, (name, h) in enumerate(zip(names, heights.tolist())):
            x = 6 + i * wide
            colour = list(COLOURS.values())[rng.integers(len(COLOURS))]
            draw.rectangle((x, 92 - 10 * h, x + wide - 6, 92), fill=colour)
            draw.text((x + wide // 2 - 6, 93), name, fill="black", font=font)
        if rng.random() < 0.5:
            return Example((image,), "tallest bar? ", names[int(np.argmax(heights))], "tallest")
        asked = int(rng.integers(n))
        return Example((image,), f"height of {names[asked]}? ", str(heights[asked]), "height")

    return task


def boards(rng: np.random.Generator, held: bool) -> Example:
    cells = rng.integers(0, 3, (3, 3))
    image = Image.new("RGB", (84, 84), tuple(int(c) for c in rng.integers(215, 256, 3)))
    draw = ImageDraw.Draw(image)
    for line in (28, 56):
        draw.line((line, 2, line, 82), fill="black", width=2)
        draw.line((2, line, 82, line), fill="black", width=2)
    for (i, j), cell in np.ndenumerate(cells):
        (dx, dy), r = rng.integers(-3, 4, 2).tolist(), int(rng.integers(6, 9))
        x, y = 28 * j + 14 + dx, 28 * i + 14 + dy
        if cell == 1:
            draw.line((x - r, y - r, x + r, y + r), fill=COLOURS["red"], width=3)
            draw.line((x - r, y + r, x + r, y - r), fill=COLOURS["red"], width=3)
        elif cell == 2:
            draw.ellipse((x - r, y - r, x + r, y + r), outline=COLOURS["blue"], width=3)
    row = int(rng.integers(3))
    return Example((image,), f"row {row + 1}? ", "".join(".xo"[c] for c in cells[row]), "boards")


def svg(rng: np.random.Generator, held: bool) -> Example:
    """One or two shapes with coordinates in multiples of 7 of 84 pixels, and their code. Or whether a code is right."""
    def scene():
        places = rng.permutation(16)[: rng.integers(1, 3)]
        return sorted((int(p), SHAPES[rng.integers(2)], list(COLOURS)[rng.integers(len(COLOURS))]) for p in places)

    def code(items):
        out = ""
        for place, kind, colour in items:
            x, y = 7 + 21 * (place % 4) + 3, 7 + 21 * (place // 4) + 3
            out += (f'<circle cx="{x}" cy="{y}" r="7" fill="{colour}"/>' if kind == "circle" else
                    f'<rect x="{x - 7}" y="{y - 7}" width="14" height="14" fill="{colour}"/>')
        return f"<svg>{out}</svg>"

    items = scene()
    image = Image.new("RGB", (84, 84), "white")
    draw = ImageDraw.Draw(image)
    for place, kind, colour in items:
        _shape(draw, kind, COLOURS[colour], 10 + 21 * (place % 4), 10 + 21 * (place // 4), 7)
    if rng.random() < 0.5:
        return Example((image,), "code: ", code(items), "svg")
    match = rng.random() < 0.5
    shown = items
    while not match and shown == items:  # one colour or one kind is another
        i = rng.integers(len(items))
        place, kind, colour = items[i]
        if rng.random() < 0.5:
            kind = SHAPES[1 - SHAPES.index(kind)]
        else:
            colour = list(COLOURS)[rng.integers(len(COLOURS))]
        shown = [*items[:i], (place, kind, colour), *items[i + 1 :]]
    return Example((image,), f"is this it? {code(shown)} ", "yes" if match else "no", "svg_match")


# --- pictures of other packages


def _needs(package: str, task: str):
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        raise ConfigError(f"config images.tasks={task!r}: needs {package.split('.')[0]}; "
                          "pip install 'trillium-moe[vision]', or make setup EXTRAS=vision") from None


def make_digits() -> Task:
    """A fifth of the 1,797 pictures, by their number, is held out. Shown at 28 to 56 pixels."""
    data = _needs("sklearn.datasets", "digits").load_digits()
    number = np.arange(len(data.target))
    held_out = np.array([hashlib.sha256(f"digit {i}".encode()).digest()[0] < 51 for i in number])
    sides = {side: number[held_out == side] for side in (True, False)}

    def task(rng, held):
        i = sides[held][rng.integers(len(sides[held]))]
        grey = Image.fromarray((data.images[i] * (255 / 16)).astype(np.uint8))
        side = int(rng.integers(28, 57))
        image = grey.resize((side, side), Image.Resampling.BICUBIC).convert("RGB")
        return Example((image,), "digit? ", str(data.target[i]), "digits")

    return task


PHOTOS = {  # file of scikit-image -> what it shows
    "astronaut.png": "an astronaut in a white suit", "coffee.png": "a cup of coffee", "chelsea.png": "a tabby cat",
    "coins.png": "old coins", "rocket.jpg": "a rocket at its tower", "hubble_deep_field.jpg": "distant galaxies",
    "brick.png": "a wall of bricks", "grass.png": "grass", "gravel.png": "gravel", "camera.png": "a man with a camera",
    "moon.png": "the surface of the moon", "page.png": "a page of text", "horse.png": "the outline of a horse",
    "retina.jpg": "the back of an eye", "color.png": "a colour wheel", "microaneurysms.png": "tiny blood vessels",
}  # fmt: skip


def make_photos() -> Task:
    """Crops of 56 to 112 pixels; those of the held-out split lie in the right third, which no other crop touches."""
    folder = Path(_needs("skimage", "photos").__file__).parent / "data"
    loaded = {}
    for name, text in PHOTOS.items():
        if (folder / name).exists():
            loaded[text] = Image.open(folder / name).convert("RGB")
    for name, text in (("china.jpg", "a Chinese palace"), ("flower.jpg", "a flower")):
        loaded[text] = Image.fromarray(_needs("sklearn.datasets", "photos").load_sample_image(name))
    check(len(loaded) > 1, "images.tasks", "photos", f"no photographs in {folder}; install scikit-image anew")
    shown = list(loaded.items())

    def task(rng, held):
        text, photo = shown[rng.integers(len(shown))]
        first, last = (photo.width * 2 // 3, photo.width) if held else (0, photo.width * 2 // 3)
        side = int(rng.integers(56, 113))
        scale = rng.uniform(side / min(last - first, photo.height), 1) if side < min(last - first, photo.height) else 1
        cut = min(int(side / scale), last - first, photo.height)
        x, y = int(rng.integers(first, last - cut + 1)), int(rng.integers(0, photo.height - cut + 1))
        return Example((photo.crop((x, y, x + cut, y + cut)).resize((side, side)),), "what is it? ", text, "photos")

    return task


# --- the mixture


def make_task(name: str, config: ImagesConfig) -> Task:
    match name:
        case "digits":
            return make_digits()
        case "numbers":
            return make_numbers(Fonts(config.fonts))
        case "letters" | "words" | "lines":
            return make_words(Fonts(config.fonts), name)
        case "charts":
            return make_charts(Fonts(config.fonts))
        case "photos":
            return make_photos()
        case "glyphs" | "signs":
            return make_glyphs(Fonts(config.fonts), config.max_patches, name)
        case "captions" | "named" | "folders":
            from trillium_moe.data.picture_files import make_captions

            return make_captions(config, name)
    return {"shapes": shapes, "boards": boards, "svg": svg}[name]


TASKS = ("digits", "numbers", "letters", "words", "lines", "shapes", "charts", "boards", "svg", "photos", "glyphs",
         "signs", "captions", "named", "folders")


def task_weights(config: ImagesConfig) -> dict[str, float]:
    """The tasks that `images.tasks` names, with their weights. Raises ConfigError for an unknown name or no weight."""
    out = {}
    for item in filter(None, (part.strip() for part in config.tasks.split(","))):
        name, colon, weight = item.partition(":")
        check_choice("images.tasks", name, TASKS)
        try:
            out[name] = float(weight) if colon else 1.0
        except ValueError:
            out[name] = 0.0
        check(out[name] > 0, "images.tasks", item, "a weight is a number above 0, as in words:2")
    check(bool(out), "images.tasks", config.tasks, f"names no task; there are {', '.join(TASKS)}")
    return out

"""Pictures in the stream: documents, rows, mixtures and the tasks they are drawn from."""

import dataclasses
import io
import itertools
import json

import numpy as np
import pytest
from PIL import Image

from trillium_moe.config import Config, ConfigError, DataConfig, ImagesConfig, ModelConfig, VisionConfig
from trillium_moe.config_files import from_config_dict
from trillium_moe.data import picture_tasks, picture_text
from trillium_moe.data.images import ImageError
from trillium_moe.data.packing import ConcatRows, Documents
from trillium_moe.data.picture_files import find_captions, make_captions, split_captions
from trillium_moe.data.picture_tasks import Example, make_task, task_weights
from trillium_moe.data.picture_text import HELD_FONTS, Fonts, words
from trillium_moe.data.pictures import (
    Drawer,
    MixedRows,
    PictureRows,
    PooledRows,
    encode,
    room_of,
    with_pictures,
)
from trillium_moe.data.tokenizer import ByteTokenizer
from trillium_moe.evals import vision as evals

TOKENIZER = ByteTokenizer()
OF_FILES = ("captions", "named", "folders")
IMAGE, EOS, PAD = TOKENIZER.specials["<|image|>"], TOKENIZER.eos_id, TOKENIZER.pad_id


def config_of(tasks="words,shapes", **images):
    images = {"share": 0.5, "tasks": tasks, "patches": 256, **images}
    return Config(model=ModelConfig(vision=VisionConfig(n_layers=1, frames=4)),
                  data=DataConfig(seq_len=192, batch_size=4), images=ImagesConfig(**images))


def test_a_document_is_placeholders_prompt_answer_and_end():
    config = config_of()
    clip = [Image.new("RGB", (50, 20))] * 3
    example = Example((Image.new("RGB", (60, 30)), clip), "what? ", "no", "test")
    d = encode(example, TOKENIZER, config.model.vision, config.images)
    tokens = 3 * 2 + 2 * 1  # 60 x 30 and, for the whole clip, 50 x 20 pixels
    assert d.ids.tolist() == [IMAGE] * tokens + list(b"what? no") + [EOS]
    assert d.loss.tolist() == [False] * (tokens + 6) + [True] * 3
    assert d.features[:tokens].tolist() == [1, 2, 3, 4, 5, 6, 7, 8] and not d.features[tokens:].any()
    assert len(d.patches) == 4 * (6 + 3 * 2) and d.place[:, 0].tolist() == [1] * 24 + [2] * 24
    asked = encode(dataclasses.replace(example, more=(("and? ", "y"),)), TOKENIZER, config.model.vision, config.images)
    assert asked.ids.tolist() == [*d.ids.tolist(), *b"and? y", EOS]
    assert asked.loss.tolist() == [*d.loss.tolist()] + [False] * 5 + [True] * 2
    blind = encode(example, TOKENIZER, config.model.vision, dataclasses.replace(config.images, blind=True))
    assert not blind.patches.any() and blind.ids.tolist() == d.ids.tolist()


def check_row(row, room):
    """What holds of every row with pictures."""
    placeholders = row["tokens"] == IMAGE
    np.testing.assert_array_equal(placeholders, row["features"] > 0)
    assert not row["weights"][row["targets"] == IMAGE].any() and row["weights"].any()
    assert not row["weights"][row["segment_ids"] == 0].any()
    used = row["place"][:, 0] > 0
    assert sorted(row["features"][placeholders]) == list(range(1, used.sum() // 4 + 1))
    # every sample's features stand in one segment, and samples are numbered in order
    sample = row["place"][4 * (row["features"][placeholders] - 1), 0]
    segments = row["segment_ids"][placeholders]
    assert len(set(zip(sample.tolist(), segments.tolist()))) == len(set(sample.tolist())) == sample.max()
    assert row["patches"].shape == (room.patches, room.pixels) and row["tokens"].shape == (room.seq_len,)


def test_rows_are_pure_full_and_consistent():
    config = config_of()
    rows, again = PictureRows(config, TOKENIZER), PictureRows(config, TOKENIZER)
    filled = []
    for i in (5, 0, 3):
        row = rows[i]
        check_row(row, room_of(config))
        for name, value in again[i].items():
            np.testing.assert_array_equal(row[name], value)
        filled.append(max((row["segment_ids"] > 0).mean(), (row["place"][:, 0] > 0).mean()))
    assert min(filled) > 0.7
    other = PictureRows(dataclasses.replace(config, seed=1), TOKENIZER)[0]
    assert not np.array_equal(other["tokens"], rows[0]["tokens"])


def test_the_mixture_has_a_constant_share_and_reads_the_same_text():
    config = config_of(share=0.25)
    tokens = np.arange(40_000) % 200
    text = ConcatRows(Documents(tokens.astype(np.uint16), np.full(40, 1000)), 192, 0, pad_id=PAD)
    mixed, key = with_pictures(config, "train", text, TOKENIZER, "abc")
    assert isinstance(mixed, MixedRows) and key != "abc"
    kinds, seen = [], 0
    for i in range(12):
        row = mixed[i]
        kinds.append(bool(row["features"].any()))
        if not kinds[-1]:
            for name, value in text[seen].items():
                np.testing.assert_array_equal(row[name], value)
            assert not row["patches"].any() and not row["place"].any()
            seen += 1
    assert kinds == [False, False, False, True] * 3
    assert mixed.rows_per_epoch == pytest.approx(text.rows_per_epoch / 0.75)
    held, key = with_pictures(config, "heldout", text, TOKENIZER, "abc")
    assert key == "abc" and not any(held[i]["features"].any() for i in range(8))
    assert {k: v.shape for k, v in held.empty().items()} == {k: v.shape for k, v in mixed[3].items()}
    # how many processes draw is not part of the stream
    pooled = dataclasses.replace(config, images=dataclasses.replace(config.images, workers=1))
    assert with_pictures(pooled, "train", text, TOKENIZER, "abc")[1] == with_pictures(
        config, "train", text, TOKENIZER, "abc")[1]


@pytest.mark.slow
def test_rows_drawn_by_other_processes_are_the_same():
    config = config_of()
    alone, pooled = PictureRows(config, TOKENIZER), PooledRows(config, TOKENIZER, 2)
    for i in (0, 1, 2, 30, 31):
        for name, value in alone[i].items():
            np.testing.assert_array_equal(pooled[i][name] if name == "tokens" else value, value)


def test_a_document_that_fits_no_row_is_an_error():
    config = dataclasses.replace(config_of("svg"), data=DataConfig(seq_len=64, batch_size=4))
    with pytest.raises(ConfigError, match="data.seq_len=64: raise it or images.patches: a document of the task 'svg"):
        for i in range(20):
            PictureRows(config, TOKENIZER)[i]


# --- tasks


@pytest.mark.parametrize("name", [t for t in picture_tasks.TASKS if t not in OF_FILES])
def test_tasks(name):
    """The same numbers draw the same example; answers come from a closed set or are legible."""
    task = make_task(name, config_of().images)
    for held in (True, False):
        drawn = [task(np.random.default_rng(i), held) for i in range(12)]
        again = task(np.random.default_rng(5), held)
        assert again.answer == drawn[5].answer and again.pictures[0].tobytes() == drawn[5].pictures[0].tobytes()
        assert len({e.pictures[0].tobytes() for e in drawn}) > 6
        for e in drawn:
            assert e.answer and e.answer.isascii() and max(e.pictures[0].size) <= 400
            np.asarray(e.pictures[0].convert("RGB"))


def test_held_out_words_and_fonts_are_apart():
    assert not set(words()[True]) & set(words()[False]) and len(words()[True]) > 100
    fonts = Fonts()
    assert len(fonts.files[False]) > 10 and {f.stem for f in fonts.files[True]} == set(HELD_FONTS)
    task = make_task("words", config_of().images)
    assert {task(np.random.default_rng(i), True).answer for i in range(40)} <= set(words()[True])


def test_shapes_are_where_the_answer_says():
    """Counted again from the pixels: the asked shape's quarter, and the number of blobs of a scene."""
    found = {"position": 0, "count": 0}
    for i in range(80):
        e = picture_tasks.shapes(np.random.default_rng(i), True)
        pixels = np.asarray(e.pictures[0]).astype(int)
        if e.task == "count":
            assert 1 <= int(e.answer) <= 4
            found["count"] += 1
        if e.task == "colour":
            near = np.abs(pixels - picture_tasks.COLOURS[e.answer]).sum(-1) < 5
            assert near.sum() > 40
        if e.task == "position":
            found["position"] += 1
            half = {"top": pixels[:28], "bottom": pixels[28:]}[e.answer.split()[0]]
            assert (half.sum(-1) < 600).any()
    assert min(found.values()) > 10


def test_a_training_scene_is_asked_about_more_than_once():
    """All numbers at once are those of the blobs in the picture, and no answer is there twice."""
    from scipy import ndimage

    several = told = 0
    for i in range(60):
        e = picture_tasks.shapes(np.random.default_rng(i), False)
        turns = ((e.prompt, e.answer), *e.more)
        assert 1 <= len(turns) <= 3 and len(dict(turns)) == len(turns)
        assert not picture_tasks.shapes(np.random.default_rng(i), True).more
        several += len(turns) > 1
        if (counts := dict(turns).get("counts? ")) is not None:
            pixels = np.asarray(e.pictures[0]).astype(int)
            blobs = ndimage.label((pixels != pixels[0, 0]).any(-1), np.ones((3, 3)))[1]
            assert sum(map(int, counts.split())) == blobs
            assert not {"circles? ", "squares? ", "triangles? "} & set(dict(turns))
        if (colours := dict(turns).get("colours? ")) is not None:
            told += 1
            pixels = np.asarray(e.pictures[0]).reshape(-1, 3).tolist()
            assert all(list(picture_tasks.COLOURS[c]) in pixels for c in colours.split() if c != "-")
            if counts is not None:  # told of those that are there once, and of no other
                assert [c != "-" for c in colours.split()] == [n == "1" for n in counts.split()]
    assert several > 30 and told > 10


def ink_of(image):
    """How much each pixel differs from the first, 0 to 1."""
    pixels = np.asarray(image).astype(int)
    ink = np.abs(pixels - pixels[0, 0]).sum(-1)
    return ink / ink.max()


def cropped(found):
    y, x = np.nonzero(found)
    return found[y.min() : y.max() + 1, x.min() : x.max() + 1]


@pytest.mark.parametrize("stem", ["DejaVuSansMono", "cmr10"])
def test_text_put_together_is_what_pillow_sets(stem, monkeypatch):
    """Without variation, but for the weight, which moves the edge of a letter by a part of a pixel."""
    for share in ("BENT", "MIXED", "SPACED"):
        monkeypatch.setattr(picture_text, share, 0)
    fonts = Fonts()
    fonts.files[False] = [f for f in fonts.files[False] if f.stem == stem]
    font = fonts.draw(np.random.default_rng(0), False, 18, 18)
    for i in range(4):
        rng = np.random.default_rng(i)
        ours, theirs = (cropped(ink_of(image) > 0.5) for image in (
            picture_text.varied(rng, ["waxy"], fonts, 18, 18), picture_text.written(rng, ["waxy"], font)))
        assert np.abs(np.subtract(ours.shape, theirs.shape)).max() <= 1
        ours, theirs = (np.pad(a, ((2, 24 - len(a)), (2, 64 - a.shape[1]))) for a in (ours, theirs))
        apart = min((np.roll(ours, shift, (0, 1)) != theirs).sum() for shift in itertools.product((-1, 0, 1), repeat=2))
        assert apart < 0.2 * theirs.sum()


def test_varied_text_stays_in_the_picture(monkeypatch):
    """A random map keeps nearly all of the ink; bare words never touch the first column or the last."""
    fonts = Fonts()
    for bent in (0, 1):
        monkeypatch.setattr(picture_text, "BENT", bent)
        for i in range(30):
            rng = np.random.default_rng(i)
            lines = ["letters", "jumps"][: 1 + i % 2]
            ink = ink_of(picture_text.varied(rng, lines, fonts, 13, 21))
            assert ink.shape[0] % 28 == ink.shape[1] % 28 == 0 and ink.shape[0] >= 28 * len(lines)
            assert 0.02 < ink.mean() < 0.5
            if not bent:
                assert not ink[:, 0].any() and not ink[:, -1].any() and not ink[0].any() and not ink[-1].any()


def test_weights_and_unknown_tasks():
    assert task_weights(ImagesConfig(tasks="words:3, shapes")) == {"words": 3.0, "shapes": 1.0}
    for tasks, message in (("wrods", "did you mean 'words'"), ("words:x", "a weight is a number above 0"),
                           ("words:-1", "a weight"), ("", "names no task")):
        with pytest.raises(ConfigError, match=message):
            task_weights(ImagesConfig(tasks=tasks))
    with pytest.raises(ConfigError, match="images.share=0.5: a model without vision cannot read pictures"):
        from_config_dict({"images": {"share": 0.5}})
    with pytest.raises(ConfigError, match="images.max_patches"):
        ImagesConfig(patches=64, max_patches=128)


# --- files


@pytest.fixture
def folder(tmp_path):
    lines = []
    for i in range(30):
        Image.new("RGB", (40 + i, 30), (8 * i, 0, 0)).save(tmp_path / f"{i}.png")
        lines.append(json.dumps({"image": f"{i}.png", "text": f"number {i}"}))
    (tmp_path / "captions.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_captions_of_a_folder(folder):
    config = config_of(path=str(folder / "*.jsonl")).images
    items = find_captions(config)
    train, held = split_captions(items, False), split_captions(items, True)
    assert len(train) + len(held) == 30 and 1 <= len(held) < 10 and not set(train) & set(held)
    halves = [{c.name for c in split_captions(items, True, fold, 2)} for fold in (0, 1)]
    assert halves[0] | halves[1] == {c.name for c in items}
    folds = [split_captions(items, True, fold) for fold in range(10)]
    assert {c.name for fold in folds for c in fold} == {c.name for c in items}
    assert split_captions(items, True, 3) == [c for c in items if c not in split_captions(items, False, 3)]
    task = make_captions(config)
    for side in (True, False):
        e = task(np.random.default_rng(0), side)
        number = int(e.answer.removeprefix("number "))
        assert e.pictures[0].size == (40 + number, 30) and e.prompt == "caption: "
        if side:  # in training it is another view every time
            assert np.asarray(e.pictures[0])[0, 0].tolist() == [8 * number, 0, 0]
    assert [e.answer for e in task.everything(True)] == [c.text for c in held]


def test_names_and_folders(folder):
    """`named` is captions of other files; a folder's name is what the pictures of images.path do not share."""
    (folder / "in/animals").mkdir(parents=True)
    (folder / "in/plants").mkdir()
    lines = []
    for i in range(20):
        name = f"in/{'animals' if i % 2 else 'plants'}/{i}.png"
        (folder / f"{i}.png").rename(folder / name)
        lines.append(json.dumps({"image": name, "text": "of a folder"}))
    (folder / "sorted.jsonl").write_text("\n".join(lines))
    (folder / "captions.jsonl").write_text("\n".join(
        json.dumps({"image": f"{i}.png", "text": f"number {i}"}) for i in range(20, 30)))
    images = config_of(path=str(folder / "sorted.jsonl"), named=str(folder / "captions.jsonl")).images
    named, folders = (make_task(task, images) for task in ("named", "folders"))
    for i in range(10):
        e = named(np.random.default_rng(i), False)
        assert e.pictures[0].size == (40 + int(e.answer.removeprefix("number ")), 30) and e.prompt == "name: "
        e = folders(np.random.default_rng(i), False)
        assert e.answer == ("animals" if e.pictures[0].width % 2 else "plants") and e.prompt == "folder? "
    with pytest.raises(ConfigError, match="images.tasks='folders': needs pictures in more than one folder"):
        make_captions(dataclasses.replace(images, path=images.named), "folders")
    with pytest.raises(ConfigError, match="images.named='': the task `named` needs"):
        make_task("named", dataclasses.replace(images, named=""))


def test_captions_of_parquet(folder):
    import pyarrow
    import pyarrow.parquet

    blobs = [(folder / f"{i}.png").read_bytes() for i in range(30)]
    texts = [f"number {i}" for i in range(30)]
    for number, pictures in enumerate((blobs, [{"bytes": b, "path": None} for b in blobs])):
        pyarrow.parquet.write_table(pyarrow.table({"image": pictures, "text": texts}), folder / f"{number}.parquet",
                                    row_group_size=7)
        config = config_of(path=str(folder / f"{number}.parquet")).images
        task = make_captions(config)
        for i in range(5):
            e = task(np.random.default_rng(i), False)
            assert e.pictures[0].width == 40 + int(e.answer.removeprefix("number "))
        with pytest.raises(ConfigError, match="images.image_key='picture': .*has no such column; it has image, text"):
            make_captions(dataclasses.replace(config, image_key="picture"))


def test_bad_captions_are_errors(folder):
    for path, message in (("", "need \\*.jsonl or"), ("nothing/*.jsonl", "matches no file; run `make data`"),
                          ("*.png", "must be \\*.jsonl or \\*.parquet")):
        with pytest.raises(ConfigError, match=message):
            find_captions(ImagesConfig(path=path and str(folder / path)))
    (folder / "bad.jsonl").write_text('{"image": "1.png"}')
    with pytest.raises(ConfigError, match="images.text_key='text': .*bad.jsonl line 1 has no such text"):
        find_captions(ImagesConfig(path=str(folder / "bad.jsonl")))
    (folder / "3.png").write_bytes(b"broken")
    task = make_captions(config_of(path=str(folder / "captions.jsonl")).images)
    with pytest.raises(ImageError, match="3.png: not a picture"):
        for side in (True, False):
            list(task.everything(side))


# --- the suite


def test_scores_of_a_perfect_and_of_a_constant_answerer():
    config = config_of("numbers,shapes")
    suite = evals.make_suite(Drawer(config, TOKENIZER), 20)
    assert {k: len(v) for k, v in suite.items()} == dict.fromkeys(("numbers", "colour", "count", "position"), 20)
    drawer = Drawer(config, TOKENIZER)
    right = lambda batch: (batch["targets"], np.ones(batch["targets"].shape, np.float32))
    for task, examples in suite.items():
        documents = [drawer.encode(e) for e in examples]
        s = evals.score(task, evals.answers(right, documents, config, PAD))
        assert (s.accuracy, s.loss, s.n) == (1.0, 1.0, 20) and 0.1 <= s.chance < 0.7
        most = max({e.answer for e in examples}, key=lambda a: sum(e.answer == a for e in examples))
        assert s.chance == sum(e.answer == most for e in examples) / 20
        wrong = evals.answers(lambda b: (b["targets"] * 0 + 1, right(b)[1]), documents, config, PAD)
        assert evals.score(task, wrong).accuracy == 0
        found = evals.answers(right, documents, config, PAD)
        assert [TOKENIZER.decode(a.expected) for a in found] == [e.answer for e in examples]
    swapped = evals.exchanged(suite["count"])
    assert swapped[0].pictures is suite["count"][1].pictures and swapped[-1].answer == suite["count"][-1].answer


def test_pictures_with_answers_become_a_png():
    from trillium_moe.train.figures_vision import picture_plate, vision_accuracy

    rng = np.random.default_rng(0)
    said = [(picture_tasks.shapes(rng, True), "3") for _ in range(9)]
    assert Image.open(io.BytesIO(picture_plate(said))).size[0] > 500
    lines = [{"step": 1, "vision/count": 0.2, "vision/count_chance": 0.2, "vision/count_exchanged": 0.1}]
    assert len(vision_accuracy(lines).axes) == 1 and vision_accuracy([{"step": 1}]) is None

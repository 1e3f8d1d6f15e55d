"""Pictures through the whole model: one program for any mixture, statistics, gradients, generation."""

import base64
import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests.models import random_state, random_variables
from trillium_moe.config import (
    Config,
    ConfigError,
    DataConfig,
    DtypeConfig,
    ImagesConfig,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    VisionConfig,
)
from trillium_moe.data.images import ImageError
from trillium_moe.data.pictures import MixedRows, PictureRows, room_of
from trillium_moe.data.tokenizer import ByteTokenizer
from trillium_moe.infer.chat import chat_parts
from trillium_moe.infer.engine import Engine, EngineConfig
from trillium_moe.infer.pictures import show
from trillium_moe.infer.sampling import Sampling
from trillium_moe.train.loss import loss_sum
from trillium_moe.train.state import model_def
from trillium_moe.train.step import make_train_step

TOKENIZER = ByteTokenizer()
IMAGE = TOKENIZER.specials["<|image|>"]
CONFIG = Config(
    model=ModelConfig(
        d_model=32, n_layers=2, ffn_dim=32, block_size=1, dtypes=DtypeConfig(compute="float32"),
        # compiles in a fraction of the time of its chunked form
        kda=KDAConfig(n_heads=1, head_dim=16, implementation="reference"),
        moe=MoEConfig(n_experts=4, k=2, expert_dim=16, latent_dim=16),
        mla=MLAConfig(n_heads=1, q_lora_rank=0, kv_lora_rank=16, nope_dim=16, rope_dim=8, v_dim=16),
        vision=VisionConfig(n_layers=2, d_model=16, n_heads=1, head_dim=16, ffn_dim=32, grid=4),
    ),
    data=DataConfig(seq_len=96, batch_size=2),
    images=ImagesConfig(share=0.5, tasks="words,shapes", patches=64, max_patches=32),
)  # fmt: skip
TEXT = dataclasses.replace(CONFIG.model, vision=VisionConfig())


class Words:
    """Rows of text: all tokens real, one segment."""

    seq_len, pad_id, epochs = 96, TOKENIZER.pad_id, 0

    def __getitem__(self, i):
        ids = np.random.default_rng(i).integers(0, 256, 97).astype(np.int32)
        return {"tokens": ids[:-1], "targets": ids[1:], "segment_ids": np.ones(96, np.int32),
                "weights": np.ones(96, np.float32)}


@pytest.fixture(scope="module")
def batches():
    """{"text", "mixed", "pictures"}: batches of two rows."""
    mixed = MixedRows(Words(), PictureRows(CONFIG, TOKENIZER), 0.5, room_of(CONFIG))
    stack = lambda *numbers: {k: jnp.asarray(np.stack([mixed[i][k] for i in numbers])) for k in mixed[0]}
    return {"text": stack(0, 2), "mixed": stack(0, 1), "pictures": stack(1, 3)}


def test_any_mixture_runs_one_program_and_counts_its_tokens(batches):
    state, step = random_state(CONFIG), make_train_step(CONFIG)
    for kind in ("text", "mixed", "pictures", "text"):
        batch = batches[kind]
        state, metrics = step(state, batch)
        shown = int((batch["features"] > 0).sum())
        assert int(metrics["data/image_tokens"]) == shown and bool(shown) == (kind != "text")
        # placeholders are routed and counted like words, padding is not
        real = int((batch["segment_ids"] > 0).sum())
        assert np.asarray(metrics["router/load_LE"]).sum() == real * CONFIG.model.moe.k
        assert np.isfinite(float(metrics["train/loss"]))
    assert step._cache_size() == 1


def test_text_models_have_no_vision_and_vision_changes_no_text(batches):
    assert not [path for path, _ in nnx.to_flat_state(model_def(TEXT)[1]) if "vision" in path]
    assert "patches" not in Words()[0]
    graphdef, params, bias = random_variables(CONFIG.model)
    plain, plain_params, _ = random_variables(TEXT)
    shared = dict(nnx.to_flat_state(params))
    plain_params = nnx.from_flat_state([(path, shared[path]) for path, _ in nnx.to_flat_state(plain_params)])

    @jax.jit
    def with_vision(params, batch):
        return jax.value_and_grad(lambda p: loss_sum(nnx.merge(graphdef, p, bias), batch)[0])(params)

    words = {k: v for k, v in batches["text"].items() if k not in ("patches", "place", "features")}
    alone = jax.jit(lambda p, batch: loss_sum(nnx.merge(plain, p, bias), batch)[0])(plain_params, words)
    loss, grads = with_vision(params, batches["text"])
    np.testing.assert_allclose(loss, alone, rtol=1e-6)
    norms = lambda grads: {path: float(jnp.abs(v[...]).max()) for path, v in nnx.to_flat_state(grads["vision"])}
    assert set(norms(grads).values()) == {0.0}
    _, grads = with_vision(params, batches["pictures"])
    assert min(norms(grads).values()) > 0 and norms(grads).keys() >= {("patch_embed",), ("projector", "fc2")}


# --- generation


@pytest.fixture(scope="module")
def engine():
    _, params, bias = random_variables(CONFIG.model, std=0.3)
    sizes = EngineConfig(slots=2, capacity=128, chunks=(16,), steps=4, prefix_block=16, prefix_bytes=1 << 20)
    return Engine(CONFIG.model, params, bias, sizes), params, bias


def picture(seed, size=(60, 50)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


def answer(engine, parts, n=8):
    ids, pictures = show(CONFIG, IMAGE, parts)
    slot = engine.open()
    engine.extend(slot, ids, pictures)
    engine.start(slot, n, Sampling(0.0))
    out, logprobs = [], []
    while engine.running:
        decoded = engine.decode()
        kept = decoded.tokens[slot] >= 0
        out += decoded.tokens[slot][kept].tolist()
        logprobs += decoded.logprobs[slot][kept].tolist()
    engine.close(slot)
    return ids, pictures, out, logprobs


@pytest.mark.slow
def test_generation_after_pictures_is_the_whole_forward(engine):
    engine, params, bias = engine
    parts = [list(b"first "), picture(0), picture(1, (30, 90)), list(b"what is it, and is it the one before? ")]
    ids, pictures, out, logprobs = answer(engine, parts)
    assert [i for i, t in enumerate(ids) if t == IMAGE] == pictures.at.tolist() == list(range(6, 6 + 6 + 8))
    row = {"tokens": np.full(96, TOKENIZER.pad_id, np.int32), "features": np.zeros(96, np.int32)}
    sequence = [*ids, *out]
    row["tokens"][: len(sequence)] = sequence
    row["features"][pictures.at] = 1 + pictures.features
    room = np.zeros((64, 588), np.uint8), np.zeros((64, 7), np.int32)
    for whole, part in zip(room, (pictures.patches, pictures.place)):
        whole[: len(part)] = part
    graphdef = model_def(CONFIG.model)[0]

    @jax.jit
    def forward(tokens, patches, place, features):
        from trillium_moe.model.context import Context
        from trillium_moe.model.vision import Images

        model = nnx.merge(graphdef, params, bias)
        ids = jnp.ones_like(tokens)
        return jax.nn.log_softmax(model.logits(model.hidden(tokens, Context(ids), Images(patches, place, features))[0]))

    logp = np.asarray(forward(*(jnp.asarray(x)[None] for x in (row["tokens"], *room, row["features"]))))[0]
    n = len(ids)
    assert out == logp[n - 1 : n - 1 + len(out)].argmax(-1).tolist()
    np.testing.assert_allclose(logprobs, logp[n - 1 : n - 1 + len(out)].max(-1), atol=2e-4)


def test_stored_prefixes_tell_pictures_apart(engine):
    engine, _, _ = engine
    parts = lambda seed: [picture(seed), list(b"a question long enough to fill a block or two? ")]
    first, before = answer(engine, parts(10)), engine.prefilled
    again = answer(engine, parts(10))
    assert again[2] == first[2] and engine.prefilled - before < 16  # the same picture: reused
    before = engine.prefilled
    other = answer(engine, parts(11))
    assert engine.prefilled - before == len(other[0]) - 1 and other[3] != first[3]


def test_prompts_that_cannot_be(engine):
    engine, _, _ = engine
    ids, pictures = show(CONFIG, IMAGE, [picture(0)])
    slot = engine.open()
    with pytest.raises(ConfigError, match="must hold text after the last picture"):
        engine.extend(slot, ids, pictures)
    engine.close(slot)
    with pytest.raises(ConfigError, match="model.vision.n_layers=0: this model was trained without pictures"):
        show(dataclasses.replace(CONFIG, model=TEXT, images=ImagesConfig()), IMAGE, [picture(0)])


# --- chat


def data_url(image, kind="png"):
    out = io.BytesIO()
    image.save(out, kind)
    return f"data:image/{kind};base64," + base64.b64encode(out.getvalue()).decode()


def test_chat_messages_with_pictures():
    said = [{"role": "user", "content": [{"type": "text", "text": "what?"},
                                         {"type": "image_url", "image_url": {"url": data_url(picture(3))}}]}]
    parts = chat_parts(TOKENIZER, said)
    shown = [p for p in parts if isinstance(p, Image.Image)]
    assert len(shown) == 1 and np.array_equal(np.asarray(shown[0]), np.asarray(picture(3)))
    ids, pictures = show(CONFIG, IMAGE, parts)
    assert ids.count(IMAGE) == 6 == len(pictures.at)
    plain = chat_parts(TOKENIZER, [{"role": "user", "content": "what?"}])
    assert sum(plain, []) == [i for i in ids if i != IMAGE]


@pytest.mark.parametrize("part, message", [
    ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "addresses are not fetched"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "addresses are not fetched"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}, "not base64"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "not a picture"),
    ({"type": "image_url"}, "must be"), ({"type": "audio"}, "must be"), ("text", "must be"), ({"text": "a"}, "must be"),
])  # fmt: skip
def test_bad_parts_of_a_message(part, message):
    with pytest.raises((ConfigError, ImageError), match=message) as caught:
        chat_parts(TOKENIZER, [{"role": "user", "content": [part]}])
    assert "messages[0].content[0]" in str(caught.value)

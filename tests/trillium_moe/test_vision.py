"""The vision tower against the released code's numbers, and what packing, grids and shapes promise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import goldens
from tests.models import random_variables
from trillium_moe.config import DtypeConfig, ModelConfig, VisionConfig
from trillium_moe.model import vision
from trillium_moe.model.vision import Images, Vision, interpolated, pool_frames, rotation

F32 = DtypeConfig(compute="float32")
NAMES = {"patch_embed": "patch_embed.proj.weight", "pos_emb": "patch_embed.pos_emb.weight",
         "final_norm": "encoder.final_layernorm.weight"}


def places(grids, budget):
    """[budget, 7] for samples of (frames, rows, columns) side by side, and each patch's number in frame-major,
    row-major order."""
    rows, order, start = [], [], 0
    for sample, (t, h, w) in enumerate(grids, 1):
        number = np.arange(t * h * w).reshape(t, h, w)
        for frame in range(t):
            cells = number[frame].reshape(h // 2, 2, w // 2, 2).transpose(0, 2, 1, 3).reshape(-1)
            order.append(start + cells)
            row, column = np.divmod(cells - frame * h * w, w)
            facts = [np.full(h * w, v) for v in (h, w, frame, t)]
            rows.append(np.stack([np.full(h * w, sample), row, column, *facts], 1))
        start += t * h * w
    place = np.zeros((budget, 7), np.int32)
    place[:start] = np.concatenate(rows)
    return place, np.concatenate(order)


def golden_params(params, name="vision_tiny"):
    """The released tensors in our layout."""
    tensors = {k: v.astype(np.float32) for k, v in goldens.arrays(name, "model.safetensors").items()}
    tower = lambda name: tensors.pop(f"vision_tower.{name}")
    out = {}
    for path, variable in nnx.to_flat_state(params):
        shape = variable.shape
        if path[0] == "blocks":
            layers = range(shape[0])
            if path[1] in ("wq", "wk", "wv"):
                i = ("wq", "wk", "wv").index(path[1])
                fused = [tensors[f"vision_tower.encoder.blocks.{n}.wqkv.weight"] for n in layers]
                value = np.stack([np.split(w, 3)[i].T for w in fused])
            else:
                spelled = {"fc0": "mlp.fc0", "fc1": "mlp.fc1"}.get(path[1], path[1])
                value = np.stack([tower(f"encoder.blocks.{n}.{spelled}.weight").T for n in layers])
        elif path[0] == "projector":
            spelled = {"fc0": "proj.0", "fc2": "proj.2"}.get(path[1], path[1])
            value = tensors.pop(f"mm_projector.{spelled}.weight").T
        else:
            value = tower(NAMES[path[0]])
            value = value.reshape(len(value), -1).T if path[0] == "patch_embed" else value
        out[path] = variable.replace(jnp.asarray(value.reshape(shape), variable.dtype))
    left = [name for name in tensors if "wqkv" not in name]
    assert not left
    return nnx.from_flat_state(out)


def golden_tower(dtypes):
    raw = goldens.meta("vision_tiny", "config.json")["vision_config"]
    config = ModelConfig(
        d_model=raw["text_hidden_size"], dtypes=dtypes,
        vision=VisionConfig(n_layers=raw["vt_num_hidden_layers"], d_model=raw["vt_hidden_size"],
                            n_heads=raw["vt_num_attention_heads"], head_dim=32, ffn_dim=raw["vt_intermediate_size"],
                            patch=raw["patch_size"], grid=raw["init_pos_emb_height"], frames=4))
    graphdef, params = nnx.split(jax.eval_shape(lambda: Vision(config, rngs=nnx.Rngs(0))))
    return config, nnx.merge(graphdef, golden_params(params))


@pytest.mark.parametrize("wide, tolerance", [(False, 2e-5), (True, 5e-7)])
def test_golden_tower_and_projector(wide, tolerance, monkeypatch):
    monkeypatch.setattr(vision, "CHUNK", 50)  # several chunks of queries
    with jax.enable_x64(wide):
        _, tower = golden_tower(DtypeConfig("float64", "float64", "float64") if wide else F32)
        ref = goldens.arrays("vision_tiny", "reference.safetensors")
        place, order = places(ref["grid_thws"].tolist(), 128)
        pixels = ref["pixel_values"].astype(np.float64 if wide else np.float32).reshape(112, -1)
        patches = np.zeros((128, pixels.shape[1]), pixels.dtype)
        patches[:112] = pixels[order]
        at = jnp.asarray(place[None])

        @jax.jit
        def run(patches):
            embedded = tower.embed(patches[None], at)
            encoded = tower.encode(embedded, at)
            merged = tower.merge(encoded, at)
            return embedded, encoded, merged, tower.project(merged)

        embedded, encoded, merged, projected = (np.asarray(x[0]) for x in run(jnp.asarray(patches)))
        assert goldens.error(embedded[:112], ref["patch_embed_out"][order]) < tolerance
        assert goldens.error(encoded[:112], ref["encoder_out"][order]) < tolerance
        slots = [*range(6 + 10), *range(16, 20)]  # 6 and 10 features of pictures, 4 of the clip's first frame
        assert goldens.error(merged[slots], ref["merged"].reshape(20, -1)) < tolerance
        assert goldens.error(projected[slots], ref["projector_out"]) < tolerance
        positions = interpolated(tower.pos_emb[...], at) + vision.frame_embedding(at, 48, embedded.dtype)
        assert goldens.error(positions[0, :112], ref["pos_emb"][order]) < tolerance


def test_position_table_is_itself_at_its_own_size():
    table = np.random.default_rng(0).normal(size=(8, 8, 5)).astype(np.float32)
    place, order = places([(1, 8, 8)], 64)
    found = interpolated(jnp.asarray(table), jnp.asarray(place[None]))[0]
    np.testing.assert_array_equal(found, table.reshape(64, 5)[order])


def test_pooling_is_the_mean_over_frames():
    place, order = places([(1, 2, 2), (3, 2, 4)], 32)
    x = np.random.default_rng(0).normal(size=(1, 32, 3)).astype(np.float32)
    pooled = np.asarray(pool_frames(jnp.asarray(x), jnp.asarray(place[None])))[0]
    np.testing.assert_array_equal(pooled[:4], x[0, :4])
    np.testing.assert_allclose(pooled[4:12], x[0, 4:28].reshape(3, 8, 3).mean(0), rtol=1e-6)
    assert not pooled[12:28].any()


@pytest.fixture(scope="module")
def small():
    """A model of two layers whose vision reads a budget of 64 patches."""
    config = dataclasses.replace(
        ModelConfig(dtypes=F32), n_layers=2, block_size=1, vision=VisionConfig(n_layers=2, d_model=32, grid=4))
    graphdef, params, bias = random_variables(config)
    model = nnx.merge(graphdef, params, bias)
    return config, model, jax.jit(lambda patches, place: model.vision(patches, place))


def pixels_of(grids, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (t * h * w, 588), dtype=np.uint8) for t, h, w in grids]


def test_packed_pictures_are_those_alone(small):
    _, _, encode = small
    grids = [(1, 2, 4), (1, 6, 2), (1, 4, 4)]
    pixels = pixels_of(grids)

    def run(chosen):
        place, order = places([grids[i] for i in chosen], 64)
        patches = np.zeros((64, 588), np.uint8)
        patches[: len(order)] = np.concatenate([pixels[i] for i in chosen])[order]
        return np.asarray(encode(patches[None], place[None]))[0]

    together, at = run([0, 1, 2]), 0
    for i, (_, h, w) in enumerate(grids):
        alone = run([i])[: h * w // 4]
        np.testing.assert_allclose(together[at : at + len(alone)], alone, rtol=2e-5, atol=2e-7)
        at += len(alone)
    # another picture in the row changes no bit
    pixels[1] = pixels_of(grids, seed=1)[1]
    changed = run([0, 1, 2])
    np.testing.assert_array_equal(changed[:2], together[:2])
    np.testing.assert_array_equal(changed[5:9], together[5:9])
    assert np.abs(changed[2:5] - together[2:5]).max() > 1e-3


def test_a_transposed_picture_differs_through_positions_alone(small):
    """With the position table and the rotary angles transposed as well, features come out transposed."""
    _, model, _ = small
    place, _ = places([(1, 4, 4)], 16)
    angle = np.asarray(rotation(jnp.asarray(place[None]), 32, np.float32))[0]
    flipped = place[:, [0, 2, 1, 4, 3, 5, 6]]
    turned = np.asarray(rotation(jnp.asarray(flipped[None]), 32, np.float32))[0]
    np.testing.assert_array_equal(turned[:, ::2], angle[:, 1::2])
    np.testing.assert_array_equal(turned[:, 1::2], angle[:, ::2])
    patches = pixels_of([(1, 4, 4)])[0]
    run = jax.jit(lambda place: model.vision(jnp.asarray(patches[None]), place))
    assert np.abs(run(flipped[None]) - run(place[None])).max() > 1e-3


def test_features_stand_where_placeholders_are(small):
    config, model, encode = small
    place, _ = places([(1, 4, 4)], 64)
    patches = np.zeros((1, 64, 588), np.uint8)
    patches[0, :16] = pixels_of([(1, 4, 4)])[0]
    features = np.zeros((1, 8), np.int32)
    features[0, 2:6] = [1, 2, 3, 4]
    x = np.random.default_rng(1).normal(size=(1, 8, config.d_model)).astype(np.float32)
    out = model.vision.insert(jnp.asarray(x), jax.tree.map(jnp.asarray, Images(patches, place[None], features)))
    np.testing.assert_array_equal(out[0, [0, 1, 6, 7]], x[0, [0, 1, 6, 7]])
    np.testing.assert_allclose(out[0, 2:6], encode(patches, place[None])[0, :4], rtol=1e-5, atol=1e-6)


def test_the_released_dimensions():
    """401.2M in the tower and 46.1M in the projector, 165 + 3 tensors with q, k, v in one (model.md 1.3, 8.1)."""
    from configs.vision import trillium_2t8

    state = jax.eval_shape(lambda: nnx.state(Vision(trillium_2t8().model, rngs=nnx.Rngs(0)), nnx.Param))
    sizes = {path: v.size for path, v in nnx.to_flat_state(state)}
    projector = sum(n for path, n in sizes.items() if path[0] == "projector")
    layer = 1024 * 3 * 1536 + 1536 * 1024 + 2 * 1024 * 4096 + 2 * 1024
    assert sum(sizes.values()) - projector == 27 * layer + 588 * 1024 + 64 * 64 * 1024 + 1024 == 401_214_464
    assert projector == 4096 * 4096 + 4096 * 7168 + 7168 == 46_144_512

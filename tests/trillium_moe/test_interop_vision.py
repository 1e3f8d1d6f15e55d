"""Kimi-K3 checkpoints with the vision tower: import, export, features and logits with pictures."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from safetensors.numpy import save_file

from experiments import logits
from experiments.common import command
from tests import goldens
from tests.trillium_moe.test_vision import places
from trillium_moe.config import ConfigError, DtypeConfig
from trillium_moe.interop import hf
from trillium_moe.interop.export import export
from trillium_moe.interop.safetensors import read_directory
from trillium_moe.model.params import RouterBias

F32 = DtypeConfig(compute="float32")


def write(directory, **vision):
    """The golden text tower and the golden vision tower as one checkpoint."""
    directory.mkdir()
    raw, own = goldens.meta("kimi_k3_tiny", "config.json"), goldens.meta("vision_tiny", "config.json")
    raw["vision_config"] = own["vision_config"] | vision
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = goldens.arrays("kimi_k3_tiny", "model.safetensors") | goldens.arrays("vision_tiny", "model.safetensors")
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("vision") / "hf")


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return hf.load(checkpoint, F32)


@pytest.mark.slow
def test_the_projected_features_are_the_golden_ones(loaded):
    config, model = loaded
    ref = goldens.arrays("vision_tiny", "reference.safetensors")
    place, order = places(ref["grid_thws"].tolist(), 112)
    patches = ref["pixel_values"].astype(np.float32).reshape(112, -1)[order]
    graphdef, params = nnx.split(model.vision)
    run = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x, jnp.asarray(place[None])))
    features = np.asarray(run(params, jnp.asarray(patches[None])))[0]
    assert goldens.error(features[:20], ref["projector_out"]) < 2e-5
    assert config.vision.n_layers == 2 and config.vision.frames == 4


@pytest.mark.slow
def test_import_then_export_is_the_identity(checkpoint, loaded, tmp_path):
    config, model = loaded
    export(tmp_path / "out", config, *nnx.split(model, nnx.Param, RouterBias)[1:])
    want, got = read_directory(checkpoint), read_directory(tmp_path / "out")
    assert {n: e.read().tobytes() for n, e in got.items()} == {n: e.read().tobytes() for n, e in want.items()}
    assert hf.read_config(tmp_path / "out", F32) == config


@pytest.mark.parametrize("change, says", [
    ({"vt_num_hidden_layers": 3}, "missing vision_tower.encoder.blocks.2.norm0.weight"),
    ({"vt_num_hidden_layers": 1}, "unexpected vision_tower.encoder.blocks.1.mlp.fc0.weight"),
    ({"merge_type": "sd2"}, "only 'sd2_tpool'"),
    ({"attn_bias": True}, "only False"),
    ({"text_hidden_size": 65}, "must be 64"),
    ({"qkv_hidden_size": 95}, "multiple of 3 heads"),
])
def test_towers_that_cannot_be(change, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        hf.load(write(tmp_path / "hf", **change), F32)


@pytest.mark.slow
def test_logits_with_pictures(checkpoint, tmp_path, capsys):
    """Features stand where the placeholders are; what comes before them does not change."""
    mark = goldens.meta("kimi_k3_tiny", "config.json")["media_placeholder_token_id"]
    rng = np.random.default_rng(0)
    for name in "ab":
        Image.fromarray(rng.integers(0, 255, (56, 84, 3), np.uint8)).save(tmp_path / f"{name}.png")
    ids = np.array([7, 9, 11, *[mark] * 6, 8, 10])
    np.save(tmp_path / "ids.npy", ids)

    def run(*argv):
        args = [f"--hf={checkpoint}", f"--tokens={tmp_path}/ids.npy", f"--out={tmp_path}/out.npy", *argv]
        return command(logits.__doc__, logits.define, logits.run, args)

    def found(*argv):
        assert run(*argv) == 0
        return np.load(tmp_path / "out.npy")[0]

    plain, a, b = found(), found(f"--image={tmp_path}/a.png"), found(f"--image={tmp_path}/b.png")
    np.testing.assert_allclose(a[:3], plain[:3], atol=1e-5)
    for x, y in ((plain, a), (a, b)):
        assert np.abs(x[3:] - y[3:]).max(-1).min() > 1e-4
    capsys.readouterr()
    assert run(f"--image={tmp_path}/a.png,{tmp_path}/b.png") == 2
    assert "with 12 of the placeholder 5" in capsys.readouterr().err

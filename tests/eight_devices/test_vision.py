"""The vision tower over eight devices: rows over data, pictures and text cut over context."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from tests.meshes import mesh
from tests.models import random_variables
from trillium_moe.config import Config, ConfigError, DtypeConfig, ImagesConfig, ModelConfig, VisionConfig
from trillium_moe.data.images import patches_of, places_of
from trillium_moe.model import vision
from trillium_moe.model.vision import Images
from trillium_moe.parallel import sharding
from trillium_moe.parallel.mesh import check_mesh

pytestmark = pytest.mark.slow

CONFIG = ModelConfig(
    d_model=32, n_layers=2, block_size=1, dtypes=DtypeConfig(compute="float32"),
    vision=VisionConfig(n_layers=2, d_model=16, n_heads=1, head_dim=16, ffn_dim=32, grid=4, frames=3),
)  # fmt: skip


def pictures(rows=4, budget=64, tokens=32):
    """Per row a picture of 4 x 6 patches, a clip of 3 frames of 2 x 4, and text around their placeholders."""
    rng = np.random.default_rng(0)
    patches, place = np.zeros((rows, budget, 588), np.uint8), np.zeros((rows, budget, 7), np.int32)
    features = np.zeros((rows, tokens), np.int32)
    for r in range(rows):
        clips = [rng.integers(0, 256, (t, 14 * h, 14 * w, 3), dtype=np.uint8) for t, h, w in ((1, 4, 6), (3, 2, 4))]
        parts = [patches_of(c) for c in clips]
        patches[r, :48] = np.concatenate(parts)
        place[r, :48] = np.concatenate([places_of(1, 4, 6), places_of(3, 2, 4) + [1, 0, 0, 0, 0, 0, 0]])
        features[r, 3:9], features[r, 20:22] = np.arange(1, 7), [7, 8]
    return Images(*(jnp.asarray(x) for x in (patches, place, features)))


def test_features_and_gradients_are_those_of_one_device(monkeypatch):
    monkeypatch.setattr(vision, "CHUNK", 8)  # several chunks on every device
    graphdef, params, bias = random_variables(CONFIG)
    images, rng = pictures(), np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(4, 32, 32)), jnp.float32)
    target = jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    def loss(params, x, images):
        out = nnx.merge(graphdef, params, bias).vision.insert(x, images)
        return jnp.sum(out * target), out

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, expected), grads = run(params, x, images)
    m = mesh(data=2, context=4)
    with jax.set_mesh(m):
        rows = NamedSharding(m, sharding.batch_spec())
        gradient = lambda p, *a: jax.value_and_grad(loss, has_aux=True)(sharding.stored(p), *a)
        (_, out), cut = jax.jit(gradient)(params, *jax.device_put((x, images), rows))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(cut["vision"]), jax.tree.leaves(grads["vision"])):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * float(jnp.abs(b).max()))


def test_patches_that_context_does_not_divide():
    config = Config(model=CONFIG, images=ImagesConfig(patches=152))
    with pytest.raises(ConfigError, match="mesh.context=4: must divide images.patches/4=38"):
        check_mesh(config, dict.fromkeys(("replica", "data", "expert", "model"), 1) | {"context": 4})
    check_mesh(dataclasses.replace(config, images=ImagesConfig(patches=160)),
               dict.fromkeys(("replica", "data", "expert", "model"), 1) | {"context": 4})

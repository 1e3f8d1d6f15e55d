"""The decays that only ablations use: one for a whole head, and a bound beyond the kernels' range."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.kda import kda_gated
from trillium_moe.config import ConfigError, DtypeConfig, KDAConfig, ModelConfig
from trillium_moe.model.kda import KDA

H, K, D = 2, 8, 16


def layer(values: dict[str, np.ndarray], **kw) -> KDA:
    """A layer that can compute its decays, and nothing else."""
    config = ModelConfig(d_model=D, dtypes=DtypeConfig(compute="float32"), kda=KDAConfig(n_heads=H, head_dim=K, **kw))
    module = nnx.eval_shape(lambda: KDA(config, rngs=nnx.Rngs(0)))
    for name, value in values.items():
        variable = getattr(module, name)
        assert variable.shape == value.shape
        setattr(module, name, nnx.Param(jnp.asarray(value, jnp.float32)))
    return module


def decays(mixer, x):
    return mixer.log_decay(mixer.decay_logits(x))


def gated(g_min, implementation):
    rng = np.random.default_rng(2)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v, z = (draw(1, 40, 1, 64) for _ in range(4))
    raw = q, k, v, 2 * z, draw(1, 40, 1), jnp.zeros(1), draw(1, 64)
    o, _ = kda_gated(*raw, g_min=g_min, implementation=implementation)
    return np.asarray(o)


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(0)
    return {"decay_down": rng.normal(size=(D, K)), "decay_up": rng.normal(size=(K, H, 1)),
            "dt_bias": rng.normal(size=(H, 1)), "a_log": rng.normal(size=H)}


@pytest.mark.parametrize("decay", ["bounded", "softplus", "deep"])
def test_one_decay_per_head_is_a_channel_decay_with_equal_channels(decay, values):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 5, D)), jnp.float32)
    g = np.asarray(decays(layer(values, decay=decay, decay_per="head"), x))
    spread = values | {"decay_up": values["decay_up"].repeat(K, 2), "dt_bias": values["dt_bias"].repeat(K, 1)}
    np.testing.assert_allclose(g, decays(layer(spread, decay=decay), x), rtol=1e-5)
    z = (np.asarray(x) @ values["decay_down"]) @ values["decay_up"][..., 0] + values["dt_bias"][:, 0]
    z = z[..., None]
    a = np.exp(values["a_log"])[:, None]
    expected = -a * np.logaddexp(0, z) if decay == "softplus" else -5 / (1 + np.exp(-a * z))
    np.testing.assert_allclose(g, np.broadcast_to(expected, g.shape), rtol=1e-4)
    assert g.shape == (1, 5, H, K)


def test_a_deep_bound_is_reached_and_never_promised_to_a_kernel(values):
    x = 100 * jnp.ones((1, 1, D))
    deep = layer(values, decay="deep", decay_per="head", g_min=-10.0)
    g = np.asarray(decays(deep, x))
    assert g.min() >= -10 and (g.min() < -9.9 or g.max() > -0.1)
    with pytest.raises(NotImplementedError, match="g_min=-10"):
        gated(-10.0, "pallas_tpu")
    np.testing.assert_allclose(gated(-10.0, "xla"), gated(-10.0, "reference"), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="model.kda.g_min=-10.0: must be at least"):
        KDAConfig(g_min=-10.0)
    with pytest.raises(ConfigError, match="model.kda.decay_per='heads': must be one of channel, head"):
        KDAConfig(decay_per="heads")

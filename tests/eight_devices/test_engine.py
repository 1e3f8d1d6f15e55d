"""Generation on one device against meshes: the same greedy tokens, the cache laid out as its specs say."""

import jax
import numpy as np
import pytest

from tests.meshes import mesh
from tests.models import random_variables
from tests.trillium_moe.test_cache import config
from trillium_moe.config import ConfigError, KDAConfig, MLAConfig, MoEConfig
from trillium_moe.infer.batching import Batcher, Request
from trillium_moe.infer.engine import Engine, EngineConfig
from trillium_moe.infer.sampling import Sampling
from trillium_moe.model.cache import cache_specs

MODEL = config(
    n_layers=2, kda=KDAConfig(n_heads=4, head_dim=8, implementation="reference"),
    mla=MLAConfig(n_heads=4, q_lora_rank=8, kv_lora_rank=8, nope_dim=8, rope_dim=4, v_dim=8),
    moe=MoEConfig(n_experts=8, k=2, expert_dim=8, latent_dim=8),
)  # fmt: skip
SIZES = EngineConfig(slots=4, capacity=64, chunks=(16,), steps=4)


def tokens_of(on=None):
    _, params, bias = random_variables(MODEL, std=0.3, noise=0.1)

    def run():
        engine = Engine(MODEL, params, bias, SIZES)
        batcher = Batcher(engine)
        requests = [batcher.submit(Request([1 + i, 2, 3 * i], 6 + i, Sampling(0.0))) for i in range(6)]
        batcher.run()
        return [r.tokens for r in requests], engine

    if on is None:
        return run()
    with jax.set_mesh(on):
        return run()


@pytest.mark.slow
def test_meshes_give_the_same_tokens():
    want, _ = tokens_of()
    for sizes in ({"model": 2}, {"expert": 2, "data": 2}, {"data": 2, "expert": 2, "model": 2}):
        got, engine = tokens_of(mesh(**sizes))
        assert got == want, sizes
        specs = jax.tree.leaves(cache_specs(engine.cache, sizes), is_leaf=lambda x: isinstance(x, jax.P))
        for x, spec in zip(jax.tree.leaves(engine.cache), specs):
            assert x.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh(**sizes), spec), x.ndim)


def test_a_context_axis_is_named():
    with pytest.raises(ConfigError, match="mesh.context=2"):
        tokens_of(mesh(context=2))


def test_specs_cut_rows_and_heads():
    cache = Engine(MODEL, *random_variables(MODEL)[1:], SIZES).cache
    specs = cache_specs(cache, {"data": 2, "expert": 2, "model": 2})
    assert specs.length == jax.P(("data", "expert"))
    assert specs.kda[0].state == jax.P(("data", "expert"), "model")
    assert cache_specs(cache, {"data": 8}).length == jax.P(None)
    assert np.shape(cache.length) == (4,)

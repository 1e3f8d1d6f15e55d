"""Attention cut over the context axis, compiled for two H200s that are not there: the kernels serve it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.test_kda_gpu import H200
from trillium_moe.parallel import context

B, T, H, N, P, V, R = 1, 512, 2, 64, 32, 64, 64


@pytest.mark.aot
@pytest.mark.parametrize("packed", [False, True])
def test_latent_attention_on_two_h200s(packed):
    topologies = pytest.importorskip("jax.experimental.topologies")
    try:
        topology = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x2x1")
    except Exception as error:  # whatever the missing plugin raises
        pytest.skip(f"no CUDA plugin: {error}")
    mesh = jax.sharding.Mesh(np.array(topology.devices), ("context",))
    with jax.set_mesh(mesh):
        at = lambda *axes: jax.NamedSharding(mesh, jax.P(*axes))
        shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(
            dims, dtype, sharding=at(None, "context")
        )
        weight = lambda size: jax.ShapeDtypeStruct((R, H, size), jnp.bfloat16, sharding=at())
        args = shape(B, T, H, N + P), shape(B, T, R), shape(B, T, P), weight(N), weight(V)
        ids = shape(B, T, dtype=jnp.int32) if packed else None

        def loss(*args, ids):
            o, top = context.latent_attention(*args, scale=0.1, segment_ids=ids)
            return jnp.sin(o).sum(), top

        step = jax.jit(jax.value_and_grad(loss, range(5), has_aux=True))
        text = step.lower(*args, ids=ids).compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu') >= 3, "forward and two backward kernels"

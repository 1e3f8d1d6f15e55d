"""The decoding step: implementations against the recurrence, and against the training layer token by token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.kda_decode import kda_decode
from pallas_kernels.kda_decode.pallas_gpu import kda_decode_pallas_gpu
from pallas_kernels.kda_decode.pallas_tpu import kda_decode_pallas_tpu
from pallas_kernels.kda_decode.reference import kda_decode_reference
from pallas_kernels.kda_decode.xla import kda_decode_xla
from tests.pallas_kernels.test_kda import assert_same_bits
from tests.pallas_kernels.test_kda_tpu import absent_mesh, relative_error
from trillium_moe.config import KDAConfig, ModelConfig
from trillium_moe.model.context import Context
from trillium_moe.model.kda import KDA

NAMES = ("o", "taps", "state")


def make(B, H, K, C=4, *, dtype=np.float32, gate=True, g_min=-5.0, seed=0):
    """(qkv, decay, beta, gate, taps, state), keywords."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape)
    wide = np.float64 if dtype == np.float64 else np.float32
    arrays = [normal(B, 3, H, K), normal(B, H, K) - 3, normal(B, H), normal(B, H, K), normal(B, max(C - 1, 0), 3, H, K)]
    arrays = [jnp.asarray(x, dtype) for x in arrays] + [jnp.asarray(normal(B, H, K, K), wide)]
    arrays[3] = arrays[3] if gate else None
    weights = {"a_log": normal(H), "dt_bias": normal(H, K), "out_norm": 1 + 0.1 * normal(K)}
    weights["conv"] = normal(3, H, K, C) if C else None
    weights = {name: x if x is None else jnp.asarray(x, wide) for name, x in weights.items()}
    return arrays, weights | {"g_min": g_min, "norm_eps": 1e-5}


def exact(arrays, keywords):
    with jax.enable_x64(True):
        wide = lambda x: None if x is None else jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64)
        keywords = {k: wide(x) if isinstance(x, jax.Array) else x for k, x in keywords.items()}
        return kda_decode_reference(*map(wide, arrays), **keywords)


interpreted = functools.partial(kda_decode_pallas_tpu, interpret=True)
on_triton = functools.partial(kda_decode_pallas_gpu, interpret=True)


@pytest.mark.parametrize("op", [kda_decode_xla, interpreted, on_triton], ids=["xla", "pallas_tpu", "pallas_gpu"])
@pytest.mark.parametrize(
    "B, H, K, more",
    [(2, 3, 64, {}), (1, 32, 128, {}), (2, 2, 64, {"C": 0, "gate": False, "g_min": None}), (2, 2, 64, {"C": 1})],
)
def test_step_is_the_recurrence(op, B, H, K, more):
    """Odd heads; two programs of 16 heads; softplus decay without convolution and gate; a convolution of one tap."""
    if op is on_triton and more:
        more = {**more, "C": 2}
    arrays, keywords = make(B, H, K, **more)
    got = jax.jit(lambda *x: op(*x, **keywords))(*arrays)
    for name, x, y in zip(NAMES, got, exact(arrays, keywords)):
        assert x.shape == y.shape and x.dtype == jnp.float32, name
        assert not x.size or relative_error(x, y) < 1e-6, name


@pytest.mark.parametrize("op", [kda_decode_xla, interpreted, on_triton], ids=["xla", "pallas_tpu", "pallas_gpu"])
def test_bfloat16_inputs_are_rounded_once(op):
    """Nothing between inputs and outputs is rounded: the state is as accurate as in float32, o is one rounding away."""
    arrays, keywords = make(2, 2, 64, dtype=jnp.bfloat16)
    o, taps, state = jax.jit(lambda *x: op(*x, **keywords))(*arrays)
    want = exact(arrays, keywords)
    assert (o.dtype, taps.dtype, state.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert relative_error(o.astype(jnp.float32), want[0]) < 2**-8
    assert_same_bits(taps[:, :-1].astype(jnp.float32), arrays[4][:, 1:].astype(jnp.float32))
    assert_same_bits(taps[:, -1].astype(jnp.float32), arrays[0].astype(jnp.float32))
    assert relative_error(state, want[2]) < 1e-6


def test_two_thousand_steps_do_not_drift():
    """sglang#38975, ollama#15865: neither beta nor the state is rounded, however long the answer."""
    steps, (arrays, keywords) = 2000, make(1, 1, 8, dtype=jnp.bfloat16)
    rng = np.random.default_rng(0)
    draws = [jnp.asarray(rng.normal(size=(steps, *x.shape)), x.dtype) for x in arrays[:4]]

    def long(op, arrays, keywords, draws):
        step = lambda carry, x: (op(*x, *carry, **keywords)[1:], None)
        return jax.lax.scan(step, (arrays[4], arrays[5]), draws)[0][1]

    got = jax.jit(lambda draws: long(kda_decode_xla, arrays, keywords, draws))(draws)
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64) if isinstance(x, jax.Array) else x
        exact_args = jax.tree.map(wide, (arrays, keywords, draws))
        want = jax.jit(lambda draws: long(kda_decode_reference, *exact_args[:2], draws))(exact_args[2])
    assert relative_error(got, want) < 2e-6


@pytest.mark.parametrize("op", [kda_decode_xla, interpreted, on_triton], ids=["xla", "pallas_tpu", "pallas_gpu"])
def test_idle_sequences_keep_every_bit(op):
    arrays, keywords = make(3, 2, 64)
    active = jnp.array([True, False, True])
    got = jax.jit(lambda *x: op(*x, **keywords, active=active))(*arrays)
    for name, x, y in zip(NAMES, got, exact(arrays, keywords)):
        assert relative_error(x[active], y[active]) < 1e-6, name
    for x, before in zip(got[1:], arrays[4:]):
        assert_same_bits(x[1], before[1])


@pytest.mark.parametrize("op", [kda_decode_xla, interpreted, on_triton], ids=["xla", "pallas_tpu", "pallas_gpu"])
def test_logits_left_as_two_factors(op):
    """Of decays and step sizes, the second with rows to spare."""
    arrays, keywords = make(2, 2, 64)
    rng = np.random.default_rng(1)
    down, up = jnp.asarray(rng.normal(size=(2, 32)), jnp.float32), jnp.asarray(rng.normal(size=(160, 32)), jnp.float32)
    low = [arrays[0], down, *arrays[2:]]
    arrays[1] = jnp.einsum("br,xr->bx", down, up, precision="highest")[:, :128].reshape(2, 2, 64)
    x, beta_in = (jnp.asarray(rng.normal(size=(n, 48)) / 5, jnp.float32) for n in (2, 3))
    low[2], arrays[2] = x, jnp.einsum("bd,hd->bh", x, beta_in[:2], precision="highest")
    got = jax.jit(lambda *x: op(*x, **keywords, decay_up=up, beta_in=beta_in))(*low)
    for name, x, y in zip(NAMES, got, exact(arrays, keywords)):
        assert relative_error(x, y) < 2e-6, name


@pytest.mark.parametrize("decay, gate", [("bounded", "full"), ("softplus", "none")])
def test_steps_are_the_training_layer(decay, gate):
    """Five tokens, one by one, give the layer's outputs on all five."""
    with jax.enable_x64(True):
        config = KDAConfig(n_heads=2, head_dim=8, decay=decay, gate=gate, implementation="reference")
        dtypes = dataclasses.replace(ModelConfig().dtypes, param="float64", compute="float64")
        model = ModelConfig(d_model=16, kda=config, dtypes=dtypes)
        layer = KDA(model, rngs=nnx.Rngs(0))
        x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 16)))
        want, _ = jax.jit(lambda x: layer(x, Context()))(x_BTD)

        def step(carry, x_BD):
            heads = lambda w: jnp.einsum("bd,dhk->bhk", x_BD, w[...])
            qkv = jnp.stack([heads(layer.q), heads(layer.k), heads(layer.v)], axis=1)
            logits = jnp.einsum("br,rhk->bhk", x_BD @ layer.decay_down[...], layer.decay_up[...])
            o, *carry = kda_decode(
                qkv,
                logits,
                x_BD @ layer.beta[...],
                heads(layer.gate) if gate == "full" else None,
                *carry,
                conv=jnp.stack([w[...] for w in (layer.q_conv, layer.k_conv, layer.v_conv)]),
                a_log=layer.a_log[...],
                dt_bias=layer.dt_bias[...],
                out_norm=layer.out_norm[...],
                g_min=config.g_min if decay == "bounded" else None,
                norm_eps=model.norm_eps,
            )
            return carry, jnp.einsum("bhk,hkd->bd", o, layer.out[...])

        zero = [jnp.zeros((2, 3, 3, 2, 8), x_BTD.dtype), jnp.zeros((2, 2, 8, 8), x_BTD.dtype)]
        _, got_TBD = jax.lax.scan(step, zero, x_BTD.swapaxes(0, 1))
        np.testing.assert_allclose(got_TBD.swapaxes(0, 1), want, rtol=1e-10, atol=1e-13)


on_hopper = pytest.mark.skipif(
    not any(name in jax.devices()[0].device_kind for name in ("H100", "H200")), reason="needs a Hopper GPU"
)


@on_hopper
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("more", [{}, {"C": 2, "gate": False, "g_min": None, "idle": True}])
def test_hopper_step_is_the_recurrence(dtype, more):
    more = dict(more)
    idle = more.pop("idle", False)
    arrays, keywords = make(3, 5, 128, dtype=dtype, **more)
    keywords["active"] = jnp.array([True, False, True]) if idle else None
    got = jax.jit(lambda *x: kda_decode(*x, **keywords, implementation="pallas_gpu"))(*arrays)
    with jax.default_matmul_precision("highest"):
        want = kda_decode_reference(*(None if x is None else x.astype(jnp.float32) for x in arrays), **keywords)
    rows = jnp.array([0, 2]) if idle else jnp.arange(3)
    for name, x, y in zip(NAMES, got, want):
        x, y = x[rows], y[rows]
        bound = 2**-8 if name == "o" and dtype == jnp.bfloat16 else 2e-6
        assert relative_error(x.astype(jnp.float32), y) < bound, name
    assert_same_bits(got[1][0, -1].astype(jnp.float32), arrays[0][0].astype(jnp.float32))
    if idle:
        for x, before in zip(got[1:], arrays[4:]):
            assert_same_bits(x[1].astype(jnp.float32), before[1].astype(jnp.float32))


def test_bad_arguments_say_how_to_mend_them():
    call = getattr(kda_decode, "__wrapped__", kda_decode)
    (qkv, decay, beta, gate, taps, state), keywords = make(2, 2, 64, dtype=jnp.bfloat16)
    for arguments, message in (
        ((qkv, decay[:1], beta, gate, taps, state), r"decay has shape \(1, 2, 64\); qkv .* needs \(2, 2, 64\)"),
        ((qkv, decay, beta, gate, taps[:, 1:], state), r"taps has shape \(2, 2, 3, 2, 64\).* needs \(2, 3, 3, 2, 64\)"),
        ((qkv, decay, beta, gate, taps, state.astype(jnp.bfloat16)), "state is bfloat16, which drifts.*float32"),
        ((qkv, decay, beta, gate, taps.astype(jnp.float32), state), "taps are float32; keep them in the dtype of qkv"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*arguments, **keywords)


@pytest.mark.parametrize(
    "H, K, dtype, says",
    [
        (2, 60, jnp.bfloat16, "K=60; heads of 64 or 128"),
        (2, 64, jnp.float64, "qkv is float64"),
        (65, 64, jnp.bfloat16, "H=65; a multiple of 16, or at most 64"),
        (2, 64, jnp.bfloat16, "the platform is cpu; a TPU is needed"),
    ],
)
def test_tpu_refuses_what_it_cannot_serve(H, K, dtype, says):
    with jax.enable_x64(dtype == jnp.float64):
        arrays, keywords = make(1, H, K, dtype=np.dtype(dtype))
        with pytest.raises(NotImplementedError, match=says):
            kda_decode(*arrays, **keywords, implementation="pallas_tpu")


@pytest.mark.parametrize(
    "K, dtype, C, says",
    [
        (60, jnp.bfloat16, 4, "K=60; heads of 32, 64 or 128"),
        (128, jnp.float64, 4, "qkv is float64"),
        (128, jnp.bfloat16, 1, "a convolution of at least 2 taps"),
        (128, jnp.bfloat16, 4, "compute capability 9.0"),
    ],
)
def test_gpu_refuses_what_it_cannot_serve(K, dtype, C, says):
    with jax.enable_x64(dtype == jnp.float64):
        arrays, keywords = make(1, 2, K, C, dtype=np.dtype(dtype))
        with pytest.raises(NotImplementedError, match=says):
            kda_decode(*arrays, **keywords, implementation="pallas_gpu")


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1", "h200:1"])
@pytest.mark.parametrize("B, H, K, gate", [(64, 96, 128, True), (5, 3, 64, False)])
def test_compiles(topology, B, H, K, gate):
    """In place: the states of the result are those of the arguments."""
    implementation = "pallas_gpu" if topology.startswith("h200") else "pallas_tpu"
    mesh, K = absent_mesh(topology), 128 if implementation == "pallas_gpu" else K
    where = jax.sharding.NamedSharding(mesh, jax.P())
    arrays, keywords = jax.eval_shape(lambda: make(B, H, K, dtype=jnp.bfloat16, gate=gate))
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
    shapes = jax.tree.map(placed, arrays)
    weights = {name: placed(keywords[name]) for name in ("conv", "a_log", "dt_bias", "out_norm")}

    active = jax.ShapeDtypeStruct((B,), bool, sharding=where) if gate else None

    def step(arrays, taps, state, weights, active):
        return kda_decode(*arrays, taps, state, **weights, g_min=-5.0, active=active, implementation=implementation)

    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=(1, 2)).lower(shapes[:4], *shapes[4:], weights, active).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= 4 * B * H * K * K

"""The Mosaic TPU kernels of KDA against the recurrence, interpreted on the CPU, and compiled for absent TPUs.

Everything of one dtype has one shape, so that it is one program: contents, documents and states vary.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, NamedSharding
from safetensors.numpy import load_file

from pallas_kernels.kda import kda, kda_gated, tpu_chunk
from pallas_kernels.kda.pallas_tpu import kda_gated_pallas_tpu, kda_pallas_tpu
from pallas_kernels.kda.reference import kda_reference
from tests.pallas_kernels.test_kda import (
    NAMES,
    PACKED,
    assert_all_close,
    assert_same_bits,
    evaluate,
    fast_jit,
    forward,
    make,
    nearly_known,
)
from tests.pallas_kernels.test_kda_golden import GOLDEN
from trillium_moe.parallel import chips

T, H, K, V = PACKED.shape[1], 2, 64, 128
op = functools.partial(kda_pallas_tpu, interpret=True)
WHOLE, PACKED_IDS = jnp.zeros((1, T), jnp.int32), jnp.asarray(PACKED, jnp.int32)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def inputs_of(kind, dtype=np.float32, T=T, seed=0, **more):
    """`make`, and its hard cases, with q, k, v in `dtype`."""
    gate = kind if kind in ("uniform", "typical", "bound") else "none"
    (q, k, v, g, beta), state = make(T, 1, H, K, V, gate=gate, dtype=np.float32, seed=seed, **more)
    if kind == "repeated":  # FlashKDA#34: one key, raw gate -12, beta logit 8
        k, g, beta = jnp.broadcast_to(k[:, :1], k.shape), jnp.full_like(g, -3e-5), jnp.full_like(beta, 0.9997)
    if kind == "correlated":  # cudnn-frontend#1051: a common key plus noise, beta 1, slow decay
        k = k[:, :1] + 0.1 * k
        k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
        g, beta = g - 0.02, jnp.ones_like(beta)
    return [x.astype(dtype) for x in (q, k, v)] + [g, beta], state


def relative_error(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert np.isfinite(x).all()
    return np.linalg.norm(x - y) / np.linalg.norm(y)


def exact(inputs, state, ids=None):
    """The recurrence in float64 on the same, rounded inputs."""
    with jax.enable_x64(True):
        wide = lambda x: np.asarray(x.astype(jnp.float32)).astype(np.float64)
        ids = None if ids is None else np.asarray(ids)
        return evaluate(kda_reference, [jnp.asarray(wide(x)) for x in inputs], jnp.asarray(wide(state)), ids)


@pytest.mark.parametrize("kind", ["uniform", "bound", "repeated", slow("typical"), slow("none"), slow("correlated")])
def test_float32_is_the_recurrence(kind):
    """Gates at -5 (transformers#48455), slow decay (tt-metal#54813), segments of one token (cudnn-frontend#1013), empty
    ones (4, 7, 8), which keep their state (FlashKDA#32), and ids outside [0, S), which belong to no segment."""
    inputs, states = inputs_of(kind, S=9)
    ids = PACKED_IDS.at[:, 0].set(-1).at[:, -1].set(9)
    got, want = dict(zip(NAMES, evaluate(op, inputs, states, ids))), dict(zip(NAMES, exact(inputs, states, ids)))
    # At -5 dg is e^-5 of the terms of i = j, which cancel in float32. Equal keys make the inverse ill-conditioned.
    loose = {"bound": ("dg",), "repeated": ("dv", "dbeta")}.get(kind, ())
    errors = {name: relative_error(got[name], want[name]) for name in NAMES}
    assert all(error < (5e-5 if name in loose else 2e-6) for name, error in errors.items()), errors
    assert_same_bits(got["final_state"][:, [4, 7, 8]], states[:, [4, 7, 8]])
    assert not np.asarray(got["o"])[:, [0, -1]].any()


@pytest.mark.parametrize("ids", [WHOLE, PACKED_IDS], ids=["whole", "packed"])
@pytest.mark.parametrize("kind", ["bound", "uniform", slow("typical"), slow("none")])
def test_bfloat16_is_at_its_rounding_floor(kind, ids):
    """dg included, even where its terms cancel (gates at -5)."""
    inputs, state = inputs_of(kind, jnp.bfloat16)
    got, want = evaluate(op, inputs, state, ids), exact(inputs, state, ids)
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.float32] + [jnp.bfloat16] * 3 + [jnp.float32] * 3
    assert_all_close(got[:2], want[:2], 5e-3)
    assert_all_close(got[2:], want[2:], 1e-2, NAMES[2:])


@pytest.mark.parametrize("kind", ["repeated", "correlated"])
def test_like_keys_in_bfloat16(kind):
    """The triangular inverse at its worst; the rounding of equal keys alone costs dv and dbeta up to 7e-2."""
    inputs, state = inputs_of(kind, jnp.bfloat16)
    assert_all_close(evaluate(op, inputs, state, WHOLE), exact(inputs, state), 8e-2)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 15, 17, 33, 63, 64, 65, 500])
def test_lengths(length):
    """fla#792, fla#1142, cuLA#38: rows past the end must not reach outputs, the state or gradients."""
    inputs, state = inputs_of("typical", T=length)
    assert_all_close(evaluate(op, inputs, state), exact(inputs, state), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("heads, K, V", [(1, 128, 128), (3, 64, 64), (12, 128, 64)])
def test_heads(heads, K, V):
    """One head, an odd number, and two programs of six heads."""
    inputs, state = make(70, 2, heads, K, V, dtype=np.float32)
    assert_all_close(evaluate(op, inputs, state), exact(inputs, state), 2e-6)


@pytest.mark.slow
def test_two_long_documents():
    """flash-linear-attention-npu#544: dk and dg of packed lengths 640 and 783 were off by 1e4."""
    inputs, state = inputs_of("typical", T=1423)
    ids = jnp.asarray(np.arange(1423)[None] >= 640, jnp.int32)
    assert_all_close(evaluate(op, inputs, state, ids), exact(inputs, state, ids), 5e-5)


@pytest.mark.slow
@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(
    cuts=st.lists(st.integers(0, T), min_size=3, max_size=3),
    per_segment=st.booleans(),
    kind=st.sampled_from(["uniform", "typical", "none"]),
    seed=st.integers(0, 99),
)
def test_any_segmentation(cuts, per_segment, kind, seed):
    """Four segments of any length, zero included."""
    inputs, state = inputs_of(kind, seed=seed, S=4 if per_segment else None)
    ids = jnp.asarray((np.arange(T) >= np.sort(cuts)[:, None]).sum(0)[None], jnp.int32)
    assert_all_close(evaluate(op, inputs, state, ids), exact(inputs, state, ids), 1e-5)


@pytest.mark.slow
def test_golden():
    """fla-core's naive recurrence in float64, stored in float32."""
    data = load_file(GOLDEN / "K128.safetensors")
    inputs = [jnp.asarray(data[name], jnp.float32) for name in ("q", "k", "v", "g", "beta")]
    state = jnp.asarray(data["initial_state"], jnp.float32)
    f = lambda *x: op(*x, scale=inputs[0].shape[-1] ** -0.5, initial_state=state, segment_ids=None)
    values, vjp = jax.vjp(f, *inputs)
    gradients = vjp(tuple(jnp.asarray(data[name], jnp.float32) for name in ("do", "dfinal_state")))
    for name, x in zip(("o", "final_state"), values):
        assert relative_error(x, data[name]) < 5e-6, name
    for name, x in zip(("q", "k", "v", "g", "beta"), gradients):
        assert relative_error(x, data[f"grad_{name}"]) < 2e-5, name


@pytest.mark.slow
def test_a_saturated_gate_over_a_long_sequence():
    """flash-linear-attention-npu#448: raw gates of +20 put every g at -5."""
    inputs, state = inputs_of("bound", jnp.bfloat16, T=1024)
    got, want = evaluate(op, inputs, state), exact(inputs, state)
    assert_all_close(got, want, 1e-2)


@pytest.mark.slow
def test_slow_decay_is_not_rounded_away():
    """vmlx-swift#433: 4096 steps of decay .99992 leave e^-0.328 of the state, 1 if the decay is rounded to bfloat16."""
    x = jnp.zeros((1, 4096, 1, K), jnp.bfloat16)
    g = jnp.full(x.shape, np.log(0.99992), jnp.float32)
    _, state = forward(op, [x, x, x, g, jnp.zeros((1, 4096, 1))], jnp.ones((1, 1, K, K)))
    np.testing.assert_allclose(state, 0.99992**4096, rtol=1e-5)


@pytest.mark.parametrize("operands, bound", [("float32", 1e-6), ("three bfloat16 products", 1e-4)])
def test_inverse_of_slow_decay(operands, bound):
    """tt-metal#54813: the worst matrix, equal keys without decay, for an odd and an even number of heads."""
    product = functools.partial(tpu_chunk.dot, tpu_chunk.NN) if operands == "float32" else tpu_chunk.dot_x3
    a = np.tril(np.full((64, 64), 0.999), -1)
    for heads in (1, 2):
        invert = fast_jit(lambda a: tpu_chunk.unit_lower_inverse(a, product))  # noqa: B023
        got = invert(jnp.asarray([a] * heads, jnp.float32))
        np.testing.assert_allclose(got, [np.linalg.inv(np.eye(64) + a)] * heads, atol=bound)


def test_parts_hold_every_bit():
    """Sums of gates are exact: the weights are 0 and 1, and three parts of 8 bits make a float32."""
    rng = np.random.default_rng(0)
    g = jnp.asarray(-5 * rng.uniform(size=(64, 8)) ** 4, jnp.float32)
    parts = fast_jit(tpu_chunk.parts, static_argnums=1)(g, 3)
    np.testing.assert_array_equal(sum(x.astype(jnp.float32) for x in parts), g)
    weights = np.tri(64)
    want = weights @ np.asarray(g, np.float64)
    np.testing.assert_allclose(fast_jit(tpu_chunk.sum_gates)(weights, g), want, rtol=3e-7)


def test_poisoned_neighbours():
    """fla#1142, cudnn-frontend#1056: rows and channels beside ours are somebody else's; nothing of them is read."""
    inputs, state = inputs_of("uniform", jnp.bfloat16, T=65)
    poisoned = [jnp.pad(x, ((0, 0), (0, 65)) + ((0, 0),) * (x.ndim - 2), constant_values=jnp.nan) for x in inputs]
    poisoned = [jnp.concatenate([x, jnp.full_like(x, jnp.nan)], axis=-1) for x in poisoned]

    @fast_jit
    def cut(buffers):
        ours = [y[tuple(map(slice, x.shape))] for x, y in zip(inputs, buffers)]
        return op(*ours, scale=K**-0.5, initial_state=state, segment_ids=None)

    for clean, dirty in zip(cut(inputs), cut(poisoned)):
        assert_same_bits(clean, dirty)


def test_a_nearly_known_token_in_bfloat16():
    """attention-gym#465, #464: see test_kda."""
    inputs, before, after = nearly_known(jnp.bfloat16, T, H, K, V)
    o, state = evaluate(op, inputs, before, WHOLE)[:2]
    assert_same_bits(state, after)
    np.testing.assert_allclose(o[0, 0, 0, :2].astype(jnp.float32), np.array([1, 0]) * K**-0.5, rtol=2**-8)


def test_no_bit_of_the_future_or_of_another_document():
    """fla#1240: outputs, states and gradients of other documents, and outputs of earlier tokens, keep every bit."""
    inputs, state = inputs_of("uniform", jnp.bfloat16)
    others, _ = inputs_of("typical", jnp.bfloat16, seed=1)
    mix = lambda mask: [
        jnp.where(mask[(None, ...) + (None,) * (x.ndim - 2)], y, x) for x, y in zip(inputs, others)
    ]
    before = evaluate(op, inputs, state, WHOLE)[0]
    for cut in (21, 64):
        after = evaluate(op, mix(np.arange(T) >= cut), state, WHOLE)[0]
        assert_same_bits(before[:, :cut], after[:, :cut])
        assert (before[:, cut:] != after[:, cut:]).any()

    before = evaluate(op, inputs, state, PACKED_IDS)
    for document in (0, 3, 5):
        member = PACKED[0] == document
        after = evaluate(op, mix(member), state, PACKED_IDS)
        for name, x, y in zip(NAMES, before, after):
            if "state" not in name:
                assert_same_bits(x[:, ~member], y[:, ~member])
                assert (x[:, member] != y[:, member]).any()


GATED = ("q", "k", "v", "decay_logits", "beta_logits", "a_log", "dt_bias", "initial_state")


@functools.partial(fast_jit, static_argnums=0)
def evaluate_gated(implementation, inputs, state, ids):
    """Values of `kda_gated` and the gradients of everything it takes, for fixed random cotangents."""
    if implementation == "interpreted":

        def call(*x, initial_state):
            beta, more = jax.nn.sigmoid(x[4].astype(jnp.float32)), {"segment_ids": ids, "initial_state": initial_state}
            return kda_gated_pallas_tpu(*x[:4], beta, *x[5:], g_min=-5.0, scale=K**-0.5, **more, interpret=True)

    else:
        call = functools.partial(kda_gated, segment_ids=ids, implementation=implementation)
    values, vjp = jax.vjp(lambda *x: call(*x[:7], initial_state=x[7]), *inputs, state)
    draw = lambda i, x: jax.random.normal(jax.random.key(i), x.shape, jnp.float32).astype(x.dtype)
    return (*values, *vjp(tuple(draw(i, x) for i, x in enumerate(values))))


@pytest.mark.parametrize(
    "dtype, logits, per_segment",
    [("float32", "float32", True), ("bfloat16", "bfloat16", False), slow("bfloat16", "float32", False)],
)
def test_gated_is_the_recurrence(dtype, logits, per_segment):
    """Raw projections, gates over the whole of (-5, 0), and the gradients of all parameters."""
    rng = np.random.default_rng(4)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    q, k, v = (normal(1, T, H, width).astype(dtype) for width in (K, K, V))
    z, beta = (3 * normal(1, T, H, K)).astype(logits), normal(1, T, H).astype(dtype)
    inputs = [q, k, v, z, beta, 0.3 * normal(H), normal(H, K)]
    state = normal(1, 9, H, K, V) if per_segment else normal(1, H, K, V)
    ids = PACKED_IDS.at[:, 0].set(-1).at[:, -1].set(9) if per_segment else PACKED_IDS
    got = evaluate_gated("interpreted", inputs, state, ids)
    assert [x.dtype for x in got[2:]] == [x.dtype for x in (*inputs, state)]
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x.astype(jnp.float32)), jnp.float64) for x in (*inputs, state)]
        want = evaluate_gated("reference", wide[:7], wide[7], jnp.asarray(np.asarray(ids)))
    names = (*NAMES[:2], *GATED)
    assert_all_close(got, want, 5e-6 if dtype == "float32" else 1e-2, names)


@pytest.mark.slow
def test_in_a_shard():
    """Kernels run inside shard_map."""
    inputs, state = inputs_of("uniform", jnp.bfloat16)
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",), axis_types=(AxisType.Auto,))
    heads, states = jax.P(None, None, "model"), jax.P(None, "model")
    call = lambda inputs, state: op(*inputs, scale=K**-0.5, initial_state=state, segment_ids=None)
    shard = jax.shard_map(call, mesh=mesh, in_specs=(heads, states), out_specs=(heads, states), check_vma=False)
    for x, y in zip(jax.jit(shard)(inputs, state), jax.jit(call)(inputs, state)):
        assert_same_bits(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_no_races(direction, capfd):
    """The interpreter of the TPU's memory: scratch starts as NaN, reads out of bounds fail, races are reported."""
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")
    checked = functools.partial(kda_pallas_tpu, interpret=params)
    inputs, states = make(100, 1, 2, 64, 64, dtype=np.float32, S=3)
    ids = jnp.asarray(np.repeat([0, 2], [70, 30])[None], jnp.int32)
    run = {"forward": forward, "backward": evaluate}[direction]
    assert_all_close(run(checked, inputs, states, ids), exact(inputs, states, ids), 2e-6)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"K": 60}, "K=60, V=60; heads with K and V of 64 or 128"),
        ({"dtype": jnp.float64}, "float64; bfloat16 and float32"),
        ({"g_min": None}, "g_min=None; gates bounded by at least -5.80"),
        ({"g_min": -6.0}, "g_min=-6.0; gates bounded by at least -5.80"),
        ({"H": 13}, "H=13 heads with K=64, V=64; with widths of 64, H must be even or at most 8"),
        ({}, "the platform is cpu; a TPU is needed"),
    ],
)
def test_refuses_what_it_cannot_serve(change, says):
    """fla#1135 among them: 60 channels."""
    dtype = change.get("dtype", jnp.bfloat16)
    with jax.enable_x64(dtype == jnp.float64), pytest.raises(NotImplementedError, match=says):
        x = jnp.zeros((1, 4, change.get("H", 2), change.get("K", 64)), dtype)
        g = x.astype(jnp.float32)
        kda(x, x, x, g, g[..., 0], g_min=change.get("g_min", -5.0), implementation="pallas_tpu")


# ---- ahead of time


def absent_mesh(topology, axes=("model",), devices=1):
    """A mesh of chips that are not there."""
    chips.prepare_environment()
    try:
        found, _ = chips.topology_devices(topology)
    except chips.ConfigError as error:
        pytest.skip(f"no compiler: {error}")
    return Mesh(np.array(found[:devices]), axes, axis_types=(AxisType.Explicit,))


def lower_both(mesh, B, T, H, K, V, dtype, packed, specs=(jax.P(),) * 3, gated=False):
    """Forward and backward pass, lowered for a mesh whose shards run the op."""
    tokens, rows, parameters = specs
    shape = lambda dtype, spec, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, spec))
    q, v = (shape(dtype, tokens, B, T, H, width) for width in (K, V))
    g, beta = shape(jnp.float32, tokens, B, T, H, K), shape(jnp.float32, tokens, B, T, H)
    state, ids = shape(jnp.float32, rows, B, H, K, V), shape(jnp.int32, jax.P(), B, T)
    more = (shape(jnp.float32, parameters, H), shape(jnp.float32, parameters, H, K)) if gated else ()

    def both(d_o, d_state, ids, state, *x):
        op = kda_gated if gated else kda
        call = functools.partial(op, segment_ids=ids if packed else None, implementation="pallas_tpu")
        values, vjp = jax.vjp(lambda state, *x: call(*x, initial_state=state), state, *x)
        return values, vjp((d_o, d_state))

    inputs = (rows,) + (tokens,) * 5 + (parameters,) * len(more)
    shard = jax.shard_map(
        both, mesh=mesh, in_specs=(tokens, rows, jax.P(), *inputs), out_specs=((tokens, rows), inputs), check_vma=False
    )
    with jax.set_mesh(mesh):
        return jax.jit(shard).lower(v, state, ids, state, q, q, v, g, beta, *more)


@pytest.mark.aot
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("H, packed", [(32, False), (96, True)])
def test_compiles(topology, H, packed, gated):
    """Decays, or decay logits, in float32."""
    compiled = lower_both(absent_mesh(topology), 1, 8192, H, 128, 128, jnp.bfloat16, packed, gated=gated).compile()
    assert compiled.as_text().count("tpu_custom_call") >= 2


@pytest.mark.aot
@pytest.mark.parametrize("H, K, V", [(3, 64, 64), (4, 64, 128), (4, 128, 64)])
def test_compiles_other_heads(H, K, V):
    lower_both(absent_mesh("v5e:2x2"), 2, 100, H, K, V, jnp.float32, True, gated=True).compile()


@pytest.mark.aot
def test_compiles_in_shards_of_a_million_tokens():
    """32 heads over four chips: 2^32 elements in every operand of the whole."""
    mesh = absent_mesh("v5p:2x2x1", devices=4)
    specs = jax.P(None, None, "model"), jax.P(None, "model"), jax.P("model")
    lower_both(mesh, 1, 1 << 20, 32, 128, 128, jnp.bfloat16, False, specs, gated=True).compile()

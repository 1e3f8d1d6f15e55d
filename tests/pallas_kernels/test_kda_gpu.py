"""KDA on Hopper GPUs: what the kernels refuse, that they compile for an H200, and, where there is one, parity."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import gpu_inverse, gpu_state, kda, kda_gated, pallas_gpu
from pallas_kernels.kda.config import GPUConfig
from pallas_kernels.kda.gated import log_decay
from pallas_kernels.kda.gpu_tiles import C, documents
from pallas_kernels.kda.pallas_gpu import kda_gated_pallas_gpu, kda_pallas_gpu
from pallas_kernels.kda.reference import kda_reference
from tests.pallas_kernels.test_kda import nearly_known

D = 128
NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")

on_hopper = pytest.mark.skipif(
    "H100" not in jax.devices()[0].device_kind and "H200" not in jax.devices()[0].device_kind,
    reason="needs a Hopper GPU",
)

# An H200 as XLA describes devices that are not there (public figures).
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""


def make(B, T, H, gate, seed=0, K=D):
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, T, H, K))
    if gate == "correlated":  # cudnn-frontend#1051
        k = 0.3 * k + rng.normal(size=(B, 1, H, K))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(B, T, H, K))
    beta = 1 / (1 + np.exp(-rng.normal(size=(B, T, H))))
    g = {
        "uniform": -5 * rng.uniform(size=q.shape),
        "typical": -5 / (1 + np.exp(4 + 2 * rng.normal(size=q.shape))),
        "bound": np.full(q.shape, -5.0),
        "none": np.zeros(q.shape),
        "repeated": np.zeros(q.shape),
        "slow": np.full(q.shape, -8e-5),  # vmlx-swift#433: bfloat16 would never forget
        "correlated": rng.uniform(-0.034, -0.012, size=q.shape),
    }[gate]
    if gate == "repeated":
        k, beta = np.broadcast_to(k[:, :1], k.shape), np.full_like(beta, 0.999)
    state = 0.3 * rng.normal(size=(B, H, K, K))
    to = lambda dtype, *xs: tuple(jnp.asarray(x, dtype) for x in xs)
    return *to(jnp.bfloat16, q, k, v), *to(jnp.float32, g, beta, state)


@functools.partial(jax.jit, static_argnums=0, static_argnames="config")  # one program for inputs of one shape
def evaluate(op, inputs, segment_ids=None, **config):
    """Values and all gradients, for fixed random cotangents, of (q, k, v, g, beta, state) or what `kda_gated` takes."""
    *arrays, state = inputs
    more = {"scale": arrays[0].shape[-1] ** -0.5, "segment_ids": segment_ids} | config
    values, vjp = jax.vjp(lambda *x: op(*x[:-1], initial_state=x[-1], **more), *arrays, state)
    weights = [jax.random.normal(jax.random.key(i), y.shape).astype(jnp.bfloat16) for i, y in enumerate(values)]
    return values + vjp(tuple(w.astype(y.dtype) for w, y in zip(weights, values)))


def assert_parity(inputs, segment_ids=None, bounds=(), **config):
    got = dict(zip(NAMES, evaluate(kda_pallas_gpu, inputs, segment_ids, **config)))
    with jax.default_matmul_precision("highest"):
        want = dict(zip(NAMES, evaluate(kda_reference, [x.astype(jnp.float32) for x in inputs], segment_ids)))
    for name in NAMES:
        x, y = (np.asarray(r[name], np.float64) for r in (got, want))
        assert np.isfinite(x).all(), name
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        # One bfloat16 rounding of a random sum is 2e-3. dbeta is a difference of sums.
        bound = {"o": 6e-3, "dbeta": 3e-2, **dict(bounds)}.get(name, 1e-2)
        assert error < bound, (name, error)


@on_hopper
@pytest.mark.parametrize("gate", ["typical", "uniform", "bound", "none", "repeated", "slow", "correlated"])
def test_parity(gate):
    """Among others FlashKDA#10, FlashKDA#34, cudnn-frontend#1051, tt-metal#54813 and transformers#48455.

    fla#807 and fla#984 (illegal and wrong backward passes on Hopper) are why every gradient is compared on the card.
    """
    # Keys that are alike amplify roundings. The XLA form's errors in bfloat16, on these inputs: repeated, o 1.1e-2, dv
    # 7e-2, dbeta 0.16; correlated, o 5.9e-3, dv 7e-3, dbeta 9e-3.
    bounds = {"repeated": {"o": 8e-2, "dv": 8e-2, "dbeta": 8e-2}, "correlated": {"o": 1e-2}}
    assert_parity(make(2, 256, 3, gate), bounds=bounds.get(gate, ()))


@on_hopper
def test_zero_beta_has_a_gradient():
    *inputs, beta, state = make(1, 70, 2, "typical")
    assert_parity((*inputs, beta.at[:, ::3].set(0.0), state))


@on_hopper
@pytest.mark.parametrize("T", [1, 17, 33, 63, 65, 200, 500])
def test_odd_lengths(T):
    """cuLA#38, fla#792, fla#1142: the padding of the last chunk must not reach the final state or a gradient."""
    assert_parity(make(1, T, 2, "typical"))


@on_hopper
def test_long_memory():
    """vmlx-swift#433, sglang#38975: decays, beta and state in full precision over thousands of steps."""
    assert_parity(make(1, 4096, 1, "slow"))


@on_hopper
@pytest.mark.parametrize("gate", ["uniform", "bound"])
def test_packed(gate):
    ids = np.cumsum(np.random.default_rng(3).random((2, 300)) < 0.06, axis=1)
    assert_parity(make(2, 300, 2, gate), jnp.asarray(ids, jnp.int32))


@on_hopper
@pytest.mark.parametrize("lengths", [(640, 783), (255, 1), (64, 128, 1, 7)])
def test_packed_lengths(lengths):
    """flash-linear-attention-npu#544, cudnn-frontend#1013."""
    ids = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths)[None], jnp.int32)
    assert_parity(make(1, sum(lengths), 2, "typical"), ids)


@on_hopper
@pytest.mark.parametrize("packed", [False, True])
def test_spans(packed):
    """A long sequence goes through in spans and keeps only the states between them."""
    ids = np.cumsum(np.random.default_rng(3).random((2, 500)) < 0.02, axis=1)
    config = GPUConfig(workspace=2 * 3 * 128)
    assert_parity(make(2, 500, 3, "typical"), jnp.asarray(ids, jnp.int32) if packed else None, config=config)


def segments(H):
    """Tokens of no segment at both ends; segments 1, 3 and 4 have none. And their states."""
    ids = jnp.asarray(np.repeat([[-1, 0, 2, 5, 7]], [10, 63, 130, 65, 20], axis=1), jnp.int32)
    return ids, jnp.asarray(0.3 * np.random.default_rng(1).normal(size=(1, 6, H, D, D)), jnp.float32)


@on_hopper
def test_states_of_segments():
    """FlashKDA#32, flashinfer#3536: one state per segment; segments without tokens, and tokens of no segment."""
    ids, states = segments(2)
    *inputs, _ = make(1, ids.shape[1], 2, "typical")
    assert_parity((*inputs, states), ids)


@on_hopper
def test_heads_of_64():
    assert_parity(make(1, 130, 2, "uniform", K=64))


@on_hopper
def test_poisoned_neighbours():
    """fla#1142, cudnn-frontend#1056: rows and channels beside ours are somebody else's; nothing of them is read."""
    *inputs, state = make(1, 65, 2, "typical")
    poisoned = [jnp.pad(x, ((0, 0), (0, 65)) + ((0, 0),) * (x.ndim - 2), constant_values=jnp.nan) for x in inputs]
    poisoned = [jnp.concatenate([x, jnp.full_like(x, jnp.nan)], axis=-1) for x in poisoned]

    @jax.jit
    def cut(buffers):
        ours = [y[tuple(map(slice, x.shape))] for x, y in zip(inputs, buffers)]
        return jax.vjp(lambda *x: kda_pallas_gpu(*x, scale=1.0, initial_state=state, segment_ids=None), *ours)

    for buffers in (inputs, poisoned):
        values, vjp = cut(buffers)
        results = [np.asarray(x, np.float32) for x in (*values, *vjp(values))]
        clean = results if buffers is inputs else clean
        for x, y in zip(results, clean):
            np.testing.assert_array_equal(x, y)


@on_hopper
def test_a_nearly_known_token():
    """attention-gym#465, #464: v - S^T k is 4096 - 4098, nothing if S^T k is rounded first; 65536 is no float16."""
    inputs, before, after = nearly_known(jnp.bfloat16, 1, 1, D, D)
    o, state = kda_pallas_gpu(*inputs, scale=1.0, initial_state=before, segment_ids=None)
    np.testing.assert_array_equal(state, after)
    np.testing.assert_array_equal(o[0, 0, 0, :2].astype(jnp.float32), [1, 0])


@pytest.mark.parametrize("T, H", [(1 << 22, 1), (1 << 20, 32), (8192, 96)])
def test_spans_have_as_many_chunks_as_a_grid_can_count(monkeypatch, T, H):
    """fla#1174, fla#1239: 65535 on the second axis of a CUDA grid; and the workspace stays bounded."""
    plans = []

    def instead(plan, q, k, v, decay, beta, initial, docs, marks):
        plans.append(plan)
        return v, initial

    monkeypatch.setattr(pallas_gpu, "_kda", instead)
    monkeypatch.setattr(pallas_gpu, "is_hopper", lambda: True)
    q, g, beta = ((jnp.bfloat16, D), (jnp.float32, D), (jnp.float32,))
    arrays = [jax.ShapeDtypeStruct((1, T, H, *x[1:]), x[0]) for x in (q, q, q, g, beta)]
    state = jnp.zeros((1, H, D, D))
    jax.eval_shape(lambda *x: kda_pallas_gpu(*x, scale=1.0, initial_state=state, segment_ids=None), *arrays)
    (plan,) = plans
    assert plan.chunks <= 65535 and plan.chunks * C * H <= 1 << 22
    assert plan.spans * plan.chunks * C >= T and (plan.spans - 1) * plan.chunks * C < T


@on_hopper
def test_many_rows():
    """fla#1077, unsloth-zoo#1092: more rows x heads than the second axis of a CUDA grid can count."""
    inputs = make(2050, 4, 32, "typical")
    run = jax.jit(lambda *x: kda_pallas_gpu(*x[:5], scale=D**-0.5, initial_state=x[5], segment_ids=None)[0])
    o = np.asarray(run(*inputs)[-2:], np.float32)
    np.testing.assert_array_equal(o, np.asarray(run(*(x[-2:] for x in inputs)), np.float32))


@on_hopper
def test_more_than_2_to_31_elements():
    """aiconfigurator#1435: the last tokens' output is that of the last tokens alone, from the state before them."""
    H, tail, block = 32, 64, 1 << 14
    T = 32 * block + tail
    repeat = jax.jit(lambda x: jnp.concatenate([jnp.tile(x, (1, 32, 1, 1)), x[:, :tail]], axis=1))
    draw = lambda i, dtype: jax.random.normal(jax.random.key(i), (1, block, H, D), dtype)
    q, k, v = (repeat(0.09 * draw(i, jnp.bfloat16)) for i in range(3))
    g = repeat(-0.1 * jax.nn.sigmoid(draw(3, jnp.float32)))
    beta, zero = jnp.full((1, T, H), 0.5), jnp.zeros((1, H, D, D))
    run = jax.jit(lambda *x: kda_pallas_gpu(*x[:5], scale=1.0, initial_state=x[5], segment_ids=None))
    o, final = run(q, k, v, g, beta, zero)
    before = run(*(x[:, -block:-tail] for x in (q, k, v, g, beta)), zero)[1]  # older tokens have faded
    want, want_final = run(*(x[:, -tail:] for x in (q, k, v, g, beta)), before)
    for x, y in ((o[:, -tail:], want), (final, want_final)):
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        assert np.linalg.norm(x - y) < 1e-2 * np.linalg.norm(y)


def gated_inputs(B, T, H, K=D, dtype=jnp.bfloat16, logit=None, logits=jnp.float32):
    rng = np.random.default_rng(5)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    q, k, v = (normal(B, T, H, K) for _ in range(3))
    z = (normal(B, T, H, K) if logit is None else jnp.full((B, T, H, K), logit)).astype(logits)
    wide = jnp.promote_types(dtype, jnp.float32)
    a_log, bias = (jnp.asarray(0.5 * rng.normal(size=shape), wide) for shape in ((H,), (H, K)))
    return q, k, v, z, normal(B, T, H), a_log, bias


GATED_NAMES = (
    "o", "final_state", "dq", "dk", "dv", "d decay_logits", "d beta_logits", "d a_log", "d dt_bias", "dinitial_state"
)  # fmt: skip


def gated_gpu(*x, **more):
    """`kda_gated` by the kernels, in spans if a config says so."""
    return kda_gated_pallas_gpu(*x[:4], jax.nn.sigmoid(x[4].astype(jnp.float32)), *x[5:], g_min=-5.0, **more)


gated_reference = functools.partial(kda_gated, implementation="reference")


def assert_gated_parity(inputs, state, segment_ids=None, **config):
    """Values, and gradients of the raw projections, of parameters and states."""
    got = evaluate(gated_gpu, (*inputs, state), segment_ids, **config)
    assert [x.dtype for x in got[2:]] == [x.dtype for x in (*inputs, state)]
    with jax.default_matmul_precision("highest"):
        want = evaluate(gated_reference, [x.astype(jnp.float32) for x in (*inputs, state)], segment_ids)
    errors = {}
    for name, x, y in zip(GATED_NAMES, got, want, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.isfinite(x).all(), name
        errors[name] = np.linalg.norm(x - y) / np.linalg.norm(y)
    # dt_bias: a sum of the logits' gradients over all tokens, most of which cancel
    bounds = {"d beta_logits": 3e-2, "d dt_bias": 2e-2}
    assert all(error < bounds.get(name, 1e-2) for name, error in errors.items()), errors


def random_state(H):
    return jnp.asarray(0.3 * np.random.default_rng(1).normal(size=(1, H, D, D)), jnp.float32)


@on_hopper
@pytest.mark.parametrize("logits", [jnp.bfloat16, jnp.float32])
def test_gated_parity(logits):
    assert_gated_parity(gated_inputs(1, 200, 2, logits=logits), random_state(2))


@on_hopper
def test_gated_states_of_segments():
    ids, states = segments(2)
    assert_gated_parity(gated_inputs(1, ids.shape[1], 2), states, ids)


@on_hopper
def test_gated_spans():
    ids = jnp.asarray(np.repeat([0, 1, 2], [90, 1, 109])[None], jnp.int32)
    assert_gated_parity(gated_inputs(1, 200, 2), random_state(2), ids, config=GPUConfig(workspace=2 * 128))


@on_hopper
def test_gated_saturated():
    """flash-linear-attention-npu#448: all logits at +20."""
    assert_gated_parity(gated_inputs(1, 200, 2, logit=20.0), random_state(2))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_gated_is_the_composition(implementation):
    q, k, v, z, b, a_log, bias = inputs = gated_inputs(1, 20, 2, K=8, dtype=jnp.float32)
    o, state = kda_gated(*inputs, implementation=implementation)
    unit = lambda x: x / np.sqrt((np.asarray(x, np.float64) ** 2).sum(-1, keepdims=True) + 1e-6)
    sigmoid = lambda x: 1 / (1 + np.exp(-np.asarray(x, np.float64)))
    g = -5 * sigmoid(np.exp(np.asarray(a_log))[:, None] * (np.asarray(z) + np.asarray(bias)))
    to = lambda x: jnp.asarray(x, jnp.float32)
    want = kda(to(unit(q)), to(unit(k)), v, to(g), to(sigmoid(b)), implementation="reference")
    np.testing.assert_allclose(o, want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state, want[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(log_decay(z, a_log, bias, -5.0), g, rtol=1e-5)


def test_gated_refuses():
    q, k, v, z, b, a_log, bias = gated_inputs(1, 4, 2, K=8, dtype=jnp.float32)
    with pytest.raises(ValueError, match="g_min"):
        kda_gated(q, k, v, z, b, a_log, bias, g_min=0.0)


@pytest.fixture
def interpreted(monkeypatch):
    """Kernels in Pallas' interpreter, which has no product with an operand or an initial value in registers, and no
    inline code: these three are replaced by what they compute.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    in_memory = gpu_inverse.product

    def product(shape, *pairs):
        if not any(isinstance(a, jax.Array) for a, _ in pairs):
            return in_memory(shape, *pairs)
        return sum(jnp.dot(a.astype(jnp.float32), b[...].astype(jnp.float32)) for a, b in pairs)

    def diagonal_inverses(A):
        i, j = (jax.lax.broadcasted_iota(jnp.int32, A.shape, axis) for axis in (0, 1))
        one = jnp.where(i == j, 1.0, 0.0)
        blocks = jnp.where(i // 16 == j // 16, A, 0).astype(jnp.bfloat16).astype(jnp.float32)
        return jax.lax.fori_loop(0, 16, lambda _, Y: one - jnp.dot(blocks, Y), one)

    monkeypatch.setattr(plgpu, "kernel", functools.partial(plgpu.kernel, interpret=plgpu.InterpretGPUParams()))
    monkeypatch.setattr(gpu_inverse, "product", product)
    monkeypatch.setattr(gpu_inverse, "diagonal_inverses", diagonal_inverses)
    monkeypatch.setattr(gpu_state, "added", lambda x, *pairs: x + in_memory(x.shape, *pairs))
    monkeypatch.setattr(pallas_gpu, "is_hopper", lambda: True)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_parity_interpreted(interpreted, packed):
    ids = jnp.asarray(np.repeat([0, 1, 2], [20, 38, 12])[None], jnp.int32)
    assert_parity(make(1, 70, 1, "uniform"), ids if packed else None)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["bfloat16 logits", "float32 logits", "saturated", "spans", "parts", "segments"])
def test_gated_parity_interpreted(interpreted, how):
    logits = jnp.bfloat16 if how == "bfloat16 logits" else jnp.float32
    T = {"segments": 110, "parts": 134}.get(how, 70)
    logit = 20.0 if how == "saturated" else None
    inputs, state, ids, config = gated_inputs(1, T, 1, logits=logits, logit=logit), random_state(1), None, {}
    if how in ("spans", "parts"):  # two spans of one chunk; two of two chunks, whose states form side by side
        ids = jnp.asarray(np.repeat([0, 1, 2], [20, 38, T - 58])[None], jnp.int32)
        config = {"config": GPUConfig(workspace=64 if how == "spans" else 128)}
    if how == "segments":
        ids = jnp.asarray(np.repeat([[-1, 0, 2, 5]], [10, 20, 70, 10], axis=1), jnp.int32)
        state = jnp.asarray(0.3 * np.random.default_rng(1).normal(size=(1, 5, 1, D, D)), jnp.float32)
    assert_gated_parity(inputs, state, ids, **config)


@on_hopper
def test_causal_and_packed_bit_for_bit():
    """fla#1240: no output depends on a later token or on another document, not by one bit."""
    ids = jnp.asarray(np.repeat([0, 1, 2], [50, 90, 116])[None], jnp.int32)
    *inputs, state = make(1, 256, 2, "uniform")
    *others, _ = make(1, 256, 2, "typical", seed=1)
    f = jax.jit(lambda *x: kda_pallas_gpu(*x, scale=D**-0.5, initial_state=state, segment_ids=ids)[0])
    o = np.asarray(f(*inputs).astype(jnp.float32))
    for start, stop in ((50, 140), (0, 81)):
        mixed = [y.at[:, start:stop].set(x[:, start:stop]) for x, y in zip(inputs, others)]
        np.testing.assert_array_equal(
            np.asarray(f(*mixed).astype(jnp.float32))[:, start:stop], o[:, start:stop]
        )


def test_documents():
    ids = jnp.asarray(np.repeat([4, 4, 5, 9], [C, 10, 30, C - 40])[None], jnp.int32)
    ordinal, same, across = np.moveaxis(np.asarray(documents(ids)), 2, 0)
    np.testing.assert_array_equal(ordinal[0, 0], 0)
    np.testing.assert_array_equal(ordinal[0, 1], np.repeat([0, 1, 2], [10, 30, C - 40]))
    np.testing.assert_array_equal(np.flatnonzero(same[0, 1] == 0), [10, 40])
    np.testing.assert_array_equal(across[0, :, 0], [1, 0])
    assert documents(None) is None


@pytest.mark.parametrize(
    "change, says",
    [
        ({"dtype": jnp.float32}, "bfloat16"),
        ({"K": 100}, "64 and 128"),
        ({"g_min": None}, "g_min"),
        ({"g_min": -5.5}, "g_min"),
    ],
)
def test_refuses_what_it_cannot_serve(change, says):
    K, dtype = change.get("K", D), change.get("dtype", jnp.bfloat16)
    x = jnp.zeros((1, 4, 1, K), dtype)
    with pytest.raises(NotImplementedError, match=says):
        kda(
            x,
            x,
            x,
            x.astype(jnp.float32),
            jnp.zeros((1, 4, 1)),
            g_min=change.get("g_min", -5.0),
            segment_ids=jnp.zeros((1, 4), jnp.int32),
            implementation="pallas_gpu",
        )


@pytest.fixture(scope="module")
def h200():
    """A mesh of one H200 that is not there."""
    topologies = pytest.importorskip("jax.experimental.topologies")
    try:
        topology = topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1")
    except Exception as error:  # whatever the missing plugin raises
        pytest.skip(f"no CUDA plugin: {error}")
    mesh = jax.sharding.Mesh(
        np.array(topology.devices), ("device",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    with jax.set_mesh(mesh):
        yield mesh


@pytest.mark.aot
@pytest.mark.parametrize(
    "B, T, H, packed, S",
    [(1, 8192, 96, False, 0), (2, 1000, 3, True, 0), (2, 1000, 3, True, 5), (1, 1 << 20, 32, False, 0)],
)
def test_compiles_for_h200(h200, B, T, H, packed, S):
    """The last shape has more than 2^31 elements in every operand."""
    where = jax.sharding.NamedSharding(h200, jax.P())
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=where)
    q = shape(jnp.bfloat16, B, T, H, D)
    g, beta, state = (shape(jnp.float32, *dims) for dims in ((B, T, H, D), (B, T, H), (B, *[S] * (S > 0), H, D, D)))
    ids = shape(jnp.int32, B, T) if packed else None

    def both(d_o, d_state, ids, *x):
        op = functools.partial(kda_pallas_gpu, scale=D**-0.5, segment_ids=ids)
        values, vjp = jax.vjp(lambda *x: op(*x[:5], initial_state=x[5]), *x)
        return values, vjp((d_o, d_state))

    jax.jit(both).lower(q, state, ids, q, q, q, g, beta, state).compile()


@pytest.mark.aot
@pytest.mark.parametrize("B, T, H, logits", [(1, 1000, 4, jnp.bfloat16), (1, 1 << 20, 32, jnp.float32)])
def test_gated_compiles_for_h200(h200, B, T, H, logits):
    where = jax.sharding.NamedSharding(h200, jax.P())
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=where)
    x, b = shape(jnp.bfloat16, B, T, H, D), shape(jnp.bfloat16, B, T, H)

    def gradients(d_o, d_state, *inputs):
        return jax.vjp(lambda *x: kda_gated(*x, implementation="pallas_gpu"), *inputs)[1]((d_o, d_state))

    parameters = shape(jnp.float32, H), shape(jnp.float32, H, D)
    z = shape(logits, B, T, H, D)
    jax.jit(gradients).lower(x, shape(jnp.float32, B, H, D, D), x, x, x, z, b, *parameters).compile()

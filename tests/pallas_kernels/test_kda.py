"""KDA: chunked forms against the recurrence, and what must hold bit for bit. `fla#1240` etc. are bug reports."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda, kda_gated
from pallas_kernels.kda.chunk import unit_lower_inverse
from pallas_kernels.kda.config import ChunkConfig, chunk_config
from pallas_kernels.kda.reference import kda_reference
from pallas_kernels.kda.xla import kda_xla

NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state")

# Light compilation: these tests compile far more than they compute.
fast_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

IMPLEMENTATIONS = {
    "reference": kda_reference,
    "chunk32": functools.partial(kda_xla, config=ChunkConfig(32, 16)),
    "chunk64": functools.partial(kda_xla, config=ChunkConfig(64, 16)),
    "pairwise": functools.partial(kda_xla, config=ChunkConfig(64, 16), g_min=None),
}


def make(T, B=1, H=2, K=8, V=6, *, gate="uniform", S=None, dtype=np.float64, seed=0):
    """(q, k, v, g, beta), initial state. Gates in nats: uniform in [-5, 0], mostly slow, at the bound, or none."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, B, T, H, K))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(B, T, H, V))
    g = {
        "uniform": lambda: -5 * rng.uniform(size=q.shape),
        "typical": lambda: -5 / (1 + np.exp(4 + 2 * rng.normal(size=q.shape))),
        "bound": lambda: np.full(q.shape, -5.0),
        "none": lambda: np.zeros(q.shape),
    }[gate]()
    beta = 1 / (1 + np.exp(-rng.normal(size=(B, T, H))))
    initial_state = rng.normal(size=(B, H, K, V) if S is None else (B, S, H, K, V))
    inputs = [jnp.asarray(x, dtype) for x in (q, k, v, g, beta)]
    return inputs, jnp.asarray(initial_state, inputs[3].dtype)


def test_outputs_alone_of_one_chunk_from_no_state():
    """As a layer is called to infer: no gradient and no final state keep a loop of one step in the program."""
    (q, k, v, g, beta), _ = make(24, B=2, K=32, V=32, dtype=np.float32)
    inputs = q, k, v, g, beta, jnp.zeros(2), jnp.zeros((2, 32))
    op = lambda how: lambda *x: kda_gated(*x, implementation=how)[0]
    want = jax.jit(op("reference"))(*inputs)
    for _ in range(2):  # what was read past a constant differed from one compilation to the next
        np.testing.assert_allclose(jax.jit(op("xla"))(*inputs), want, atol=1e-5)


def test_the_state_of_less_than_a_chunk_of_documents_passes_the_padding():
    (q, k, v, g, beta), state = make(24, B=1, dtype=np.float32)
    ids = jnp.asarray(np.repeat([[3, 5]], [10, 14], axis=1))
    op = lambda how: kda(q, k, v, g, beta, initial_state=state, segment_ids=ids, implementation=how)[1]
    np.testing.assert_allclose(op("xla"), op("reference"), atol=1e-5)


@functools.partial(fast_jit, static_argnums=0)
def evaluate(op, inputs, initial_state, segment_ids=None):
    """Values and all gradients of a functional with fixed random weights, in the order of NAMES."""

    def functional(inputs, initial_state):
        scale = inputs[0].shape[-1] ** -0.5
        o, state = op(*inputs, scale=scale, initial_state=initial_state, segment_ids=segment_ids)
        weight_o, weight_state = (
            jax.random.normal(jax.random.key(i), x.shape, jnp.float32) for i, x in enumerate((o, state))
        )
        return (o.astype(state.dtype) * weight_o).sum() + (state * weight_state).sum(), (o, state)

    (_, values), gradients = jax.value_and_grad(functional, argnums=(0, 1), has_aux=True)(
        inputs, initial_state
    )
    return *values, *gradients[0], gradients[1]


@functools.partial(fast_jit, static_argnums=0)
def forward(op, inputs, initial_state, segment_ids=None):
    scale = inputs[0].shape[-1] ** -0.5
    return op(*inputs, scale=scale, initial_state=initial_state, segment_ids=segment_ids)


def assert_all_close(got, want, bound, names=NAMES):
    """Relative Frobenius distance of each result."""
    errors = {}
    for name, x, y in zip(names, got, want):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.isfinite(x).all(), f"{name} is not finite"
        errors[name] = np.linalg.norm(x - y) / (np.linalg.norm(y) or 1.0)
    assert all(error < bound for error in errors.values()), errors


def assert_same_bits(x, y):
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


# ---- the chunked form is the recurrence


slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("T", [1, slow(15), 16, 17, slow(63), slow(64), 65, 130])
def test_chunked_is_recurrent(x64, T):
    """fla#792: lengths one row past a tile or a chunk missed a row mask."""
    inputs, state = make(T)
    assert_all_close(*(evaluate(IMPLEMENTATIONS[i], inputs, state) for i in ("chunk64", "reference")), 1e-10)


@pytest.mark.parametrize("kind", ["bound", "none", "repeated", "uniform"])
def test_chunked_is_recurrent_in_hard_regimes(x64, kind):
    """All gates -5 (transformers#48455), no decay (tt-metal#54813), one key without decay (FlashKDA#34)."""
    inputs, state = make(65, gate="none" if kind == "repeated" else kind)
    if kind == "repeated":
        inputs[1] = jnp.broadcast_to(inputs[1][:, :1], inputs[1].shape)
        inputs[4] = jnp.full_like(inputs[4], 0.9995)
    want = evaluate(kda_reference, inputs, state)
    for name in ("chunk64", "chunk32", "pairwise"):
        assert_all_close(evaluate(IMPLEMENTATIONS[name], inputs, state), want, 1e-10)


PACKED = np.repeat([0, 1, 2, 3, 5, 6], [37, 1, 1, 45, 19, 27])[
    None
]  # lengths 1, a boundary inside tiles; 4 is empty


@pytest.mark.parametrize("name", ["chunk64", "pairwise"])
@pytest.mark.parametrize("per_segment", [False, True])
def test_packed_is_recurrent(x64, name, per_segment):
    inputs, state = make(PACKED.shape[1], S=8 if per_segment else None)  # segment 7 is empty as well
    ids = jnp.asarray(PACKED)
    got, want = (evaluate(IMPLEMENTATIONS[i], inputs, state, ids) for i in (name, "reference"))
    assert_all_close(got, want, 1e-10)
    if per_segment:
        assert_same_bits(got[1][:, [4, 7]], state[:, [4, 7]])


def test_packed_is_each_document_alone(x64):
    op = IMPLEMENTATIONS["chunk32"]
    inputs, states = make(PACKED.shape[1], S=8)
    o, finals = forward(op, inputs, states, jnp.asarray(PACKED))
    o_alone, final_alone = forward(op, [x[:, 39:84] for x in inputs], states[:, 3])
    assert_all_close([o[:, 39:84], finals[:, 3]], [o_alone, final_alone], 1e-12)


def test_zero_length_segments_and_tokens_of_no_segment(x64):
    """cu_seqlens [0, 0, 5, 5] and [0, 0] (FlashKDA#32, flashinfer#3536); ids outside [0, S) are padding."""
    inputs, states = make(PACKED.shape[1], S=8)
    ids = jnp.asarray(np.repeat([-1, 1, 2, 8, 9], [3, 70, 5, 42, 10])[None])
    got, want = (evaluate(op, inputs, states, ids) for op in (IMPLEMENTATIONS["chunk64"], kda_reference))
    assert_all_close(got, want, 1e-10)
    empty = [0, 3, 4, 5, 6, 7]
    assert_same_bits(got[1][:, empty], states[:, empty])
    assert not np.asarray(got[0])[:, np.r_[:3, 78:130]].any()

    inputs, state = make(0)
    o, final = kda(*inputs, initial_state=state)
    assert o.shape == (1, 0, 2, 6)
    assert_same_bits(final, state)


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(
    shape=st.sampled_from([(70, 2, 1, 3, 5), (37, 1, 3, 2, 1)]),
    cuts=st.lists(st.integers(0, 70), min_size=3, max_size=3),
    per_segment=st.booleans(),
    gate=st.sampled_from(["uniform", "typical", "bound", "none"]),
    seed=st.integers(0, 99),
)
def test_any_segmentation(shape, cuts, per_segment, gate, seed):
    """Four segments of any length, zero included; rows of a batch cut differently."""
    T, B, H, K, V = shape
    with jax.enable_x64(True):
        inputs, state = make(T, B, H, K, V, gate=gate, S=4 if per_segment else None, seed=seed)
        starts = np.sort([[min(cut // (b + 1), T) for cut in cuts] for b in range(B)])
        ids = jnp.asarray((np.arange(T) >= starts[..., None]).sum(1))
        got, want = (evaluate(op, inputs, state, ids) for op in (IMPLEMENTATIONS["chunk32"], kda_reference))
        assert_all_close(got, want, 1e-9)


def test_unbounded_decay(x64):
    """Gates down to -40 in the same tile as gates near 0."""
    inputs, state = make(65)
    steep = jax.random.uniform(jax.random.key(1), inputs[3].shape) < 0.4
    inputs[3] = jnp.where(steep, 8 * inputs[3], inputs[3] / 1e3)
    assert inputs[3].min() < -39
    got, want = (evaluate(IMPLEMENTATIONS[i], inputs, state) for i in ("pairwise", "reference"))
    assert_all_close(got, want, 1e-10)


# ---- low precision


@pytest.mark.parametrize("gate", ["typical", "uniform", "bound"])
def test_bfloat16_is_at_its_rounding_floor(gate):
    """Operands rounded to bfloat16 cost 2e-3 to 8e-3, dg included even where its terms cancel (gates at -5)."""
    inputs, state = make(128, K=64, V=64, gate=gate, dtype=np.float32)
    inputs = [x.astype(jnp.bfloat16) for x in inputs[:3]] + inputs[3:]
    got = evaluate(IMPLEMENTATIONS["chunk64"], inputs, state)
    assert [x.dtype for x in got] == [jnp.bfloat16, jnp.float32] + [jnp.bfloat16] * 3 + [jnp.float32] * 3
    with jax.enable_x64(True):
        want = evaluate(kda_reference, [x.astype(jnp.float64) for x in inputs], state.astype(jnp.float64))
    assert_all_close(got[:2], want[:2], 5e-3)
    assert_all_close(got[2:], want[2:], 1e-2, NAMES[2:])


def test_correlated_bfloat16_keys(x64):
    """cudnn-frontend#1051: common key plus noise, beta 1, slow decay: powers of A overflow, substitution does not."""
    inputs, state = make(512, H=1, K=32, V=16)
    key = inputs[1][:, :1] + 0.1 * inputs[1]
    inputs[1] = key / jnp.linalg.norm(key, axis=-1, keepdims=True)
    inputs[3] = -0.012 - 0.022 * jax.random.uniform(jax.random.key(0), inputs[3].shape)
    inputs[4] = jnp.ones_like(inputs[4])
    rounded = [x.astype(jnp.bfloat16) for x in inputs[:3]] + [x.astype(jnp.float32) for x in inputs[3:]]
    got = forward(IMPLEMENTATIONS["chunk64"], rounded, state.astype(jnp.float32))
    want = forward(kda_reference, [x.astype(jnp.float64) for x in rounded], state)
    assert_all_close(got, want, 3e-2)


def test_repeated_key_without_decay_in_float32():
    """FlashKDA#34 as the layer meets it: raw gate -12, beta logit 8, one key."""
    inputs, state = make(64, dtype=np.float32)
    inputs[1] = jnp.broadcast_to(inputs[1][:, :1], inputs[1].shape)
    inputs[3] = jnp.full_like(inputs[3], -5 * jax.nn.sigmoid(-12.0))
    inputs[4] = jnp.full_like(inputs[4], jax.nn.sigmoid(8.0))
    got, want = (forward(op, inputs, state) for op in (IMPLEMENTATIONS["chunk64"], kda_reference))
    assert_all_close(got, want, 5e-6)


def test_inverse_of_slow_decay():
    """tt-metal#54813: the worst matrix, equal keys without decay, against float64."""
    a = np.tril(np.full((64, 64), 0.999), -1)
    got = unit_lower_inverse(jnp.asarray(a, jnp.float32)[None], 16)[0]
    np.testing.assert_allclose(got, np.linalg.inv(np.eye(64) + a), atol=1e-6)


def test_slow_decay_is_not_rounded_away():
    """vmlx-swift#433: 4096 steps of decay .99992 leave e^-0.328 of the state, 1 if the decay is rounded to bfloat16."""
    T = 4096
    x = jnp.zeros((1, T, 1, 4), jnp.bfloat16)
    g = jnp.full((1, T, 1, 4), np.log(0.99992), jnp.float32)
    _, state = forward(kda_xla, [x, x, x, g, jnp.zeros((1, T, 1))], jnp.ones((1, 1, 4, 4)))
    np.testing.assert_allclose(state, 0.99992**T, rtol=1e-5)


def test_gradient_through_a_saturated_gate():
    """flash-linear-attention-npu#448: raw gates of +20 put every g at -5 over a long sequence."""
    inputs, _ = make(1024, H=1, dtype=np.float32)

    def loss(raw, op):
        inputs[3] = -5 * jax.nn.sigmoid(raw)
        state = jnp.zeros((1, 1, 8, 6))
        return (op(*inputs, scale=1.0, initial_state=state, segment_ids=None)[0] ** 2).sum()

    raw = jnp.full_like(inputs[3], 20.0)
    got, want = (fast_jit(jax.grad(functools.partial(loss, op=op)))(raw) for op in (kda_xla, kda_reference))
    assert_all_close([got], [want], 1e-4, ["draw"])


# ---- lengths that public kernels got wrong


@pytest.mark.parametrize("T", [63, 1000])
def test_final_state_of_ragged_lengths(T):
    """cuLA#38: the decay of a padding row reached the state."""
    inputs, state = make(T, H=1, gate="typical", dtype=np.float32)
    assert_all_close(*(forward(op, inputs, state) for op in (kda_xla, kda_reference)), 1e-5)


def test_gradients_of_two_long_documents():
    """flash-linear-attention-npu#544: dk and dg of packed lengths 640 and 783 were off by 1e4."""
    inputs, state = make(1423, H=1, gate="typical", dtype=np.float32)
    ids = jnp.asarray(np.arange(1423)[None] >= 640, jnp.int32)
    got, want = (evaluate(op, inputs, state, ids) for op in (IMPLEMENTATIONS["chunk64"], kda_reference))
    assert_all_close(got, want, 5e-5)


def test_a_slice_of_a_poisoned_buffer():
    """fla#1142, cudnn-frontend#1056: rows past T = 65, and channels beside ours, are somebody else's; none is read."""
    inputs, state = make(65, dtype=np.float32)

    def around(x):
        more = ((0, 0), (0, 63), (0, 0), (0, x.shape[-1]))[: x.ndim]
        return jnp.pad(x, more, constant_values=jnp.nan)

    def cut(inputs):
        inputs = [y[tuple(map(slice, x.shape))] for x, y in zip(shapes, inputs)]
        (o, final), vjp = jax.vjp(lambda *x: kda(*x, initial_state=state), *inputs)
        return o, final, *vjp((o, final))

    shapes = inputs
    for clean, dirty in zip(fast_jit(cut)(inputs), fast_jit(cut)([around(x) for x in inputs])):
        assert_same_bits(clean, dirty)


def test_more_documents_than_a_grid_axis_counts():
    """fla#1077, unsloth-zoo#1092: 2050 documents of 16 tokens x 32 heads are 65600 programs; each document is alone."""
    T, H = 16, 32
    inputs, _ = make(T, 2050, H, 2, 2, dtype=np.float32)
    want, _ = fast_jit(functools.partial(kda, implementation="reference"))(*inputs)
    ids = jnp.arange(2050 * T)[None] // T
    packed = [x.reshape(1, -1, *x.shape[2:]) for x in inputs]
    o, _ = fast_jit(functools.partial(kda, segment_ids=ids, implementation="xla"))(*packed)
    np.testing.assert_allclose(o.reshape(want.shape), want, atol=1e-5)


def nearly_known(dtype, T=1, H=1, K=2, V=2):
    """A token that the state knows to 1 in 2000, and to a bit; the state before and after. The rest is zero."""
    token = {"q": [0, 1], "k": [1, 1], "v": [4096, 65536]}
    q, k, v = (np.zeros((1, T, H, width)) for width in (K, K, V))
    for name, x in zip("qkv", (q, k, v)):
        x[0, 0, :, :2] = token[name]
    beta, before, after = np.zeros((1, T, H)), np.zeros((1, H, K, V)), np.zeros((1, H, K, V))
    beta[0, 0] = 0.5
    before[0, :, :2, :2] = [[4096, 65536], [2, 0]]  # k reads 4098 and 65536
    after[0, :, :2, :2] = [[4095, 65536], [1, 0]]
    to = lambda dtype, *xs: [jnp.asarray(x, dtype) for x in xs]
    return [*to(dtype, q, k, v), *to(jnp.float32, np.zeros(q.shape), beta)], *to(jnp.float32, before, after)


def test_a_nearly_known_token_in_bfloat16():
    """attention-gym#465, #464: v - S^T k is 4096 - 4098, nothing if S^T k is rounded first; 65536 is no float16."""
    inputs, before, after = nearly_known(jnp.bfloat16)
    o, state = forward(IMPLEMENTATIONS["chunk64"], inputs, before)
    assert_same_bits(state, after)
    np.testing.assert_allclose(o[0, 0, 0].astype(jnp.float32), np.array([1, 0]) * 2**-0.5, rtol=2**-8)


# ---- bit for bit


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("chunk32", jnp.float32),
        ("chunk64", jnp.float32),
        ("pairwise", jnp.float32),
        ("chunk64", jnp.bfloat16),
    ],
)
def test_the_future_changes_nothing(name, dtype):
    """fla#1240: later gates (and everything else later) leave earlier outputs bit-identical."""
    (q, k, v, g, beta), state = make(80, dtype=np.float32)
    (q2, k2, v2, g2, beta2), _ = make(80, dtype=np.float32, gate="typical", seed=1)
    now = [x.astype(dtype) for x in (q, k, v)] + [g, beta]
    other = [x.astype(dtype) for x in (q2, k2, v2)] + [g2, beta2]
    before, _ = forward(IMPLEMENTATIONS[name], now, state)
    for cut in (21, 64):
        changed = [jnp.concatenate([x[:, :cut], y[:, cut:]], axis=1) for x, y in zip(now, other)]
        after, _ = forward(IMPLEMENTATIONS[name], changed, state)
        assert_same_bits(before[:, :cut], after[:, :cut])
        assert (before[:, cut:] != after[:, cut:]).any()


@pytest.mark.parametrize(
    ("name", "per_segment", "dtype"),
    [
        ("chunk32", False, np.float32),
        ("chunk64", False, np.float64),
        ("chunk64", True, np.float64),
        ("pairwise", False, np.float64),
    ],
)
def test_documents_never_meet(name, per_segment, dtype):
    """Other content in one document leaves outputs, states and gradients of the others bit-identical."""
    with jax.enable_x64(dtype == np.float64):
        inputs, state = make(PACKED.shape[1], S=8 if per_segment else None, dtype=dtype)
        others, _ = make(PACKED.shape[1], gate="bound", dtype=dtype, seed=1)
        before = evaluate(IMPLEMENTATIONS[name], inputs, state, jnp.asarray(PACKED))
        for s in (0, 3, 5):
            member = PACKED[0] == s
            changed = [
                jnp.where(member[(...,) + (None,) * (x.ndim - 2)], y, x) for x, y in zip(inputs, others)
            ]
            after = evaluate(IMPLEMENTATIONS[name], changed, state, jnp.asarray(PACKED))
            for result, x, y in zip(NAMES, before, after):
                if "state" not in result:
                    assert_same_bits(x[:, ~member], y[:, ~member])
                    assert (x[:, member] != y[:, member]).any()
                elif per_segment:
                    assert_same_bits(np.delete(x, s, axis=1), np.delete(y, s, axis=1))


@pytest.mark.parametrize("first", [1, 40])
def test_split_and_carry_is_the_whole(x64, first):
    inputs, state = make(70)
    o, final = forward(kda_xla, inputs, state)
    o1, carried = forward(kda_xla, [x[:, :first] for x in inputs], state)
    o2, final2 = forward(kda_xla, [x[:, first:] for x in inputs], carried)
    assert_all_close([jnp.concatenate([o1, o2], axis=1), final2], [o, final], 1e-12)


# ---- cost and errors


def test_backward_keeps_inputs_and_chunk_states_only():
    B, T, H, K, V, C = 2, 256, 2, 16, 8, 64
    inputs, state = make(T, B, H, K, V, dtype=np.float32)
    op = functools.partial(IMPLEMENTATIONS["chunk64"], scale=1.0, segment_ids=None)

    def pullback(inputs, state):
        return jax.vjp(lambda inputs, state: op(*inputs, initial_state=state), inputs, state)[1]

    saved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(pullback, inputs, state)))
    assert saved == sum(x.nbytes for x in inputs) + B * H * (T // C) * K * V * 4


def test_state_and_output_dtypes():
    inputs, _ = make(5, dtype=np.float32)
    o, state = jax.eval_shape(kda, *(x.astype(jnp.bfloat16) for x in inputs[:3]), *inputs[3:])
    assert (o.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)


def test_bad_arguments_say_how_to_mend_them():
    # Past the signature check of the tests, to what users without it meet.
    call = getattr(kda, "__wrapped__", kda)
    inputs, state = make(4, dtype=np.float32)
    q, k, v, g, beta = inputs
    ids = jnp.zeros((1, 4), jnp.int32)
    for arguments, keywords, message in (
        (
            (q, k[:, :3], v, g, beta),
            {},
            r"kda: k has shape \(1, 3, 2, 8\); q of shape .* needs \(1, 4, 2, 8\)",
        ),
        (
            (q, k, v, g.astype(jnp.bfloat16), beta),
            {},
            "kda: g has dtype bfloat16.*compute the gate in float32",
        ),
        (
            (q.astype(jnp.bfloat16), k, v, g, beta),
            {},
            "kda: q, k, v have dtypes bfloat16, float32.*cast them to one",
        ),
        (inputs, {"g_min": 5.0}, r"kda: g_min=5.0 is positive.*-5.0"),
        (inputs, {"g_min": -9.0}, r"kda: g_min=-9.0 overflows 16-row tiles; pass None, or at least -5.80"),
        (
            inputs,
            {"segment_ids": ids[:, :3]},
            r"kda: segment_ids is int32\(1, 3\); pass integers of shape \(1, 4\)",
        ),
        (
            inputs,
            {"initial_state": state[:, None]},
            "kda: initial_state .* one per segment; pass segment_ids",
        ),
        (
            inputs,
            {"initial_state": state[..., :3]},
            r"kda: initial_state has shape \(1, 2, 8, 3\); pass \(1, 2, 8, 6\)",
        ),
        (inputs, {"implementation": "cuda"}, "kda: implementation='cuda' does not exist.*reference, xla"),
    ):
        with pytest.raises(ValueError, match=message):
            call(*arguments, **keywords)


def test_tuned_sizes(monkeypatch):
    """Of a device and head size, of a device, or the default."""
    tuned = {("chip", None, None): ChunkConfig(32, 16), ("chip", 64, 128): ChunkConfig(128, 16)}
    monkeypatch.setattr("pallas_kernels.kda.config._XLA", tuned)
    sizes = [chunk_config(*at).chunk for at in (("chip", 64, 128), ("chip", 128, 128), ("another chip", 64, 128))]
    assert sizes == [128, 32, 64]


def test_chunk_sizes_are_checked():
    for sizes, message in (
        ((64, 12), "tile=12 is not a power of two"),
        ((8, 16), "chunk=8 is smaller than tile=16"),
    ):
        with pytest.raises(ValueError, match=message):
            ChunkConfig(*sizes)

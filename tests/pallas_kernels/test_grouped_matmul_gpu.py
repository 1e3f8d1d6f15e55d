"""Grouped matmul and expert FFN on Hopper GPUs: what is refused, that they compile for an H200, parity interpreted on
the CPU and, where there is a Hopper GPU, on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.expert_ffn import Activation, expert_ffn
from pallas_kernels.grouped_matmul import gpu_kernel, grouped_matmul
from pallas_kernels.grouped_matmul.gpu_kernel import Tiles
from pallas_kernels.grouped_matmul.gpu_narrow import NarrowTiles
from pallas_kernels.grouped_matmul.pallas_gpu import groups_product, product_by_rows
from tests.pallas_kernels.test_expert_ffn import NAMES, evaluate, example, oracle
from tests.pallas_kernels.test_grouped_matmul import by_hand
from tests.pallas_kernels.test_kda_gpu import h200, on_hopper  # noqa: F401

K, N = 768, 512  # a multiple of every tile
SIZES = {
    "zeros": [8, 0, 8, 0, 0, 0],
    "one": [0, 0, 1024, 0, 0, 0],
    "odd": [72, 0, 136, 8, 584, 64],
    "full": [200] * 6,
    "none": [0] * 6,
    "fewer rows than groups": ([8, 0, 0, 0, 16, 0, 0] * 128),
}
ALL_TILES = [
    Tiles(64, 256),
    Tiles(64, 256, cluster=2, panel=2),
    Tiles(128, 128, consumers=1, streams=2, stages=3),
    Tiles(128, 128),
    Tiles(64, 128, consumers=3),
]


def operands(sizes, M, K, N, seed=0):
    """bfloat16 lhs, rhs, d_out, with NaN in the rows no group owns, and the same as float32 numpy."""
    rng = np.random.default_rng(seed)
    lhs, d = rng.normal(size=(M, K)), rng.normal(size=(M, N))
    rhs = np.tile(rng.normal(size=(8, K, N)), (-(-len(sizes) // 8), 1, 1))[: len(sizes)]
    lhs[sum(sizes) :], d[sum(sizes) :] = np.nan, np.nan
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (lhs, rhs, d)]
    return narrow, [np.asarray(x, np.float32) for x in narrow]


def assert_close(got, want, bound):
    got = np.asarray(got, np.float32)
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got[want == 0], 0)
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


@on_hopper
@pytest.mark.parametrize("tiles", [*ALL_TILES, NarrowTiles(64, 192), NarrowTiles(128, 192, stages=3, step=16)])
@pytest.mark.parametrize("name", SIZES)
def test_parity(name, tiles):
    sizes = SIZES[name]
    (lhs, rhs, d), wide = operands(sizes, 3200 if len(sizes) > 6 else 1200, K, N)
    out, d_lhs, d_rhs = by_hand(wide[0], wide[1], wide[2], sizes)
    got = jax.jit(
        lambda x, w, d, s: (product_by_rows([x], [w], s, tiles), product_by_rows([d], [w], s, tiles, transposed=True))
    )(lhs, rhs, d, jnp.asarray(sizes))
    for x, want in zip(got, (out, d_lhs)):
        assert_close(x, want, 3e-3)  # one rounding to bfloat16 is 1.7e-3
    if not isinstance(tiles, NarrowTiles):
        of_groups = jax.jit(lambda x, d, s: groups_product(x, d, s, tiles, jnp.float32))
        assert_close(of_groups(lhs, d, jnp.asarray(sizes)), d_rhs, 1e-5)


@on_hopper
@pytest.mark.parametrize("width", [64, 128, 320, 3584])
def test_op_parity(width):
    sizes = SIZES["odd"]
    (lhs, rhs, d), wide = operands(sizes, 1200, 192, width)
    op = lambda x, w, dtype=None: grouped_matmul(
        x, w, jnp.asarray(sizes), align=8, dtype=dtype, implementation="pallas_gpu"
    )
    out, vjp = jax.vjp(op, lhs, rhs)
    for got, want in zip((out, *vjp(d)), by_hand(*wide, sizes)):
        assert_close(got, want, 3e-3)
    full, vjp = jax.vjp(functools.partial(op, dtype=jnp.float32), lhs, rhs)
    assert_close(full, by_hand(*wide, sizes)[0], 1e-5)
    for got, want in zip(vjp(d.astype(jnp.float32)), by_hand(*wide, sizes)[1:]):
        assert_close(got, want, 3e-3)


@on_hopper
@pytest.mark.parametrize("activation", [Activation(), Activation("swiglu")])
@pytest.mark.parametrize("sizes", [[72, 0, 136, 8, 584, 64], [0, 0, 0]])
def test_expert_ffn_parity(sizes, activation):
    D, F = 256, 192
    x, weight, *matrices, d_y = example(sizes, D, F, spare=72)
    inputs = x, weight, *(w / np.sqrt(w.shape[1]) for w in matrices), d_y
    dtypes = [jnp.float32 if i == 1 else jnp.bfloat16 for i in range(len(inputs))]
    rounded = [np.asarray(jnp.asarray(a, dtype), np.float64) for a, dtype in zip(inputs, dtypes)]
    got = evaluate(sizes, 8, activation, "pallas_gpu", jnp.bfloat16, *inputs)
    for name, a, want in zip(NAMES, got, oracle(sizes, activation, *rounded)):
        a = np.asarray(a, np.float64)
        assert np.linalg.norm(a - want) <= 1e-2 * np.linalg.norm(want), name  # a few roundings to bfloat16


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels on the CPU, with 2 blocks for 132."""
    monkeypatch.setattr(gpu_kernel, "multiprocessors", lambda: 2)
    kernel = functools.partial(plgpu.kernel, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr(gpu_kernel.plgpu, "kernel", kernel)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["rows", "wide rows", "transposed", "groups"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_parity_interpreted(what, cluster, interpreted):
    """Waits, phases and the ragged ends, with NaN in every row that no group owns."""
    sizes, tiles = [72, 0, 136, 8], Tiles(64, 128, stages=2, cluster=cluster)
    (lhs, rhs, d), wide = operands(sizes, 256, 256, 128 * cluster)
    s = jnp.asarray(sizes)
    got = {
        "rows": lambda: product_by_rows([lhs], [rhs], s, tiles),
        "wide rows": lambda: product_by_rows([lhs], [rhs], s, tiles, dtype=jnp.float32),
        "transposed": lambda: product_by_rows([d], [rhs], s, tiles, transposed=True),
        "groups": lambda: groups_product(lhs, d, s, tiles, jnp.float32),
    }[what]()
    want = dict(zip(("rows", "transposed", "groups"), by_hand(*wide, sizes)))[what.removeprefix("wide ")]
    assert_close(got, want, 1e-5 if what == "wide rows" else 3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_narrow_parity_interpreted(transposed, interpreted):
    """Row blocks of 96 in steps of 32, a group of more rows, one without any, NaN in every row that no group owns."""
    sizes, tiles = [72, 0, 136, 8], NarrowTiles(64, 96, stages=2)
    (lhs, rhs, d), wide = operands(sizes, 256, 128, 128)
    want = by_hand(*wide, sizes)[1 if transposed else 0]
    got = product_by_rows([d if transposed else lhs], [rhs], jnp.asarray(sizes), tiles, transposed=transposed)
    assert_close(got, want, 3e-3)


@pytest.mark.aot
@pytest.mark.parametrize("M, G, D, F", [(32768, 56, 3584, 3072), (4096, 896, 3584, 3072), (1024, 4, 64, 192)])
def test_compiles_for_h200(h200, M, G, D, F):  # noqa: F811
    where = jax.sharding.NamedSharding(h200, jax.P())
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=where)
    x, p, s = shape(jnp.bfloat16, M, D), shape(jnp.float32, M), shape(jnp.int32, G)
    w_in, w_out = shape(jnp.bfloat16, G, D, F), shape(jnp.bfloat16, G, F, D)

    def both(d_y, s, *inputs):
        op = lambda x, p, *w: expert_ffn(x, p, s, *w, align=8, implementation="pallas_gpu")
        y, vjp = jax.vjp(op, *inputs)
        return y, vjp(d_y)

    jax.jit(both).lower(x, s, x, p, w_in, w_in, w_out).compile()


@pytest.mark.aot
@pytest.mark.parametrize("M, G", [(32768, 56), (4096, 896)])
def test_wide_results_compile_for_h200(h200, M, G):  # noqa: F811
    where = jax.sharding.NamedSharding(h200, jax.P())
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=where)
    op = functools.partial(grouped_matmul, align=8, dtype=jnp.float32, implementation="pallas_gpu")
    jax.jit(op).lower(shape(jnp.bfloat16, M, 3584), shape(jnp.bfloat16, G, 3584, 3072), shape(jnp.int32, G)).compile()


@pytest.mark.parametrize(
    "change, says",
    [({"platform": "cpu"}, "9.0"), ({"dtype": jnp.float32}, "bfloat16"), ({"align": 4}, "align=4"), ({"N": 100}, "64")],
)
def test_refuses_what_it_cannot_serve(change, says, monkeypatch):
    target = change.get("platform", "gpu"), "NVIDIA H200"
    monkeypatch.setattr("pallas_kernels.dispatch.target", lambda: target)
    lhs, rhs = jnp.zeros((16, 64), change.get("dtype", jnp.bfloat16)), jnp.zeros((1, 64, change.get("N", 64)))
    with pytest.raises(NotImplementedError, match=says):
        grouped_matmul(lhs, rhs, jnp.array([8]), align=change.get("align", 8), implementation="pallas_gpu")

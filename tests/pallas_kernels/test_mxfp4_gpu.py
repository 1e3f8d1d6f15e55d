"""Products of packed matrices on Hopper GPUs: parity where there is a card, and that they compile for an H200."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.gpu_packed import PackedTiles, interleave
from pallas_kernels.grouped_matmul.gpu_unpack import shuffled, unpack_shuffled, unshuffled
from pallas_kernels.grouped_matmul.pallas_gpu import GpuProducts, packed_rows, row_tiles
from pallas_kernels.mxfp4 import Packed, unpack
from tests.pallas_kernels.test_grouped_matmul import by_hand
from tests.pallas_kernels.test_grouped_matmul_gpu import SIZES, assert_close, interpreted  # noqa: F401
from tests.pallas_kernels.test_kda_gpu import h200, on_hopper  # noqa: F401

ALL_TILES = [PackedTiles(8, 4), PackedTiles(8, 1, stages=3), PackedTiles(16, 2), PackedTiles(64, 2),
             PackedTiles(128, 2), PackedTiles(256, 1), PackedTiles(64, 2, consumers=1)]  # fmt: skip


def operands(sizes, M, K, N, seed=0):
    """bfloat16 rows, NaN where no group owns them, packed matrices, and the values of both in float32."""
    rng, G = np.random.default_rng(seed), len(sizes)
    x = rng.normal(size=(M, K))
    x[sum(sizes) :] = np.nan
    x = jnp.asarray(x, jnp.bfloat16)
    codes = rng.integers(0, 256, (8, N, K // 2), np.uint8)
    scales = rng.integers(118, 131, (8, K // 32, N), np.uint8)
    many = lambda a: jnp.asarray(np.tile(a, (-(-G // 8), 1, 1))[:G])
    w = Packed(many(codes), many(scales))
    return x, w, np.asarray(x, np.float32), np.asarray(w.unpack(jnp.float32))


def test_columns_are_interleaved_as_nibbles_are_unpacked():
    """The order by the bytes: thread q of a row loads bytes 8 q .. 8 q + 7, and pairs nibbles i and i + 4 of a word."""
    order = np.asarray(interleave(jnp.arange(128.0).reshape(1, 128)))[0].astype(int)
    for block in range(2):
        for q in range(4):
            nibbles = 64 * block + 16 * q + np.arange(16)  # elements of the thread's 8 bytes, low nibbles first
            for w, i, e in np.ndindex(2, 4, 2):
                assert order[64 * block + 8 * (4 * w + i) + 2 * q + e] == nibbles[8 * w + i + 4 * e]


def test_unpacking_all_at_once_is_exact_and_undone_by_the_order_of_rows():
    """Every code at every scale but the outermost, bit for bit; byte 255 is nan; zeros at any scale."""
    codes = np.tile(np.arange(256, dtype=np.uint8).reshape(1, 16, 16), (1, 256, 1)).reshape(1, 4096, 16)
    scales = np.repeat(np.arange(256, dtype=np.uint8), 16)[None, None]
    w = Packed(jnp.asarray(codes), jnp.asarray(scales))
    got = np.asarray(unshuffled(jax.jit(unpack_shuffled)(w)))[0]
    want = np.asarray(unpack(w.codes, jnp.swapaxes(w.scales, 1, 2), jnp.bfloat16))[0]
    exact = (scales[0, 0] > 1) & (scales[0, 0] < 253)
    np.testing.assert_array_equal(got[exact].view(np.uint16), want[exact].view(np.uint16))
    assert np.isnan(got[scales[0, 0] > 252]).all()
    zero, low = want == 0, scales[0, 0] < 2
    assert (got[zero & low[:, None]] == 0).all()
    assert np.abs(got[low].astype(float) - want[low].astype(float)).max() < 2.0**-124
    x = np.arange(32.0)
    np.testing.assert_array_equal(shuffled(x)[:8], [0, 4, 1, 5, 2, 6, 3, 7])
    np.testing.assert_array_equal(unshuffled(shuffled(x)), x)


@pytest.mark.parametrize("tiles", [PackedTiles(8, 4), PackedTiles(64, 2, panel=2)], ids=str)
def test_every_row_of_every_group_is_in_one_tile_of_each_column(tiles):
    sizes, M, columns = np.array([8, 0, 200, 64]), 320, 3
    count, table = row_tiles(jnp.asarray(sizes), M, columns, tiles, workers=5)
    seen = np.zeros((M, columns), int)
    ends = np.cumsum(sizes)
    for group, row, rows, column in np.asarray(table)[: int(count[0])]:
        assert row >= (ends[group - 1] if group else 0) and row + rows <= (ends[group] if group < 4 else M)
        seen[row : row + rows, column] += 1
    assert (seen == 1).all()


@on_hopper
@pytest.mark.parametrize("tiles", ALL_TILES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_parity(name, tiles):
    sizes = SIZES[name]
    x, w, x32, w32 = operands(sizes, 3200 if len(sizes) > 6 else 1200, 512, 768)
    got = jax.jit(functools.partial(packed_rows, tiles=tiles))(x, w, jnp.asarray(sizes))
    assert_close(got, by_hand(x32, w32, np.zeros((len(x), 768), np.float32), sizes)[0], 3e-3)


@pytest.mark.slow
def test_many_rows_interpreted(interpreted):  # noqa: F811
    """More than 32 rows for each matrix, which is unpacked as it lies: the product, and the gradient of the rows."""
    sizes, K, N = [72, 0, 136, 8], 128, 64
    x, w, x32, w32 = operands(sizes, 256, K, N)
    d = np.random.default_rng(1).normal(size=(256, N)).astype(np.float32)
    d[sum(sizes) :] = np.nan
    product, s = GpuProducts("NVIDIA H200").rows, jnp.asarray(sizes)
    want, d_x, _ = by_hand(x32, w32, d, sizes)
    assert_close(product([x], [w], s), want, 3e-3)
    assert_close(product([jnp.asarray(d, jnp.bfloat16)], [w], s, transposed=True), d_x, 1e-2)


@on_hopper
@pytest.mark.parametrize("K, N", [(64, 64), (192, 128), (320, 192)])
@pytest.mark.parametrize("rows", [8, 200])
def test_op_parity_and_gradient(K, N, rows):
    sizes = [rows, 0, 8, 0]
    x, w, x32, w32 = operands(sizes, rows + 16, K, N)
    d = np.random.default_rng(1).normal(size=(rows + 16, N)).astype(np.float32)
    op = lambda x: grouped_matmul(x, w, jnp.asarray(sizes), align=8, implementation="pallas_gpu")
    out, vjp = jax.vjp(op, x)
    want, d_x, _ = by_hand(x32, w32, d, sizes)
    assert_close(out, want, 3e-3)
    wide = grouped_matmul(x, w, jnp.asarray(sizes), align=8, dtype=jnp.float32, implementation="pallas_gpu")
    assert_close(wide, want, 1e-5)
    assert_close(vjp(jnp.asarray(d, jnp.bfloat16))[0], d_x, 1e-2)


@pytest.mark.aot
@pytest.mark.parametrize("M, G, D, F", [(8192, 896, 3584, 3072), (256, 16, 64, 192), (32768, 56, 3584, 3072)])
def test_compiles_for_h200(h200, M, G, D, F):  # noqa: F811
    where = jax.sharding.NamedSharding(h200, jax.P())
    shape = lambda dtype, *dims: jax.ShapeDtypeStruct(dims, dtype, sharding=where)
    packed = lambda K, N: Packed(shape(jnp.uint8, G, N, K // 2), shape(jnp.uint8, G, K // 32, N))
    op = functools.partial(expert_ffn, align=8, implementation="pallas_gpu")
    x, p, s = shape(jnp.bfloat16, M, D), shape(jnp.float32, M), shape(jnp.int32, G)
    jax.jit(op).lower(x, p, s, packed(D, F), packed(D, F), packed(F, D)).compile()
    wide = functools.partial(grouped_matmul, align=8, dtype=jnp.float32, implementation="pallas_gpu")
    jax.jit(wide).lower(x, packed(D, F), s).compile()

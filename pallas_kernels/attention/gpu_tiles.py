"""Attention on Hopper: what the forward and the backward kernels share.

Blocks of queries meet blocks of keys. Of the key blocks that a query block can see, few are cut by the causal diagonal
or by a document boundary; the rest need no mask. `query_spans` and `key_spans` find both before a kernel starts, from
positions and from the smallest and largest document id of every block, so that the kernels skip whole blocks and mask
only where a mask is needed. Which blocks are visited first does not matter: those with a mask are.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32
TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)  # a vector over the rows of a tile
COL = plgpu.Layout.WGMMA.reduce(0)  # a vector over its columns

BLOCK = 128  # sequences are padded to a multiple of it
ROWS = 64  # rows of a tile: one warpgroup's share of a product
CONSUMERS = 2  # warpgroups that compute; one more feeds them
FAR = -1e30  # the logit of what is masked: finite, so that differences of two are
L2_BYTES = 32 << 20  # of keys and values that concurrent thread blocks should share

# Layouts are all given, so none are inferred: inference takes minutes for kernels of this size.
COMPILER_PARAMS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
)


def operand(*shape: int):
    """Shared memory that the tensor cores read, in tiles of 8 rows. Both operands of a product need the same tiles."""
    columns = 64 if shape[-1] % 64 == 0 else 32
    tiles = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns))
    return plgpu.SMEM(shape, bf16, transforms=tiles)


def transposed(ref):
    return ref.transpose((1, 0))


def full(shape, value, layout) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, f32), layout)


def products(shape: tuple[int, int], *pairs) -> list[Array]:
    """a @ b of every pair, in float32 registers; all in flight together."""

    def body(*accs):
        for acc, (a, b) in zip(accs, pairs):
            plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)
        return [acc[...] for acc in accs]

    return pl.run_scoped(body, *[plgpu.ACC(shape, f32)] * len(pairs))


def along_rows(x: Array, shape) -> Array:
    """The row vector x, over columns, repeated for every row."""
    return lax.broadcast_in_dim(x, shape, [1])


def along_columns(x: Array, shape) -> Array:
    return lax.broadcast_in_dim(x, shape, [0])


def index(axis: int, shape) -> Array:
    return plgpu.broadcasted_iota(i32, shape, axis, layout=TILE)


def positions(n: int) -> Array:
    """0 to n - 1, over the rows of a tile."""
    return plgpu.broadcasted_iota(i32, (n,), 0, layout=ROW)


def remainder(i, n: int):
    return lax.rem(i, i32(n))


def quotient(i, n: int):
    return lax.div(i, i32(n))


# --- which blocks meet


def _meetings(ids_Nt, start_N, ids_BT, queries: int, keys: int):
    """[N, query blocks, key blocks]: whether any pair of a block's tokens may be visible, and whether all are."""
    N, t = ids_Nt.shape
    first = start_N[:, None] + jnp.arange(0, t, queries)
    key = jnp.arange(0, ids_BT.shape[1], keys)
    blocks = lambda ids, n: ids.reshape(ids.shape[0], -1, n)
    ends = lambda ids, n: (blocks(ids, n).min(-1), blocks(ids, n).max(-1))
    q_low, q_high = (x[:, :, None] for x in ends(ids_Nt, queries))
    k_low, k_high = (jnp.tile(x, (N // x.shape[0], 1))[:, None] for x in ends(ids_BT, keys))
    some = (key <= first[..., None] + queries - 1) & (k_low <= q_high) & (q_low <= k_high)
    one_document = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    return some, (key + keys - 1 <= first[..., None]) & one_document


def _spans(some, full, axis: int) -> Int[Array, "N blocks 4"]:
    n = some.shape[axis]
    at = lax.broadcasted_iota(i32, some.shape, axis)
    low = jnp.where(some, at, n).min(axis)
    high = jnp.where(some, at + 1, 0).max(axis)
    low = jnp.minimum(low, high)
    first = jnp.minimum(jnp.where(full, at, n).min(axis), high)
    gap = ~full & (at > jnp.expand_dims(first, axis))
    last = jnp.minimum(jnp.where(gap, at, n).min(axis), high)
    return jnp.stack([low, first, last, high], axis=-1)


def query_spans(ids_Nt, start_N, ids_BT, queries: int, keys: int) -> Int[Array, "N query_blocks 4"]:
    """Key blocks a query block visits, [0] to [3], of which [1] to [2] need no mask. Rows n read keys of row n % B."""
    return _spans(*_meetings(ids_Nt, start_N, ids_BT, queries, keys), axis=2)


def key_spans(ids_Nt, start_N, ids_BT, queries: int, keys: int) -> Int[Array, "N key_blocks 4"]:
    """Query blocks of row n that a key block visits, [0] to [3], of which [1] to [2] need no mask."""
    return _spans(*_meetings(ids_Nt, start_N, ids_BT, queries, keys), axis=1)


class Visits:
    """The blocks to visit, in order: those that need a mask, then the others.

    Args:
      spans: for every run of queries the four numbers above, as scalars.
    """

    def __init__(self, *spans):
        masked, plain = [], []
        for run, (low, first, last, high) in enumerate(spans):
            masked += [(first - low, low, run), (high - last, last, run)]
            plain += [(last - first, first, run)]
        self.pieces = masked + plain
        self.masked = sum((n for n, _, _ in masked), i32(0))
        self.total = sum((n for n, _, _ in plain), self.masked)

    def __getitem__(self, i):
        """(block, run) of visit i."""
        (_, block, run), *others = self.pieces
        block, run, passed = block + i, i32(run), i32(0)
        for (count, _, _), (_, start, other) in zip(self.pieces, others):
            passed = passed + count
            block = jnp.where(i >= passed, start + i - passed, block)
            run = jnp.where(i >= passed, i32(other), run)
        return block, run


def rows_sharing(rows: int, bytes_each: int) -> int:
    """How many (sequence, head) rows run side by side: the largest divisor of `rows` that leaves their keys in L2."""
    limit = max(1, L2_BYTES // bytes_each)
    return max(n for n in range(1, min(rows, limit) + 1) if rows % n == 0)

"""Tile sizes of the grouped matmul kernels, by device kind and shape.

Made by `python -m benchmarks.moe --tune`, which prints lines for the tables below.
"""

from __future__ import annotations

from pallas_kernels.grouped_matmul.gpu_kernel import Tiles
from pallas_kernels.grouped_matmul.gpu_narrow import NarrowTiles
from pallas_kernels.grouped_matmul.gpu_packed import PackedTiles

# rows, transposed: products over rows; groups: over the rows of each group; gated: two products over rows at once.
_GPU_DEFAULT = {
    "rows": Tiles(m=64, n=128, consumers=3),
    "transposed": Tiles(m=64, n=128, consumers=3),
    "groups": Tiles(m=64, n=256, cluster=2, panel=2),
    "gated": Tiles(m=64, n=128, cluster=2, panel=2),
}
# Of groups of few rows: a tile that holds them all reads the group's matrix once, and rows come in steps of 32. Two
# products at once leave no registers for that; their tiles of one group stay together.
_FEW_ROWS = 192
_GPU_FEW_ROWS = {
    "rows": NarrowTiles(m=64, n=192),
    "transposed": NarrowTiles(m=64, n=192),
    "gated": Tiles(m=64, n=128, light_last=False),
}

# (device kind, product, columns of the result, rows of a group on average up to) -> sizes
_GPU_TUNED: dict[tuple[str, str, int, int], Tiles] = {
    ("NVIDIA H200", "rows", 3584, 147): NarrowTiles(m=64, n=256),
    ("NVIDIA H200", "transposed", 3584, 586): NarrowTiles(m=64, n=192),
    ("NVIDIA H200", "groups", 6144, 147): Tiles(m=128, n=128),
}


def gpu_tiles(kind: str, product: str, M: int, G: int, K: int, N: int, narrow: bool = True) -> Tiles:
    """The tiles for G groups of M rows in all and results of N columns, [K, N] a group for "groups".

    Tuned for the shape, or else the default; smaller ones where those do not divide it. narrow: whether they may be
    `NarrowTiles`, whose results are bfloat16.

    Raises:
      NotImplementedError: the shape does not divide into tiles of 64.
    """
    if N % 64 or K % 64:
        raise NotImplementedError(f"K={K}, N={N}; multiples of 64 are supported")
    tuned = [key for key, tiles in _GPU_TUNED.items() if key[:3] == (kind, product, N) and M <= G * key[3]
             and (narrow or not isinstance(tiles, NarrowTiles))]
    if tuned:
        tiles = _GPU_TUNED[min(tuned, key=lambda key: key[3])]
    else:
        few = narrow and product in _GPU_FEW_ROWS and M <= G * _FEW_ROWS
        tiles = (_GPU_FEW_ROWS if few else _GPU_DEFAULT)[product]
    if N % tiles.width == 0 and (product != "groups" or K % tiles.block == 0):
        return tiles
    n = next(n for n in (256, 128, 64) if n <= tiles.n and N % n == 0)
    if product != "groups" or K % 128 == 0:
        return Tiles(m=64, n=n)
    return Tiles(m=64, n=min(n, 128), consumers=1, streams=2)


# Rows of each group, padding included, up to which a matrix is unpacked again for every 8 of them. The tiles for more
# rows are written (`gpu_packed`) and right on a card, but have not been timed.
_PACKED_ROWS = 32


def packed_tiles(M: int, G: int, K: int, N: int) -> PackedTiles | None:
    """Sizes for G MXFP4 matrices [K, N], multiples of 64, and M rows in all; None where they are better unpacked first,
    into bfloat16 matrices of all groups."""
    if M > _PACKED_ROWS * G:
        return None
    steps = next(s for s in (4, 2, 1) if K % (64 * s) == 0)
    return PackedTiles(8, steps, consumers=2 if N % 128 == 0 else 1)

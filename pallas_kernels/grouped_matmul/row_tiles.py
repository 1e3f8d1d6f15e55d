"""The work list of a product over rows of groups on a GPU: which tile of the result comes when."""

import jax.numpy as jnp

from pallas_kernels.grouped_matmul.gpu_kernel import ROWS


def row_tiles(group_sizes_G, M: int, columns: int, tiles, workers: int):
    """The tiles of a product over rows: (count, [T, 4] of group, first row, rows, column block).

    Row blocks start where their group does; the rows after the last group are a group of their own, number G. Within a
    group a panel of row blocks passes all columns before the next panel: what a wave of tiles reads stays in L2. Worker
    w of `workers` gets tiles w, w + workers, ... of the result: in that order, or with `light_last` nearly so: then the
    tiles of at most half the rows, which take half the time, come last, and each worker gets its share of them.

    Args:
      tiles: `Tiles` or `PackedTiles`: `block`, `panel` and `light_last` of them.
    """
    G = group_sizes_G.shape[0]
    ends = jnp.cumsum(group_sizes_G)
    sizes = jnp.append(group_sizes_G, M - ends[-1]).astype(jnp.int32)
    starts = jnp.append(0, ends).astype(jnp.int32)
    blocks = -(-sizes // tiles.block)
    block_ends = jnp.cumsum(blocks)
    empty = jnp.arange(G + 1) == G  # without matrix: all its tiles are light
    short = (sizes - (blocks - 1) * tiles.block <= tiles.block // 2) & (blocks > 0)  # its last block is
    lights = jnp.where(empty, blocks, short) * columns
    light_ends = jnp.cumsum(lights)

    t = jnp.arange((M // tiles.block + min(G + 1, M // ROWS)) * columns, dtype=jnp.int32)
    count = block_ends[-1:] * columns
    # comparing with all ends is one fused kernel on a GPU, a binary search is ten
    group = jnp.minimum(jnp.searchsorted(block_ends, t // columns, side="right", method="compare_all"), G)
    per_group = jnp.stack([block_ends - blocks, blocks, starts, sizes, empty, short, light_ends - lights], 1)[group]
    first, n_blocks, start, size, empty, short, lights_before = (per_group[:, i] for i in range(7))
    place = t - first * columns
    panel = place // (tiles.panel * columns)
    height = jnp.clip(n_blocks - panel * tiles.panel, 1, tiles.panel)
    in_panel = place - panel * tiles.panel * columns
    row = (panel * tiles.panel + in_panel % height) * tiles.block
    table = jnp.stack([group, start + row, jnp.minimum(size - row, tiles.block), in_panel // height], 1)

    if not tiles.light_last:
        return count.astype(jnp.int32), table.astype(jnp.int32)

    # Heavy tiles are dealt first, in order, then the light ones from where that ended; each worker's are then in order.
    in_last = (short > 0) & (panel == (n_blocks - 1) // tiles.panel)
    light = (empty > 0) | (in_last & (in_panel % height == height - 1))
    lights_before += jnp.where(empty > 0, place, jnp.where(in_last, in_panel // height, 0))
    heavy_before, heavies = t - lights_before, count - light_ends[-1]
    worker = jnp.where(light, heavies + lights_before, heavy_before) % workers
    dealt = lambda n: (n - worker + workers - 1) // workers  # to this worker, of the first n
    wave = dealt(heavy_before) + dealt(heavies + lights_before) - dealt(heavies)
    table = jnp.zeros_like(table).at[wave * workers + worker].set(table, mode="drop", unique_indices=True)
    return count.astype(jnp.int32), table.astype(jnp.int32)

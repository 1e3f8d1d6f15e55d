"""Attention on any backend: short rows by the definition, longer ones in tiles of scores."""

from pallas_kernels.attention import reference, tiles

TILE = 512  # queries, and keys, whose scores are alive at once


def attention(q_BTHK, k_BTHK, v_BTHV, scale, segment_ids):
    if q_BTHK.shape[1] <= TILE:
        return reference.attention(q_BTHK, k_BTHK, v_BTHV, scale, segment_ids)
    return tiles.attention(q_BTHK, k_BTHK, v_BTHV, scale, segment_ids, size=TILE)

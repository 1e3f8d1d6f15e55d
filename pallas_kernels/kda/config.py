"""Chunk and tile sizes of the chunked KDA forms, by device kind and head size."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """How a sequence is cut.

    Attributes:
      chunk: C, tokens between two stored states. The work inside a chunk grows with C, the number of serial steps and
        the bytes of stored states with 1/C.
      tile: R, rows that share one reference point for their decays. With gates down to g_min a tile spans
        (R - 1) * -g_min nats, which the exponent range of float32 and bfloat16 (87 nats) must hold.
    """

    chunk: int = 64
    tile: int = 16

    def __post_init__(self):
        for field, size in (("tile", self.tile), ("chunk", self.chunk)):
            if size < 1 or size & (size - 1):
                raise ValueError(
                    f"ChunkConfig.{field}={size} is not a power of two; use 16 for tile, 64 for chunk"
                )
        if self.chunk < self.tile:
            raise ValueError(
                f"ChunkConfig.chunk={self.chunk} is smaller than tile={self.tile}; make it a multiple"
            )


_DEFAULT = ChunkConfig()

# (device kind, K, V) -> sizes; None stands for any head size. Device kinds are `jax.Device.device_kind`.
_TUNED: dict[tuple[str, int | None, int | None], ChunkConfig] = {
    ("cpu", None, None): ChunkConfig(chunk=32, tile=16),
}


def chunk_config(device_kind: str, K: int, V: int) -> ChunkConfig:
    """The sizes for heads of K x V on a device kind: tuned for both, tuned for the device, or the default."""
    for key in ((device_kind, K, V), (device_kind, None, None)):
        if key in _TUNED:
            return _TUNED[key]
    return _DEFAULT

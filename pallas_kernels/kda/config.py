"""Sizes that the KDA implementations cut their work into, by device kind and head size.

The tables are made by `python -m benchmarks.kda --tune`, which prints their lines. Nothing is tuned at run time.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """How `xla` cuts a sequence.

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


@dataclasses.dataclass(frozen=True)
class GPUConfig:
    """How `pallas_gpu` cuts a sequence; chunks of 64 and tiles of 32 are what its kernels are written for.

    Attributes:
      workspace: tokens x heads of a span, at 2.4 KB each. Longer calls go through in spans.
    """

    workspace: int = 1 << 22


@dataclasses.dataclass(frozen=True)
class TPUConfig:
    """How `pallas_tpu` cuts its heads; chunks of 64 and tiles of 16 are what its kernels are written for.

    Attributes:
      heads: of a program, at most; what VMEM holds, and the matrix unit can work on in turn.
    """

    heads: int = 8


# (device kind, K, V) -> sizes; None stands for any head size. Device kinds are `jax.Device.device_kind`.
_XLA: dict[tuple[str, int | None, int | None], ChunkConfig] = {
    ("cpu", None, None): ChunkConfig(chunk=32, tile=16),
    ("cpu", 32, 32): ChunkConfig(chunk=32, tile=16),
    ("cpu", 64, 64): ChunkConfig(chunk=64, tile=16),
    ("cpu", 128, 128): ChunkConfig(chunk=64, tile=16),
}
_GPU: dict[tuple[str, int | None, int | None], GPUConfig] = {}
_TPU: dict[tuple[str, int | None, int | None], TPUConfig] = {}


def chunk_config(device_kind: str, K: int, V: int) -> ChunkConfig:
    """The sizes for heads of K x V on a device kind: tuned for both, tuned for the device, or the default."""
    return _tuned(_XLA, device_kind, K, V, ChunkConfig())


def gpu_config(device_kind: str, K: int, V: int) -> GPUConfig:
    return _tuned(_GPU, device_kind, K, V, GPUConfig())


def tpu_config(device_kind: str, K: int, V: int) -> TPUConfig:
    return _tuned(_TPU, device_kind, K, V, TPUConfig())


def _tuned(table, device_kind, K, V, default):
    return table.get((device_kind, K, V), table.get((device_kind, None, None), default))

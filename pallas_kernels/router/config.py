"""How the router kernels cut their work, by device kind."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class GPUConfig:
    """Of the Hopper kernels.

    Attributes:
      blocks: of the selection, at most: as many as the chip holds at the same time.
      select_warpgroups: of such a block; each of its warps takes one token after another. More of them leave a thread
        fewer registers, 65536 / (128 * select_warpgroups).
      experts: experts whose histograms a block holds in shared memory; their scores of a token are neighbours.
      parts: blocks that share the tokens of such experts; their counts are added up afterwards.
      warpgroups: of such a block.
      unroll: tokens a lane of it has in flight.
    """

    blocks: int = 132
    select_warpgroups: int = 6
    experts: int = 16
    parts: int = 2
    warpgroups: int = 8
    unroll: int = 8


@dataclasses.dataclass(frozen=True)
class TPUConfig:
    """Tokens per block of the two TPU kernels."""

    select: int = 256
    histogram: int = 512


_GPU: dict[str, GPUConfig] = {}
_TPU: dict[str, TPUConfig] = {}


def gpu_config(device_kind: str) -> GPUConfig:
    return _GPU.get(device_kind, GPUConfig())


def tpu_config(device_kind: str) -> TPUConfig:
    return _TPU.get(device_kind, TPUConfig())

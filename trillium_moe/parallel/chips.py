"""Chips that a program can be compiled for without having one, and what they can do.

Figures are the vendors' public ones, per JAX device: a TPU7x chip is two devices.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from trillium_moe.config import ConfigError, check_choice


@dataclass(frozen=True)
class Chip:
    """One device."""

    hbm: float  # bytes
    flops: float  # dense bfloat16, a second
    hbm_rate: float  # bytes a second
    link_rate: float  # bytes a second that it can send to its slice (ICI, NVLink), all links together
    outside_rate: float  # bytes a second that it can send out of its slice (data-centre network)


CHIPS = {
    "v5e": Chip(16e9, 197e12, 819e9, 200e9, 6.25e9),
    "v5p": Chip(95e9, 459e12, 2765e9, 600e9, 6.25e9),
    "v6e": Chip(32e9, 918e12, 1640e9, 448e9, 12.5e9),
    "tpu7x": Chip(96e9, 1153e12, 3690e9, 600e9, 12.5e9),
    "h200": Chip(141e9, 989e12, 4800e9, 450e9, 50e9),
}
EXAMPLES = "v5e:16x16, v5p:8x16x16, v6e:16x16, tpu7x:4x4x4, h200:8"

# XLA's description of the GPU it compiles for
H200 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000
l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200" """


def prepare_environment() -> None:
    """Lets JAX compile for absent chips. Call it before JAX is imported."""
    for name, value in {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # or a second process that compiles at the same time dies
    }.items():
        os.environ.setdefault(name, value)


def topology_devices(topology: str, num_slices: int = 1) -> tuple[list, Chip]:
    """Devices of `topology`, none of which need exist, and what one can do.

    Args:
      topology: chip and shape of one slice (v5p:8x16x16), or chip and count (h200:8; 8 GPUs a host).
      num_slices: slices joined by the data-centre network.

    Raises:
      ConfigError: for a name that the compiler does not know, or without the compiler.
    """
    from jax.experimental import topologies

    name, _, shape = topology.partition(":")
    check_choice("topology", name, tuple(CHIPS))
    parts = shape.split("x")
    if not shape or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"config topology={topology!r}: write chip:shape, such as {EXAMPLES}")
    try:
        if name == "h200":
            gpus = math.prod(map(int, parts))
            hosts = -(-gpus // 8)
            described = topologies.get_topology_desc("", "cuda", target_config=H200,
                                                     topology=f"{num_slices}x{hosts}x{gpus // hosts}")
        else:
            more = {"num_slices": num_slices} if num_slices > 1 else {}
            if math.prod(map(int, parts)) == 1:
                more["chips_per_host_bounds"] = (1, 1, 1)
            described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **more)
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"config topology={topology!r} num_slices={num_slices}: no compiler takes it ({reason}); "
                          f"names are such as {EXAMPLES}; the compilers come with the extra: make setup EXTRAS=aot"
                          ) from error
    return list(described.devices), CHIPS[name]

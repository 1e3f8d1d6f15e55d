"""The device mesh: five named axes, laid out so that the chattiest are neighbours.

    replica   copies of the whole state; only gradients cross it, once a step: the network between slices
    data      FSDP: weights are gathered over it layer by layer, gradients scattered back
    context   the sequence
    expert    routed experts; outside them one more data axis
    model     heads, FFN widths, vocabulary: activations cross it in every layer

All axes are of type Auto: XLA's partitioner places the collectives that plain operations need, and whatever must be
exact about them is written in `jax.shard_map`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from trillium_moe.config import Config, ConfigError, MeshConfig

AXES = ("replica", "data", "context", "expert", "model")
# cut the rows of a batch, major first: outside the exchange of tokens the expert axis is one more data axis
BATCH = ("replica", "data", "expert")


def mesh_shape(config: MeshConfig, n_devices: int) -> tuple[int, ...]:
    """Sizes of `AXES` on that many devices.

    Raises:
      ConfigError: if they do not multiply to n_devices, with sizes that do.
    """
    sizes = [getattr(config, name) for name in AXES]
    fixed = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and n_devices % fixed == 0:
        return tuple(n_devices // fixed if size == -1 else size for size in sizes)
    if fixed == n_devices and -1 not in sizes:
        return tuple(sizes)
    shown = " x ".join(f"mesh.{name}={size}" for name, size in zip(AXES, sizes) if size != 1) or "mesh of 1 device"
    for name, size in zip(AXES, sizes):
        rest = math.prod(s for n, s in zip(AXES, sizes) if n != name and s != -1)
        if size not in (1, -1) and n_devices % rest == 0:
            works = nearest_divisors(n_devices // rest, size) if -1 in sizes else [n_devices // rest]
            mend = f"mesh.{name}={' or '.join(map(str, works))}, or mesh.data=-1 with sizes that divide {n_devices}"
            break
    else:
        mend = f"sizes whose product divides {n_devices}, with mesh.data=-1"
    raise ConfigError(f"config {shown}: does not fill the {n_devices} devices; give {mend}")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of `AXES` over the devices (all of them by default).

    Slices of a multi-slice system are split over `replica` first, then over `data`: no other axis crosses the network
    between them.

    Raises:
      ConfigError: for sizes that do not fit the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = mesh_shape(config, len(devices))
    slices = len({getattr(d, "slice_index", 0) for d in devices})
    if slices > 1:
        replica = math.gcd(shape[0], slices)
        outer = (replica, slices // replica, 1, 1, 1)
        if shape[1] % outer[1]:
            raise ConfigError(f"config mesh.replica={shape[0]} x mesh.data={shape[1]}: {slices} slices must be split "
                              f"over these two axes alone; give mesh.replica={slices}")
        inner = tuple(a // b for a, b in zip(shape, outer))
        grid = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    elif devices[0].platform == "tpu":
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_mesh(config: Config, sizes: dict[str, int]) -> None:
    """Raises ConfigError for the first dimension of the run that its mesh axis must divide and does not."""
    model = config.model
    rows = math.prod(sizes[axis] for axis in BATCH)
    parts = config.train.micro_batches
    per_part = config.data.batch_size // parts
    if per_part % rows:
        named = " x ".join(f"mesh.{axis}" for axis in BATCH)
        what = "data.batch_size" if parts == 1 else f"data.batch_size/{parts} micro-batches"
        near = [n * parts for n in nearest_multiples(per_part, rows)]
        raise ConfigError(f"config data.batch_size={config.data.batch_size}: {named}={rows} must divide {what}="
                          f"{per_part}; nearest data.batch_size that works: {' or '.join(map(str, near))}; nearest "
                          f"product of the axes: {' or '.join(map(str, nearest_divisors(per_part, rows)))}")
    must = [("context", "data.seq_len", config.data.seq_len)]
    if model.vision.n_layers:
        must.append(("context", "images.patches/4", config.images.patches // 4))
    if "moe" in model.ffns:
        must.append(("expert", "model.moe.n_experts", model.moe.n_experts))
    must += [("model", f"model.{kind}.n_heads", getattr(model, kind).n_heads) for kind in sorted(set(model.mixers))]
    must += [("model", "model.vocab_size", model.vocab_size)]
    if "dense" in model.ffns:
        must.append(("model", "model.ffn_dim", model.ffn_dim))
    if "moe" in model.ffns:
        must.append(("model", "model.moe.expert_dim", model.moe.expert_dim))
    for axis, key, size in must:
        if size % sizes[axis]:
            multiples, divisors = nearest_multiples(size, sizes[axis]), nearest_divisors(size, sizes[axis])
            raise ConfigError(f"config mesh.{axis}={sizes[axis]}: must divide {key}={size}; nearest mesh.{axis} that "
                              f"works: {' or '.join(map(str, divisors))}; nearest {key}: "
                              f"{' or '.join(map(str, multiples))}")


def nearest_divisors(n: int, near: int) -> list[int]:
    """The divisors of n next below and next above `near` (itself if it is one)."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    below, above = max(d for d in divisors if d <= max(near, 1)), min((d for d in divisors if d >= near), default=n)
    return sorted({below, above})


def nearest_multiples(n: int, of: int) -> list[int]:
    """The positive multiples of `of` next below and next above n."""
    return sorted({max(of, n // of * of), -(-n // of) * of})

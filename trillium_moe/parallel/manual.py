"""Where a layer leaves automatic partitioning: functions of one device's shard, and how arrays are cut for them.

Mesh axes: replica, data, context, expert, model. Activations [B, T, ..] have rows over (replica, data, expert), time
over context, heads over model. Layers find the mesh by `jax.sharding.get_abstract_mesh` (`jax.set_mesh`); without one,
or with one device, or inside a shard, `layout` is None and every layer computes as if there were no mesh at all.

Automatic partitioning cannot see inside a kernel and gathers what is sorted or scattered, so kernels and routing always
run on shards; everything else (projections, norms, depth attention, the loss) is left to it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from trillium_moe.parallel.mesh import BATCH


@dataclasses.dataclass(frozen=True)
class Layout:
    """How [B, T] tokens are cut over a mesh of several devices."""

    mesh: AbstractMesh
    batch: tuple[str, ...]  # axes that split rows
    context: str | None  # the axis that splits time

    def size(self, axis: str) -> int:
        return self.mesh.shape.get(axis, 1)

    @property
    def platform(self) -> str:
        """cpu, gpu or tpu: of the mesh, which may be compiled for from elsewhere."""
        device = self.mesh.abstract_device
        platform = device.platform if device else jax.default_backend()
        return "gpu" if platform in ("cuda", "rocm") else platform

    def divides(self, axis: str, n: int) -> str | None:
        """`axis` if it has several devices and they share n equally, else None: every device holds all n."""
        return axis if self.size(axis) > 1 and n % self.size(axis) == 0 else None

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes whose devices hold different tokens."""
        return self.batch + ((self.context,) if self.context else ())

    def tokens(self, *rest: str | None) -> PartitionSpec:
        """Spec of [B, T, *rest]."""
        return PartitionSpec(self.batch or None, self.context, *rest)

    def rows(self, *rest: str | None) -> PartitionSpec:
        """Spec of [B, *rest]."""
        return PartitionSpec(self.batch or None, *rest)

    def shard(self, f: Callable, in_specs, out_specs) -> Callable:
        """f on every device's shard. A result the spec does not split must be equal on those devices."""
        # check_vma would ask every loop carry inside the kernels to name the axes it varies over
        return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def layout(B: int, T: int = 0) -> Layout | None:
    """The cut of [B, T] tokens under the current mesh, or None where there is nothing to cut. T = 0: of rows alone.

    Rows that an axis does not divide (generation from one prompt, say) are held by all of its devices.

    Raises:
      ValueError: the context axis does not divide T.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.manual_axes:
        return None
    batch: tuple[str, ...] = ()
    for axis in BATCH:
        if mesh.shape.get(axis, 1) > 1 and B % math.prod(mesh.shape[a] for a in (*batch, axis)) == 0:
            batch = (*batch, axis)
    size = mesh.shape.get("context", 1)
    if T % size:
        near = T // size * size
        raise ValueError(
            f"sequence length {T} does not divide over mesh.context={size}; use {near or size} or {near + size} tokens"
        )
    return Layout(mesh, batch, "context" if size > 1 else None)

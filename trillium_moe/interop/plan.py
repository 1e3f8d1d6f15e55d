"""What an import would load where, from config.json and the headers of the files alone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import jax.numpy as jnp

from trillium_moe.config import ConfigError, DtypeConfig, MeshConfig, ModelConfig
from trillium_moe.interop import hf, layout
from trillium_moe.parallel.mesh import AXES, mesh_shape
from trillium_moe.parallel.sharding import stored_spec

GROUPS = {"kda": "KDA", "mla": "MLA", "dense": "dense FFN", "moe": "mixture", "embed": "embedding", "head": "head",
          "vision": "vision tower and projector"}


@dataclass
class Row:
    """One part of the model."""

    tensors: int = 0  # stored
    stored: int = 0  # bytes
    parameters: int = 0
    device: int = 0  # bytes on each device


@dataclass
class Plan:
    """Rows by part of the model and by file, and what a mesh of devices would hold."""

    config: ModelConfig
    naming: str
    mesh: dict[str, int]
    rows: dict[str, Row] = field(default_factory=dict)
    files: dict[str, tuple[int, int, list[str]]] = field(default_factory=dict)  # tensors, bytes, parts

    @property
    def total(self) -> Row:
        rows = self.rows.values()
        return Row(*(sum(getattr(r, n) for r in rows) for n in ("tensors", "stored", "parameters", "device")))


def plan(directory: str | Path, dtypes: DtypeConfig, mesh: MeshConfig, devices: int, experts_format: str) -> Plan:
    """The plan of an import; nothing but headers is read.

    Raises:
      ConfigError: as `hf.load`, and for a mesh that does not fill the devices or does not divide the model.
    """
    config, naming, sources = hf.open_checkpoint(directory, dtypes, experts_format)
    sizes = dict(zip(AXES, mesh_shape(mesh, devices)))
    out = Plan(config, naming, sizes)
    exact = {part.path for s in sources if s.stored.dtype == "F32" for part in s.stored.parts}
    for path, p in layout.parameters(config).items():
        dtype = jnp.promote_types(p.dtype, jnp.float32) if path in exact else jnp.dtype(p.dtype)
        cut = [()] * len(p.shape) if p.bias else stored_spec(p.axes, p.shape, sizes)
        parts = [math.prod(sizes[axis] for axis in dim) for dim in cut]
        for axis, size, n in zip(p.axes, p.shape, parts):
            if size % n:
                raise ConfigError(f"config mesh: {n} devices do not divide {'.'.join(path)} axis {axis}={size}")
        row = out.rows.setdefault(_group(path), Row())
        row.parameters += math.prod(p.shape) * (2 if path[-1].endswith("_codes") else 0 if "_scales" in path[-1] else 1)
        row.device += math.prod(p.shape) // math.prod(parts) * dtype.itemsize
    by_file: dict[str, tuple[int, int, Counter]] = {}
    for stored, entry in sources:
        group = _group(stored.parts[0].path)
        entries = entry if isinstance(entry, hf.Packed) else [entry]
        row = out.rows[group]
        for e in entries:
            row.tensors, row.stored = row.tensors + 1, row.stored + e.nbytes
            n, nbytes, groups = by_file.get(e.file.name, (0, 0, Counter()))
            by_file[e.file.name] = n + 1, nbytes + e.nbytes, groups + Counter([group])
    out.files = {name: (n, nbytes, sorted(groups)) for name, (n, nbytes, groups) in sorted(by_file.items())}
    return out


def _group(path: tuple[str, ...]) -> str:
    if path[0] == "moe":
        return "routed experts" if path[1].startswith("w_") else "router, shared experts, latents"
    return GROUPS.get(path[0], "norms and depth reads")

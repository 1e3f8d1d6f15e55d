"""Released Hugging Face checkpoints of the family as a config and a model, and back (model.md 1, 8).

`load` checks all headers against the config first: missing, unexpected, of a wrong shape or dtype are listed together
and nothing is read. Then tensors are read one at a time, in the order of the files, and each goes straight to its place
in the sharded parameters on the devices, where it is cast and transposed. The host holds one tensor.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from pallas_kernels.mxfp4 import GROUP, unpack
from trillium_moe.config import ConfigError, DtypeConfig, ModelConfig
from trillium_moe.interop import configs, layout
from trillium_moe.interop.layout import Parameter, Part, Stored
from trillium_moe.interop.safetensors import Entry, read_directory, shorten
from trillium_moe.model.trillium import Trillium
from trillium_moe.parallel.sharding import param_spec
from trillium_moe.train.state import model_def

read_config = configs.read_config
SMALL = 1 << 20  # bytes of a buffer that is filled on the host: many small pieces cost more calls than bytes
FLOATS = ("BF16", "F32", "F64")
EXPERTS = tuple(("moe", name) for name in ("w_gate", "w_up", "w_down"))
MANY = 100_000  # problems after which no more are looked for: config.json describes another model
OTHERS = ("vision_tower.", "mm_projector.")  # left unread where config.json has no vision_config


class Packed(NamedTuple):
    """An MXFP4 matrix [out, in] in its two stored tensors."""

    codes: Entry
    scales: Entry

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], 2 * self.codes.shape[1]


class Source(NamedTuple):
    """A tensor of the table and what stores it."""

    stored: Stored
    entry: Entry | Packed

    @property
    def order(self) -> tuple[Path, int]:
        first = self.entry.codes if isinstance(self.entry, Packed) else self.entry
        return first.file, first.start


def match(config: ModelConfig, found: dict[str, Entry], where: Path) -> tuple[str, list[Source]]:
    """The naming of a checkpoint and all its tensors, each matched with the table, in the order of the files.

    Raises:
      ConfigError: a list of all tensors that are missing, unexpected, or of a wrong shape or dtype.
    """
    naming = layout.naming_of(found)
    left, sources, problems = dict(found), [], []
    for stored in layout.tensors(config, naming):
        if len(problems) > MANY:
            break
        name = stored.name
        if stored.routed and (f"{name}_packed" in left or f"{name}_scale" in left):
            pair = [left.pop(f"{name}_{part}", None) for part in ("packed", "scale")]
            problems += [f"missing {name}_{part}" for part, x in zip(("packed", "scale"), pair) if x is None]
            if None in pair:
                continue
            out, width = stored.shapes[0]
            for part, x, shape in zip(("packed", "scale"), pair, ((out, width // 2), (out, width // GROUP))):
                if x.dtype != "U8" or x.shape != shape or width % GROUP:
                    problems.append(f"{name}_{part} is {x.dtype}{list(x.shape)}, not U8{list(shape)}")
            sources.append(Source(stored, Packed(*pair)))
            continue
        entry = left.pop(name, None)
        if entry is None:
            problems.append(f"missing {name}")
            continue
        if entry.shape not in stored.shapes:
            problems.append(f"{name} has shape {list(entry.shape)}, not {list(stored.shapes[0])}")
        elif entry.dtype not in FLOATS:
            problems.append(f"{name} is {entry.dtype}, not {stored.dtype}")
        elif config.moe.experts_format == "mxfp4" and any(p.path[:2] in EXPERTS for p in stored.parts):
            problems.append(f"{name} is {entry.dtype}, not MXFP4 (model.moe.experts_format)")
        sources.append(Source(stored, entry))
    known = () if config.vision.n_layers else OTHERS
    if len(problems) <= MANY:
        problems += [f"unexpected {name}" for name in sorted(left) if not name.startswith(known)]
    if problems:
        raise ConfigError(f"{where}: the tensors do not fit the config: {shorten(problems)}")
    return naming, sorted(sources, key=lambda s: s.order)


def open_checkpoint(
    directory: str | Path, dtypes: DtypeConfig, experts_format: str = "dense"
) -> tuple[ModelConfig, str, list[Source]]:
    """Config, naming and tensors of a checkpoint, from config.json and the headers alone; see `load`."""
    directory = Path(directory).expanduser()
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory}: no config.json; name the directory of a released checkpoint")
    config = configs.read_config(directory, dtypes)
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, experts_format=experts_format))
    return config, *match(config, read_directory(directory), directory)


def is_packed(directory: str | Path) -> bool:
    """Whether the routed experts of a checkpoint are MXFP4."""
    return any(name.endswith(".weight_packed") for name in read_directory(Path(directory).expanduser()))


def load(
    directory: str | Path, dtypes: DtypeConfig, *, mesh: Mesh | None = None, experts_format: str = "dense"
) -> tuple[ModelConfig, Trillium]:
    """Reads a checkpoint directory into a config and a model.

    Args:
      dtypes: parameters get `dtypes.param`; those stored as float32 never less than that.
      mesh: where parameters go, laid out as `parallel.sharding.param_spec` says; None: the default device. Each process
        fills its own devices.
      experts_format: mxfp4 keeps routed experts packed (the checkpoint's must be), for inference.

    Raises:
      ConfigError: unknown architecture, a damaged file, or tensors that are missing, unexpected or of a wrong shape or
        dtype, all of them listed.
    """
    config, _, sources = open_checkpoint(directory, dtypes, experts_format)
    known = layout.parameters(config)
    exact = {part.path for s in sources if s.stored.dtype == "F32" for part in s.stored.parts}
    place = {}
    for path, p in known.items():
        place[path] = Placed(p, jnp.promote_types(p.dtype, jnp.float32) if path in exact else p.dtype, mesh)
    for source in sources:
        fill(place, source)
    graphdef, params, bias = model_def(config)
    states = [nnx.map_state(lambda path, v: v.replace(place[path].done()), state) for state in (params, bias)]
    return config, nnx.merge(graphdef, *states)


def fill(place: dict[tuple, Placed], source: Source) -> None:
    """Reads one tensor and puts its parts where they belong. What belongs to other processes alone is not read."""
    stored, entry = source
    if not any(any(place[to.path].pieces(to)) for part in stored.parts for to in targets(place, part)):
        return
    if isinstance(entry, Packed):
        codes, scales = entry.codes.read(), entry.scales.read()
        for part in stored.parts:
            if part.path in place:
                place[part.path].put_packed(part, codes, scales)
            else:
                for target, x in zip(targets(place, part), (codes, scales)):
                    place[target.path].put(target._replace(view=x.shape), x)
        return
    x = entry.read()
    for part in stored.parts:
        if part.path[-1] == "a_log" and np.any(x.reshape(-1)[part.take[0].stop :]):
            heads = part.take[0].stop
            raise ConfigError(f"{entry.file}: {stored.name} has {x.size} values for {heads} heads, and the tail is not "
                              "zero; not a known layout")
        place[part.path].put(part, x)


def targets(place: dict[tuple, Placed], part: Part) -> list[Part]:
    """The part itself, or the two of a matrix that stays packed."""
    if part.path in place:
        return [part]
    path = lambda name: (*part.path[:-1], f"{part.path[-1]}_{name}")
    return [Part(path(name), part.at, (), (), perm) for name, perm in (("codes", (0, 1)), ("scales", (1, 0)))]


class Placed:
    """A parameter in the making: one buffer on each of this process's devices."""

    def __init__(self, p: Parameter, dtype: Any, mesh: Mesh | None, devices: Collection[jax.Device] | None = None):
        """devices: of those of this process the ones to fill; all by default."""
        self.shape = p.shape
        if mesh is None:
            self.sharding = SingleDeviceSharding(jax.devices()[0])
        else:
            self.sharding = NamedSharding(mesh, jax.P() if p.bias else param_spec(p.axes, p.shape, mesh))
        where = self.sharding.addressable_devices_indices_map(p.shape)
        self.where = {d: [s.indices(n)[:2] for s, n in zip(index, p.shape)] for d, index in where.items()
                      if devices is None or d in devices}
        self.buffers: dict[jax.Device, Any] = {}
        for device, spans in self.where.items():
            shape = [b - a for a, b in spans]
            small = math.prod(shape) * jnp.dtype(dtype).itemsize <= SMALL
            self.buffers[device] = np.zeros(shape, dtype) if small else jnp.zeros(shape, dtype, device=device)

    def put(self, part: Part, x: np.ndarray) -> None:
        """parameter[at] = x.reshape(view)[take].transpose(perm), on every device its part of that."""
        view = x.reshape(part.view)[part.take] if part.take else x.reshape(part.view)
        for device, at, cut in self.pieces(part):
            in_view = [slice(None)] * view.ndim
            for axis, span in zip(part.perm, cut):
                in_view[axis] = slice(*span)
            piece = view[tuple(in_view)]
            if isinstance(self.buffers[device], np.ndarray):
                self.buffers[device][at] = piece.transpose(part.perm)
                continue
            piece = jax.device_put(np.ascontiguousarray(piece), device)
            self.buffers[device] = _write(self.buffers[device], piece, at, part.perm)

    def put_packed(self, part: Part, codes: np.ndarray, scales: np.ndarray) -> None:
        """The same for an MXFP4 matrix, unpacked on the device."""
        for device, at, cut in self.pieces(part):
            columns, rows = cut  # of [out, in]: the parameter is [in, out]
            if isinstance(self.buffers[device], np.ndarray):
                values = np.asarray(_unpacked(codes, scales, self.buffers[device].dtype))
                self.buffers[device][at] = values[slice(*rows), slice(*columns)].T
                continue
            pair = [jax.device_put(np.ascontiguousarray(x[slice(*rows)]), device) for x in (codes, scales)]
            self.buffers[device] = _write_unpacked(self.buffers[device], *pair, at, columns)

    def pieces(self, part: Part) -> Iterator[tuple[jax.Device, tuple[int, ...], list[tuple[int, int]]]]:
        """Devices that hold some of parameter[at], where in their buffer, and which of its trailing axes."""
        n = len(part.at)
        for device, spans in self.where.items():
            if all(a <= i < b for i, (a, b) in zip(part.at, spans)):
                yield device, tuple(i - a for i, (a, _) in zip(part.at, spans)), spans[n:]

    def done(self) -> jax.Array:
        buffers = [x if isinstance(x, jax.Array) else jax.device_put(x, d) for d, x in self.buffers.items()]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, buffers)


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _write(buffer, piece, at, perm):
    return _put(buffer, piece.transpose(perm).astype(buffer.dtype), at)


@functools.partial(jax.jit, static_argnums=4, donate_argnums=0)
def _write_unpacked(buffer, codes, scales, at, columns):
    return _put(buffer, unpack(codes, scales, buffer.dtype)[:, slice(*columns)].T, at)


_unpacked = jax.jit(unpack, static_argnums=2)


def _put(buffer, piece, at):
    start = (*at, *[0] * piece.ndim)
    return jax.lax.dynamic_update_slice(buffer, piece.reshape(*[1] * len(at), *piece.shape), start)

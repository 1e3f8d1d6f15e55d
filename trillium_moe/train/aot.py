"""The train step compiled for chips that are not there: its memory, its traffic, and what a roofline makes of both."""

from __future__ import annotations

import math
import re
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from trillium_moe.config import Config
from trillium_moe.model.stack import Schedule
from trillium_moe.parallel import sharding
from trillium_moe.parallel.chips import Chip
from trillium_moe.parallel.hlo import Traffics, collectives
from trillium_moe.parallel.mesh import check_mesh, make_mesh
from trillium_moe.shapes import PyTree
from trillium_moe.train.flops import StepFlops, step_flops
from trillium_moe.train.state import TrainState, abstract_state
from trillium_moe.train.step import make_train_step

LINK_SHARE = 0.5  # of a chip's links that one collective drives: a mesh axis lies along some torus dimensions, not all


class HBMOverflow(RuntimeError):
    """The step does not fit into a chip. One line with the largest contributors."""


@dataclass(frozen=True)
class Compiled:
    """One compilation. Bytes are per device."""

    mesh: dict[str, int]
    parameters: int
    optimizer: int
    arguments: int
    temporaries: int
    peak: int
    code: int
    traffic: Traffics
    flops: StepFlops
    weights_read: float  # bytes of weights that a device multiplies with in one forward pass
    lower_seconds: float
    compile_seconds: float
    host_bytes: int  # peak of this process
    hlo: str

    def times(self, chip: Chip) -> dict[str, float]:
        """Seconds of one step if only this limited it, at the chip's peak rates."""
        devices = math.prod(self.mesh.values())
        inside = sum(t.bytes for (_, spans), t in self.traffic.items() if not spans)
        outside = sum(t.bytes for (_, spans), t in self.traffic.items() if spans)
        # each pass reads the weights; the optimizer reads and writes its state and parameters, and reads gradients
        moved = (self.flops.forwards + 2) * self.weights_read + 5 * (self.parameters + self.optimizer) / 2
        return {
            "compute": self.flops.executed / devices / chip.flops,
            "hbm": moved / chip.hbm_rate,
            "network": inside / (LINK_SHARE * chip.link_rate) + outside / chip.outside_rate,
        }

    def mfu(self, seconds: float, chip: Chip) -> float:
        """Share of peak FLOPs that the model's own make up in a step of that length."""
        return self.flops.model / math.prod(self.mesh.values()) / chip.flops / seconds


def shapes(config: Config, mesh: Mesh) -> tuple[TrainState, dict[str, jax.ShapeDtypeStruct]]:
    """State and batch of a run as shapes with shardings."""
    abstract = abstract_state(config)
    state = sharding.with_shardings(abstract, sharding.state_shardings(abstract, mesh))
    rows = NamedSharding(mesh, sharding.batch_spec())
    array = lambda dtype: jax.ShapeDtypeStruct((config.data.batch_size, config.data.seq_len), dtype, sharding=rows)
    batch = {name: array(jnp.int32) for name in ("tokens", "targets", "segment_ids")}
    batch["weights"] = array(jnp.float32)
    if config.model.vision.n_layers:
        room = (config.data.batch_size, config.images.patches)
        batch["features"] = array(jnp.int32)
        batch["patches"] = jax.ShapeDtypeStruct((*room, config.model.vision.pixels), jnp.uint8, sharding=rows)
        batch["place"] = jax.ShapeDtypeStruct((*room, 7), jnp.int32, sharding=rows)
    return state, batch


def compile_step(config: Config, devices: Sequence[jax.Device], chip: Chip, num_slices: int = 1) -> Compiled:
    """Compiles the train step of a run for the devices of `chips.topology_devices`.

    Raises:
      ConfigError: for a mesh that does not fit devices or model.
      HBMOverflow: if a device's memory does not hold it.
    """
    mesh = make_mesh(config.mesh, devices)
    check_mesh(config, mesh.shape)
    state, batch = shapes(config, mesh)
    held = {"parameters": shard_bytes(state.params), "optimizer state": shard_bytes(state.opt_state)}
    began = time.perf_counter()
    lowered = make_train_step(config, mesh).lower(state, batch)
    lowered_at = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise HBMOverflow(overflow_message(str(error), held)) from None
    done = time.perf_counter()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    peak = getattr(memory, "peak_memory_in_bytes", 0) or memory.argument_size_in_bytes + memory.temp_size_in_bytes
    if peak > chip.hbm:
        parts = held | {"temporaries": memory.temp_size_in_bytes}
        raise HBMOverflow(f"does not fit: {gb(peak)} of {gb(chip.hbm)} HBM a device; {largest(parts)}")
    schedule = Schedule.of(config.model)
    shares = [schedule.count(kind) / schedule.n_sublayers for kind in schedule.kinds]
    return Compiled(
        mesh=dict(mesh.shape),
        parameters=held["parameters"],
        optimizer=held["optimizer state"],
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        peak=peak,
        code=memory.generated_code_size_in_bytes,
        traffic=collectives(text, shares, len(devices) // num_slices if num_slices > 1 else 0),
        flops=step_flops(config),
        weights_read=used_bytes(config, state.params, mesh),
        lower_seconds=lowered_at - began,
        compile_seconds=done - lowered_at,
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        hlo=text,
    )


def shard_bytes(tree: PyTree) -> int:
    """Bytes that one device holds of a tree of shapes with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def used_bytes(config: Config, params: nnx.State, mesh: Mesh) -> float:
    """Bytes of weights, gathered and in the compute dtype, that one device uses in a forward pass."""
    total = 0
    for _, variable in nnx.to_flat_state(params):
        cut = sharding.tensor_spec(variable.get_metadata()["axes"], mesh.shape)
        total += math.prod(variable.shape) / math.prod(mesh.shape[name] for dim in cut for name in dim)
    return total * np.dtype(jnp.dtype(config.model.dtypes.compute)).itemsize


def overflow_message(error: str, held: dict[str, int]) -> str:
    """One line from the compiler's report: what is asked for, and the three largest parts."""
    used = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", error) or re.search(
        r"([\d.]+\w) exceeds available HBM \(?([\d.]+\w)", error)
    asked = f"{used[1]} of {used[2]} HBM a device" if used else " ".join(error.split())[:160]
    entries = re.findall(r"Size: ([\d.]+\w).*?(?:Operator: op_name=\"([^\"]*)\"|Shape: (\S+)).*?(?:Shape: (\S+))?",
                         error, re.S)
    if entries:
        named = [f"{size} {(shape2 or shape)} {op.split('/')[-1] if op else ''}".strip()
                 for size, op, shape, shape2 in entries[:3]]
        return f"does not fit: {asked}; largest: {'; '.join(named)}; held between steps: {largest(held)}"
    return f"does not fit: {asked}; {largest(held)}"


def largest(parts: dict[str, float]) -> str:
    """The three largest parts, largest first."""
    return ", ".join(f"{name} {gb(size)}" for name, size in sorted(parts.items(), key=lambda kv: -kv[1])[:3])


def gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"

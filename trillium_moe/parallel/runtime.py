"""Several processes as one program: joining, agreeing, and placing each process's part of a batch.

Every process runs the same commands. What only one may do (metrics, reports, a tokenizer) process 0 does, others wait
where they need the result. A process that dies stops answering the coordinator's heartbeats, and then every other one
is ended with a non-zero exit code: nothing waits for ever.
"""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from trillium_moe.config import ConfigError


class DistributedError(RuntimeError):
    """The processes of a run did not find one another. One line that says who waited for what."""


def is_cluster(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment makes this process one of several: SLURM, MPI, a TPU pod or JAX's own variables."""
    several = lambda name: environ.get(name, "1").isdigit() and int(environ.get(name, "1")) > 1
    if several("SLURM_STEP_NUM_TASKS") or several("OMPI_COMM_WORLD_SIZE") or "JAX_COORDINATOR_ADDRESS" in environ:
        return True
    if "MEGASCALE_COORDINATOR_ADDRESS" in environ or "," in environ.get("TPU_WORKER_HOSTNAMES", ""):
        return True
    # a Cloud TPU VM learns its slice from the metadata server, where one host is a slice as well
    on_tpu = bool(glob.glob("/dev/accel[0-9]*")) or ("TPU_NAME" in environ and bool(glob.glob("/dev/vfio/[0-9]*")))
    return on_tpu and environ.get("JAX_PLATFORMS", "tpu").startswith("tpu")


def initialize(
    coordinator: str = "",
    num_processes: int = 0,
    process_id: int = -1,
    *,
    timeout: int = 300,
    heartbeat_timeout: int = 100,
) -> None:
    """Joins the other processes. Call it before anything asks JAX for its devices.

    Args:
      coordinator: host:port of process 0; "" to take all three from the environment, where it has them, and to do
        nothing where this process is alone.
      num_processes, process_id: of the run; 0 and -1 for the environment's.
      timeout: seconds to wait for all processes.
      heartbeat_timeout: seconds without an answer after which a process counts as dead, and the run ends.

    Raises:
      ConfigError: for flags that contradict one another.
      DistributedError: if some process does not come in time.
    """
    given = bool(coordinator), num_processes > 0, process_id >= 0
    if any(given) and not all(given):
        raise ConfigError(f"config coordinator={coordinator!r} num_processes={num_processes} process_id={process_id}: "
                          "give all three, or none and let the environment (SLURM, a TPU pod) say them")
    if all(given) and process_id >= num_processes:
        raise ConfigError(f"config process_id={process_id}: must be less than num_processes={num_processes}")
    if not any(given) and not is_cluster():
        return
    who = f"process {process_id} of {num_processes} at {coordinator}" if any(given) else "this process"
    began = time.monotonic()
    try:
        if process_id > 0:
            _await(coordinator, timeout)  # JAX's client ends the process by a signal when nobody answers
        jax.distributed.initialize(
            coordinator or None, num_processes or None, process_id if process_id >= 0 else None,
            initialization_timeout=max(1, timeout - int(time.monotonic() - began)),
            heartbeat_timeout_seconds=heartbeat_timeout, shutdown_timeout_seconds=60,
        )  # fmt: skip
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DistributedError(
            f"{who} did not find the others within {timeout} s ({type(error).__name__}: {reason}); check that every "
            "process was started with the same coordinator and number of processes, that the coordinator's port is "
            "open, or raise --init_timeout") from error


def _await(address: str, timeout: float) -> None:
    """Waits until something listens at host:port. Raises OSError after `timeout` seconds."""
    host, _, port = address.rpartition(":")
    last = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > last:
                raise
            time.sleep(0.2)


def is_main() -> bool:
    """Whether this process writes what only one may write."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits for all processes."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


@contextlib.contextmanager
def main_first(name: str) -> Iterator[None]:
    """The body runs on process 0 alone, then on all others: they find what it wrote."""
    if not is_main():
        barrier(name)
    yield
    if is_main():
        barrier(name)


def must_stop(signals: Sequence[str], step: int) -> bool:
    """Whether the run ends before this step: the same answer on every process, once any of them got SIGTERM."""
    if jax.process_count() == 1:
        return bool(signals)
    return multihost_utils.reached_preemption_sync_point(step)


def leave(code: int) -> int:
    """The exit code of a failed command. With other processes, ends this one at once: an orderly shutdown would wait
    for peers that wait for us."""
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        os._exit(code)
    return code


def local_rows(sharding: NamedSharding, batch_size: int) -> list[int]:
    """Rows of a [batch_size, T] array of which this process's devices hold any part, in order."""
    shape = (batch_size, sharding.mesh.shape["context"])
    blocks = {index[0].indices(batch_size)[:2] for index in sharding.addressable_devices_indices_map(shape).values()}
    return sorted({row for start, stop in blocks for row in range(start, stop)})


def place(batch: Mapping[str, np.ndarray], sharding: NamedSharding, rows: Sequence[int], batch_size: int) -> dict:
    """Global arrays from this process's rows of a batch.

    Args:
      batch: [len(rows), T] arrays.
      rows: which rows of the batch they are: at least `local_rows`, in order.
    """
    position = {row: i for i, row in enumerate(rows)}

    def array(x):
        def block(index):
            start, stop, _ = index[0].indices(batch_size)
            return x[position[start] : position[stop - 1] + 1, index[1]]

        return jax.make_array_from_callback((batch_size, *x.shape[1:]), sharding, block)

    return {name: array(np.asarray(x)) for name, x in batch.items()}


class Placed(Iterator[dict]):
    """A resumable batch iterator whose batches are placed on the mesh."""

    def __init__(self, batches: Any, sharding: NamedSharding, rows: Sequence[int], batch_size: int):
        self._batches, self._args = batches, (sharding, rows, batch_size)
        self.get_state, self.set_state = batches.get_state, batches.set_state

    def __next__(self) -> dict:
        return place(next(self._batches), *self._args)

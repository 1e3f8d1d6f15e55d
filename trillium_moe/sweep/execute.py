"""Runs of a sweep on this machine: workers that train one arm's seeds in turn, and a launcher that survives them.

A run's directory says where it stands, in `outcome.json`:

    running    begun; if nobody holds the arm's lock, whoever ran it was killed, and it is resumed
    finished   its last step is done
    diverged   its loss was not finite, or ended above where it began: a result, not an accident
    failed     an error ended it (the message is kept); it is tried again by the next call

A worker is a process: what kills one arm (no memory, a crash in a kernel) leaves the others alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epath

from trillium_moe.config import ConfigError
from trillium_moe.config_files import load_config
from trillium_moe.sweep.plan import Run, Sweep

DONE = ("finished", "diverged")
WORKER = (sys.executable, "-m", "experiments.sweep")


def read_outcome(workdir: epath.PathLike, run: Run) -> dict[str, Any]:
    """`outcome.json` of a run; {"status": "missing"} if it has not begun."""
    path = epath.Path(workdir) / run.folder / "outcome.json"
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # a kill can cut the file short
        return {"status": "missing"}


def write_outcome(workdir: epath.PathLike, run: Run, **values: Any) -> None:
    folder = epath.Path(workdir) / run.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "outcome.json").write_text(json.dumps(values, indent=2) + "\n")


def is_done(workdir: epath.PathLike, run: Run) -> bool:
    """Whether a run needs no more work. Raises ConfigError if its directory holds another config's result."""
    if read_outcome(workdir, run)["status"] not in DONE:
        return False
    folder = epath.Path(workdir) / run.folder
    if dataclasses.asdict(load_config(folder)) != dataclasses.asdict(run.config):
        raise ConfigError(f"workdir {folder}: holds {run.arm.name!r} seed {run.seed} of another config; name a new "
                          "workdir, or remove that folder to run it again")
    return True


def work(runs: Sequence[Run], workdir: epath.PathLike, say: Callable[[str], None] = print, probes: Sequence[str] = (),
         turn: str = "") -> bool:
    """Trains what is left of `runs`, one after the other in this process. Returns False if a signal stopped it.

    Args:
      probes: what to measure of every finished run's model, by name.
      turn: a file that whoever steps holds a lock of, see `turns`; "" for steps at any time.

    Raises:
      ConfigError: if another process is at work on one of them, or a directory holds another run.
    """
    from trillium_moe.sweep.turns import in_turn
    from trillium_moe.train.loop import train

    options = {"around": functools.partial(in_turn, turn)} if turn else {}
    for run in runs:
        if is_done(workdir, run):
            continue
        with _lock(epath.Path(workdir) / run.folder, run):
            write_outcome(workdir, run, status="running")
            began = time.perf_counter()
            outcome = {"reason": ""}
            try:
                folder = epath.Path(workdir) / run.folder
                result = train(run.config, folder, progress=False, report=False, **options)
                if not result.finished:
                    return False
                outcome |= _verdict(workdir, run)
                for name in probes if outcome["status"] == "finished" else ():
                    from trillium_moe.sweep.probe import PROBES  # imported late: it draws

                    outcome.setdefault("probed", {}).update(PROBES[name](run.config, result.state, folder))
            except Exception as error:
                outcome |= _accident(error)
            outcome |= {"seconds": round(time.perf_counter() - began, 1), "peak_bytes": _peak_bytes()}
            write_outcome(workdir, run, **outcome)
            say(f"{run.arm.name}, seed {run.seed}: {outcome['status']} {outcome['reason']}".rstrip())
    return True


def _verdict(workdir: epath.PathLike, run: Run) -> dict[str, str]:
    """finished, or diverged: a model whose loss ends above that of an untrained one has not learned."""
    from trillium_moe.train.metrics import read_metrics

    lines = read_metrics(epath.Path(workdir) / run.folder)
    first, last = lines[0]["train/loss"], lines[-1]["train/loss"]
    if last > first:
        return {"status": "diverged", "reason": f"train/loss ended at {last:.3f}, above the {first:.3f} of step 1"}
    return {"status": "finished"}


def _accident(error: Exception) -> dict[str, str]:
    from trillium_moe.train.checkpoint import NonFiniteError

    if isinstance(error, NonFiniteError):
        return {"status": "diverged", "reason": str(error)}
    traceback.print_exc()
    return {"status": "failed", "reason": " ".join(f"{type(error).__name__}: {error}".split())[:500]}


def _peak_bytes() -> int:
    """Most memory used so far: of the device by this process, or on a CPU of the process itself."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    kilo = 1 if sys.platform == "darwin" else 1024
    return stats.get("peak_bytes_in_use") or kilo * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextlib.contextmanager
def _lock(folder: epath.Path, run: Run) -> Iterator[None]:
    """Keeps a second process off a run. Object stores have no locks: there the scheduler must see to it."""
    if "://" in str(folder):
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"workdir {folder}: another process is training {run.arm.name!r} seed {run.seed}; wait "
                              "for it or stop it") from None
        yield


class Launcher:
    """Works off a sweep with up to `parallel` workers at a time (on each GPU of `gpus`, if any are named).

    With `turn`, a file of this machine, those on one device compile side by side and step one at a time.
    """

    def __init__(self, sweep: Sweep, spec: str, workdir: epath.PathLike, parallel: int = 1, gpus: Sequence[str] = (),
                 say: Callable[[str], None] = print, worker: Sequence[str] = WORKER, turn: str = ""):
        self.sweep, self.spec, self.workdir, self.say = sweep, spec, epath.Path(workdir), say
        self.command = [*worker, f"--sweep={spec}", f"--workdir={workdir}"]
        self.slots = deque(list(gpus or [""]) * parallel)
        self.parallel, self.turn = parallel, turn
        self.workers: dict[subprocess.Popen, tuple[list[Run], str]] = {}
        self.stopped = ""

    def run(self) -> bool:
        """Until nothing is left, or SIGTERM or SIGINT. Returns whether the sweep came to its end."""
        queue = deque([run for run in group if not is_done(self.workdir, run)] for group in self.sweep.groups)
        queue = deque(group for group in queue if group)
        left, total = sum(map(len, queue)), len(self.sweep.runs)
        self.say(f"{total - left} of {total} runs are done; {left} to go")
        with self._signals():
            while (queue or self.workers) and not (self.stopped and not self.workers):
                while queue and self.slots and not self.stopped:
                    self._start(queue.popleft())
                time.sleep(0.2)
                for worker in [w for w in self.workers if w.poll() is not None]:
                    runs, slot = self.workers.pop(worker)
                    self.slots.append(slot)
                    rest = self._ended(worker, runs)
                    if rest:
                        queue.appendleft(rest)
        if self.stopped:
            self.say(f"stopped by {self.stopped}: what was trained is saved; the same command goes on")
        return not self.stopped

    def _start(self, runs: list[Run]) -> None:
        slot = self.slots.popleft()
        log = self.workdir / "logs" / f"{runs[0].folder.split('/')[1]}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        only = ",".join(str(run.index) for run in runs)
        turn = [f"--turn={self.turn}{slot}"] if self.turn else []
        with open(log, "a") as out:
            # a session of its own: Ctrl-C reaches the launcher alone, which passes it on once
            worker = subprocess.Popen([*self.command, f"--only={only}", *turn], stdout=out, stderr=subprocess.STDOUT,
                                      env=self._environment(slot), start_new_session=True)
        self.workers[worker] = runs, slot

    def _environment(self, slot: str) -> dict[str, str]:
        env = dict(os.environ)
        if slot:
            env["CUDA_VISIBLE_DEVICES"] = slot
        if self.parallel > 1:  # JAX would reserve three quarters of the device for the first of them
            share = float(env.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.9)) / self.parallel
            env["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{share:.3f}"
        if "://" not in str(self.workdir):  # a sweep that is resumed need not compile again
            env.setdefault("JAX_COMPILATION_CACHE_DIR", str((self.workdir / "cache").resolve()))
        return env

    def _ended(self, worker: subprocess.Popen, runs: list[Run]) -> list[Run]:
        """Tells of the runs of a worker that is gone. Returns those that it never came to."""
        rest = []
        for run in runs:
            outcome = read_outcome(self.workdir, run)
            code = worker.returncode
            if outcome["status"] == "running" and code == 2:  # refused: another process may be at work on it
                self.say(f"{run.arm.name}, seed {run.seed}: left alone; see {self.workdir}/logs")
            elif outcome["status"] == "running" and not self.stopped:
                how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
                outcome = {"status": "failed", "reason": f"the worker ended with {how}; see logs/"}
                write_outcome(self.workdir, run, **outcome)
            if outcome["status"] == "missing":
                rest.append(run)
            elif outcome["status"] != "running":
                done = sum(read_outcome(self.workdir, r)["status"] in DONE for r in self.sweep.runs)
                self.say(f"[{done}/{len(self.sweep.runs)}] {run.arm.name}, seed {run.seed}: {outcome['status']} "
                         f"{outcome.get('reason', '')}".rstrip())
        if len(rest) == len(runs) and not self.stopped:  # it did not even begin: the next one would not either
            for run in rest:
                write_outcome(self.workdir, run, status="failed", reason="the worker did not start; see logs/")
                self.say(f"{run.arm.name}, seed {run.seed}: the worker did not start; see {self.workdir}/logs")
            return []
        return [] if self.stopped else rest

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def handle(number, _):
            self.stopped = signal.Signals(number).name
            for worker in self.workers:
                worker.terminate()  # it saves, and ends

        before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, previous in before.items():
                signal.signal(number, previous)

"""The training loop: restore, step, log, evaluate, save, stop.

`fit` knows nothing of the model: it drives any (state, batch) -> (state, metrics) step. `train` is `fit` on a config.

Order within one step s (s counts optimizer steps done): dispatch step s, then fetch the metrics of step s - 1 while the
device works. Only an evaluation or a checkpoint waits for the device. The data iterator's state is taken between
batches, so a checkpoint of step s holds exactly the data position after s batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from absl import logging
from etils import epath
from jax.sharding import Mesh, NamedSharding
from tqdm import tqdm

from trillium_moe.config import Config, ConfigError, TrainConfig, check
from trillium_moe.config_files import load_config, save_config
from trillium_moe.data.mixture import MixtureRows
from trillium_moe.data.pipeline import make_pipeline
from trillium_moe.data.sources import make_source, order0_entropy
from trillium_moe.data.tokenizer import make_tokenizer
from trillium_moe.evals import vision
from trillium_moe.evals.churn import churn
from trillium_moe.evals.heldout import heldout
from trillium_moe.infer.generate import LoadedModel, generate
from trillium_moe.infer.sampling import Sampling
from trillium_moe.parallel import runtime
from trillium_moe.parallel.mesh import check_mesh, make_mesh
from trillium_moe.parallel.sharding import batch_spec, state_shardings, with_shardings
from trillium_moe.shapes import PyTree
from trillium_moe.train import checkpoint
from trillium_moe.train.checkpoint import NonFiniteError
from trillium_moe.train.facts import write_facts
from trillium_moe.train.load import alarms
from trillium_moe.train.metrics import MetricWriter, start_fetch
from trillium_moe.train.state import abstract_state, init_state
from trillium_moe.train.step import make_eval_step, make_train_step

WATCHED = ("train/loss", "train/grad_norm")  # fetched at every step; either one not finite ends the run

# Keys that may change between the parts of one run: they decide how long it is and what it writes. A new train.steps
# changes the learning-rate schedule from the resumed step on.
RESUMABLE = ("name", "train.steps", "train.start", "train.log_every", "train.eval_every", "train.eval_batches",
             "train.checkpoint_every", "train.keep", "train.sample_tokens", "train.alarm_violation", "train.alarm_dead",
             "mesh.replica", "mesh.data", "mesh.context", "mesh.expert", "mesh.model")


@dataclass(frozen=True)
class Task:
    """What `fit` needs to know about a model and its data."""

    init: Callable[[], PyTree]  # the state before the first step; jit-able
    step: Callable[[PyTree, Any], tuple[PyTree, Mapping[str, Any]]]  # jitted, its state donated
    batches: Iterator  # with get_state() and set_state(state), JSON values
    evaluate: Callable[[PyTree], dict[str, float]]  # held-out metrics of a state
    tokens_per_step: int
    shardings: PyTree | None = None  # of the state, which is made and restored so; None: on one device
    start: str = ""  # directory of a run whose newest state is the one before the first step; "": init's
    initialise: Callable[[], PyTree] | None = None  # `init`, compiled; None: compiled for this run


@dataclass(frozen=True)
class Outcome:
    """How a call of `fit` ended."""

    step: int  # optimizer steps done, over all parts of the run
    state: PyTree
    finished: bool  # False: stopped by a signal, and saved
    metrics: dict[str, float]  # the last loss and held-out values seen


def fit(config: TrainConfig, workdir: epath.PathLike, task: Task, *, progress: bool = True) -> Outcome:
    """Trains until `config.steps` are done or SIGTERM or SIGINT arrives, resuming the newest whole checkpoint.

    Raises:
      NonFiniteError: naming the step whose loss or gradient norm was not finite. Nothing of it is saved.
      CheckpointError: if checkpoints exist but none can be used.
      ConfigError: if the data of the checkpoint is not that of `task`.
    """
    seen: dict[str, float] = {}
    pending: tuple[int, dict, dict] | None = None  # (step, device metrics, held-out metrics)
    saved: int | None = None  # step of the newest checkpoint
    meter = _Throughput(task.tokens_per_step)

    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        state, start = _restore_or_init(config, workdir, task)
        checkpoints = stack.enter_context(checkpoint.open_checkpoints(workdir, config.keep)) if config.keep else None
        writer = stack.enter_context(MetricWriter(workdir, start))
        progress = progress and runtime.is_main()
        bar = stack.enter_context(tqdm(total=config.steps, initial=start, unit="step", disable=not progress,
                                       dynamic_ncols=True, mininterval=0.5))

        def flush() -> None:
            """Fetches the pending step's metrics: checks them, shows them, writes them if it is a logged step."""
            nonlocal pending
            if pending is None:
                return
            step, metrics, heldout = pending
            pending = None
            watched = jax.device_get({name: metrics[name] for name in WATCHED if name in metrics})
            meter.finished(step)
            bad = [name for name in WATCHED if name in watched and not math.isfinite(watched[name])]
            if bad:
                raise NonFiniteError(_not_finite(step, bad[0], float(watched[bad[0]]), saved))
            seen.update({name: float(value) for name, value in watched.items()}, **heldout)
            if is_logged(config, step):
                arrays = step == 1 or is_evaluated(config, step) or is_saved(config, step)
                writer.write(step, {**metrics, **heldout, **meter.since_last_line(), **_memory()}, arrays)
                for alarm in alarms(config, metrics) if runtime.is_main() else ():
                    logging.warning("step %d: %s", step, alarm)
            if progress:
                _show(bar, step, seen, metrics, meter)

        bar.set_postfix_str("compiling")
        step, saved = start, start or None
        while step < config.steps and not runtime.must_stop(stop, step):
            batch = next(task.batches)
            state, metrics = task.step(state, batch)
            start_fetch(metrics)
            flush()
            step += 1
            pending = (step, dict(metrics), {})
            if is_evaluated(config, step):
                jax.block_until_ready(metrics)  # what follows is not training time
                with meter.paused():
                    pending = (step, dict(metrics), task.evaluate(state))
            if is_saved(config, step):
                flush()  # a checkpoint's own metrics are on disk before it is
                with meter.paused():
                    writer.sync()
                    checkpoint.save(checkpoints, step, state, task.batches.get_state())
                saved = step
        flush()
        if saved != step and config.keep:  # stopped between checkpoints
            writer.sync()
            checkpoint.save(checkpoints, step, state, task.batches.get_state())
    finished = step >= config.steps
    if not finished:
        path = checkpoint.checkpoint_dir(workdir) / str(step)
        kept = f"saved to {path}; the same command resumes" if config.keep else "nothing is kept (train.keep=0)"
        print(f"stopped by {stop[0] if stop else 'SIGTERM'} after step {step}: {kept}", file=sys.stderr)
    return Outcome(step, state, finished, seen)


def train(config: Config, workdir: epath.PathLike, *, progress: bool = True, report: bool = True,
          around: Callable[[Task], contextlib.AbstractContextManager[Task]] = contextlib.nullcontext) -> Outcome:
    """Trains the model that `config` describes in `workdir`, or resumes it there. Ends with a report and a sample.

    Calls in turn whose configs differ in the seed alone share one compilation.

    Args:
      around: gives the task that `fit` is called with, and learns when it has ended.
    Raises:
      ConfigError: for a config that cannot work, or a workdir that holds a run of another one.
      CheckpointError, NonFiniteError: as `fit`.
    """
    mesh = make_mesh(config.mesh)
    check_mesh(config, mesh.shape)
    check_same_run(config, workdir)
    epath.Path(workdir).mkdir(parents=True, exist_ok=True)
    layout, rows = NamedSharding(mesh, batch_spec()), config.data.batch_size
    own_rows = runtime.local_rows(layout, rows)
    with runtime.main_first("data"):  # process 0 trains the tokenizer and fills the token cache
        tokenizer = make_tokenizer(config.data, workdir)
        batches = make_pipeline(config, "train", workdir, tokenizer=tokenizer, local=own_rows)
        held = make_pipeline(config, "heldout", workdir, tokenizer=tokenizer, threads=0)
        if runtime.is_main():
            save_config(config, workdir)  # only now that the data exist
            write_facts(workdir, config, order0_bits_per_byte=_order0(config))
    programs = _programs(dataclasses.replace(config, name="", seed=0), mesh)
    place = lambda batch: runtime.place(batch, layout, range(rows), rows)
    suite = vision.Suite(config, tokenizer, mesh, place) if config.images.share else None

    def evaluate(state) -> dict[str, float]:
        probe = []  # the experts of the first batch, which is always the same

        def step(*args):
            sums = dict(programs.evaluate(*args))
            experts = sums.pop("experts", None)
            if experts is not None and not probe:
                probe.append(experts)
            return sums

        values = heldout(step, state.params, state.router_bias, iter(held), tokenizer.token_bytes,
                         config.train.eval_batches, place)
        if suite is not None:
            values |= vision.as_metrics(suite(state.params, state.router_bias))
        if probe and runtime.is_main():
            values |= churn(workdir, int(state.step), jax.device_get(probe[0]))
        return values

    placed = runtime.Placed(iter(batches), layout, own_rows, rows)
    task = Task(
        init=lambda: init_state(config),
        step=_with_shares(programs.step, batches.rows, placed),
        batches=placed,
        evaluate=evaluate,
        tokens_per_step=config.data.batch_size * config.data.seq_len,
        shardings=programs.shardings,
        start=config.train.start,
        initialise=functools.partial(programs.initialise, jax.random.key(config.seed)),
    )
    with around(task) as task:
        outcome = fit(config.train, workdir, task, progress=progress)
    if not runtime.is_main():
        return outcome
    # a process cannot run the model alone; `experiments.generate` samples from the checkpoint
    can_generate = config.model.moe.balancing != "batch_threshold"  # whose experts depend on later tokens
    if outcome.finished and config.train.sample_tokens and can_generate and jax.process_count() == 1:
        model = LoadedModel(config, outcome.step, outcome.state.params, outcome.state.router_bias, tokenizer)
        (epath.Path(workdir) / "sample.txt").write_text(_sample(model))
    if suite is not None and suite.found:
        # imported late: matplotlib, which a run itself does not need
        from trillium_moe.train.figures_vision import picture_plate

        (epath.Path(workdir) / "pictures.png").write_bytes(picture_plate(suite.said(4)))
    if report:
        # imported late: matplotlib, which a run itself does not need
        from trillium_moe.train.report import write_report

        page = write_report(workdir)
        if progress:
            print(f"report: {page}", file=sys.stderr)
    return outcome


@dataclass(frozen=True)
class _Programs:
    """What is compiled for a run."""

    initialise: Callable  # key -> state
    step: Callable
    evaluate: Callable
    shardings: PyTree


@functools.lru_cache(maxsize=1)
def _programs(config: Config, mesh: Mesh) -> _Programs:
    """Kept from one run to the next: neither the seed nor the name is part of any program."""
    shardings = state_shardings(abstract_state(config), mesh)
    return _Programs(_compiled(functools.partial(init_state, config), shardings), make_train_step(config, mesh),
                     make_eval_step(config, mesh), shardings)


def _compiled(init: Callable[..., PyTree], shardings: PyTree) -> Callable[..., PyTree]:
    # it runs once, and XLA's CPU backend takes five times longer to optimise it than not to
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(init, out_shardings=shardings, compiler_options=options)


def _with_shares(step: Callable, rows: Any, batches: runtime.Placed) -> Callable:
    """The step with the realised shares of the data mixture among its metrics, if there is one."""
    if not isinstance(rows, MixtureRows):
        return step

    def run(state, batch):
        state, metrics = step(state, batch)
        shares = rows.shares(batches.get_state()["next_row"])
        return state, {**metrics, **{f"data/share_{kind}": share for kind, share in shares.items()}}

    return run


def _order0(config: Config) -> float:
    """Order-0 entropy of the first 16 MiB of held-out text, bits per byte."""
    def some(left: int = 1 << 24) -> Iterator[str]:
        for text in _heldout_texts(config):
            if left <= 0:
                return
            left -= len(text)
            yield text

    return order0_entropy(some())


def _sample(model: LoadedModel) -> str:
    """How the model continues the beginning of a held-out document."""
    text = next(iter(_heldout_texts(model.config)))
    ids = model.tokenizer.encode(text[:400])[: max(1, model.config.data.seq_len // 4)]
    prompt = model.tokenizer.decode(ids)
    sampling = Sampling(temperature=0.8, seed=model.config.seed)
    continuation = generate(model, prompt, model.config.train.sample_tokens, sampling)
    return (f"{prompt}\n\n--- continued by the model, step {model.step}, temperature {sampling.temperature} ---\n\n"
            f"{continuation}\n")


def _heldout_texts(config: Config) -> Sequence[str]:
    return make_source(config.data).split(config.data.heldout)[1]


def is_evaluated(config: TrainConfig, step: int) -> bool:
    return step == config.steps or (config.eval_every > 0 and step % config.eval_every == 0)


def is_saved(config: TrainConfig, step: int) -> bool:
    due = step == config.steps or (config.checkpoint_every > 0 and step % config.checkpoint_every == 0)
    return due and config.keep > 0


def is_logged(config: TrainConfig, step: int) -> bool:
    """Depends on the step alone, so a resumed run logs the steps an uninterrupted one does."""
    return step == 1 or step % config.log_every == 0 or is_evaluated(config, step)


def _restore_or_init(config: TrainConfig, workdir: epath.PathLike, task: Task) -> tuple[PyTree, int]:
    if not checkpoint.steps(workdir) and task.start:
        restored = checkpoint.restore(task.start, _abstract(task))
        check(restored.step == config.first_step, "train.first_step", config.first_step,
              f"train.start={task.start!r} holds a run of {restored.step} steps; give that number")
        return restored.state, restored.step
    if not checkpoint.steps(workdir):
        return (task.initialise or _compiled(task.init, task.shardings))(), 0
    restored = checkpoint.restore(workdir, _abstract(task))
    checkpoint.set_aside(workdir, after=restored.step)
    task.batches.set_state(restored.data_state)
    logging.info("resumed step %d from %s", restored.step, workdir)
    return restored.state, restored.step


def _abstract(task: Task) -> PyTree:
    """Shapes and shardings of the state."""
    abstract = jax.eval_shape(task.init)
    return abstract if task.shardings is None else with_shardings(abstract, task.shardings)


def _not_finite(step: int, name: str, value: float, saved: int | None) -> str:
    kept = "no checkpoint was due before it" if saved is None else f"the last good checkpoint is of step {saved}"
    return f"step {step}: {name}={value}; {kept}; lower optim.lr, lengthen optim.warmup or check the data"


@contextlib.contextmanager
def stop_signals() -> Iterator[list[str]]:
    """Yields a list that receives the name of the first SIGTERM or SIGINT. A second one acts at once, as usual.

    Outside the main thread, where Python allows no handlers, the list stays empty. So it does with several processes:
    JAX's own handler sees to it that SIGTERM stops all of them at the same step (`runtime.must_stop`).
    """
    names: list[str] = []
    previous: dict[int, Any] = {}

    def restore(*_) -> None:
        while previous:
            signal.signal(*previous.popitem())

    def handle(number, _) -> None:
        names.append(signal.Signals(number).name)
        restore()

    with contextlib.suppress(ValueError):
        for number in (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else ():
            previous[number] = signal.signal(number, handle)
    try:
        yield names
    finally:
        restore()


def _memory() -> dict[str, int]:
    """The most memory that was in use on the first device, in bytes, where it tells."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return {"perf/peak_bytes": stats["peak_bytes_in_use"]} if "peak_bytes_in_use" in stats else {}


class _Throughput:
    """Tokens per second of training proper: without compilation, evaluation and checkpoints."""

    def __init__(self, tokens_per_step: int):
        self.tokens_per_step = tokens_per_step
        self.rate = 0.0
        self._mark: tuple[float, int] | None = None  # (time, step) when the first step of this process had ended
        self._step = 0
        self._pause = 0.0

    def finished(self, step: int) -> None:
        self._step = step
        if self._mark is None:
            self._mark = (time.perf_counter(), step)
        steps, seconds = step - self._mark[1], time.perf_counter() - self._mark[0] - self._pause
        if steps and seconds > 0:
            self.rate = steps * self.tokens_per_step / seconds

    def since_last_line(self) -> dict[str, float]:
        if self._step == self._mark[1]:
            return {}
        self._mark, self._pause = (time.perf_counter(), self._step), 0.0
        return {"perf/tokens_per_second": self.rate}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._pause += time.perf_counter() - began


def _show(bar: tqdm, step: int, seen: dict[str, float], metrics: Mapping[str, Any], meter: _Throughput) -> None:
    """Loss, balance and speed beside tqdm's own step count, speed and time left."""
    shown = {"loss": f"{seen['train/loss']:.3f}"} if "train/loss" in seen else {}
    if "router/max_violation" in metrics:
        shown["MaxVio"] = f"{float(metrics['router/max_violation']):.2f}"
    if "heldout/bits_per_byte" in seen:
        shown["bpb"] = f"{seen['heldout/bits_per_byte']:.3f}"
    if meter.rate:
        shown["tok/s"] = f"{meter.rate:,.0f}"
    bar.set_postfix(shown, refresh=False)
    bar.update(step - bar.n)


def check_same_run(config: Config, workdir: epath.PathLike) -> None:
    """Raises ConfigError, naming the keys, if `workdir` holds a run of another config or a longer one.

    RESUMABLE keys may differ.
    """
    if not (epath.Path(workdir) / "config.json").exists():
        return
    ours, theirs = _flat(dataclasses.asdict(config)), _flat(dataclasses.asdict(load_config(workdir)))
    differ = [key for key in ours if ours[key] != theirs[key] and key not in RESUMABLE]
    if differ:
        listed = ", ".join(f"{key}={ours[key]!r} (there: {theirs[key]!r})" for key in differ)
        raise ConfigError(f"config {listed}: workdir={str(workdir)!r} holds another run; name a new workdir, or give "
                          "the config it was started with")
    done = max(checkpoint.steps(workdir), default=0)
    check(config.train.steps >= done, "train.steps", config.train.steps,
          f"workdir={str(workdir)!r} has already done {done} steps; raise it or name a new workdir")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out = {}
    for key, value in tree.items():
        out.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return out

"""A short climb of the context ladder on one GPU, every stage in a process of its own so that all compile side by side.

  python -m benchmarks.ladder --config=configs/pretrain.py:scale=small,shrink=1 --steps=300,60,16,4 --workdir=runs/h200
  python -m benchmarks.ladder ... --stages=64k --steps=210           # as many tokens at one window: the comparison

The stages, data, steps and questions of experiments.curriculum, without its checkpoints and gates: nothing resumes. At
real windows a step takes minutes to compile and seconds to run; one after the other, four of them are mostly waiting.
Stages hand over the whole state (parameters, optimizer, router bias) in files. While one process steps or asks, the
others that are ready wait, so speed and memory are a stage's own. Results: ladder.json and table.md in --workdir.
A second device can ask after the other stages, in a directory of its own with links to the stages' files:

  python -m benchmarks.ladder ... --asked=1m --workdir=A             # the ladder, and questions after its last stage
  python -m benchmarks.ladder ... --asked=8k,64k,256k --part=questions --workdir=B     # B/64k.json -> A/64k.json, ..
"""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from absl.flags import DEFINE_integer, DEFINE_list, DEFINE_string

from experiments.common import UsageError, command, config_of, define_config, define_workdir, workdir_of


def define(flags):
    define_config(flags)
    define_workdir(flags, "directory for states and results; made if missing")
    own = {"flag_values": flags}
    DEFINE_list("stages", ["8k", "64k", "256k", "1m"], "stages of configs/stages.py, in order", **own)
    DEFINE_list("steps", ["300", "60", "16", "4"], "optimizer steps of every stage", **own)
    DEFINE_list("seconds", [], "of every stage's steps at most; by default no bound", **own)
    DEFINE_string("mix", "recall", "kinds of rows: pretrain or recall (configs/stages.py)", **own)
    DEFINE_string("rate", "continue", "learning rate: continue one schedule, or rewarm at every stage", **own)
    DEFINE_integer("floor", 1, "rows per step at least", lower_bound=1, **own)
    DEFINE_list("tasks", ["needle", "multi_query"], "tasks to evaluate", **own)
    DEFINE_list("lengths", [], "tokens at which to evaluate; by default the windows of the ladder", **own)
    DEFINE_integer("reach", 4, "evaluate at up to this many times a stage's window; after the last stage everywhere",
                   lower_bound=1, **own)
    DEFINE_integer("answers", 32, "answers per task and length, if --eval_tokens allows", lower_bound=1, **own)
    DEFINE_integer("eval_tokens", 1 << 19, "tokens read per task and length at most", lower_bound=1, **own)
    DEFINE_integer("eval_focus", 4, "times as many at a stage's own window", lower_bound=1, **own)
    DEFINE_integer("eval_chunk", 16384, "tokens of a sequence read at once", lower_bound=2, **own)
    DEFINE_list("asked", [], "stages after which to ask; the others are followed at once by the next; by default all",
                **own)
    DEFINE_string("part", "", "what a process of the benchmark itself does: a stage, or questions", **own)


def run(flags):
    workdir = Path(workdir_of(flags, exists=False))
    workdir.mkdir(parents=True, exist_ok=True)
    ladder = _ladder(flags)
    asked = [name for name in ladder if name in flags.asked or not flags.asked]
    if flags.part == "questions":
        return _ask(flags, ladder, asked, workdir)
    if flags.part:
        return _climb(flags, ladder, asked, workdir)
    unknown = [name for name in flags.asked if name not in ladder]
    if unknown:
        raise UsageError(f"flag --asked={unknown[0]}: must be among the stages {','.join(ladder)}")
    for name in ladder:
        for old in workdir.glob(f"{name}.*"):
            old.unlink()
    parts = [*ladder, "questions"]
    again = [sys.executable, "-m", "benchmarks.ladder", *sys.argv[1:]]
    children = [subprocess.Popen([*again, f"--part={part}"]) for part in parts]
    try:
        while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
            time.sleep(0.2)
    finally:
        for child in children:
            child.kill()
    bad = [part for part, child in zip(parts, children) if child.wait() not in (0, -9)]
    if bad:
        raise RuntimeError(f"the process of {bad[0]} failed; its error stands above")
    return {"workdir": str(workdir), **json.loads((workdir / "ladder.json").read_text())}


def _ladder(flags):
    import jax

    from configs import stages

    return stages.ladder(config_of(flags), tuple(flags.stages), steps=tuple(map(int, flags.steps)), mixtures=flags.mix,
                         rate=flags.rate, floor=flags.floor, devices=jax.device_count())


def _say(part, line, began=time.time()):
    print(f"[{time.time() - began:6.1f}] {part:>9}: {line}", flush=True)


def _wait(path):
    while not path.exists():
        time.sleep(0.1)


def _write(path, leaves):
    """Leaves under a name that appears when all of them are there."""
    import numpy as np

    part = path.with_suffix(".part.npz")
    np.savez(part, *[np.asarray(leaf) for leaf in leaves])
    part.rename(path)


def _read(path, like):
    """The tree that `_write` wrote the leaves of."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    with np.load(path) as file:
        return jax.tree.unflatten(jax.tree.structure(like), [jnp.asarray(file[key]) for key in file.files])


def _climb(flags, ladder, asked, workdir):
    """The steps of one stage."""
    import jax

    from trillium_moe.data.pipeline import make_pipeline
    from trillium_moe.data.tokenizer import make_tokenizer
    from trillium_moe.train.state import abstract_state, init_state
    from trillium_moe.train.step import make_train_step

    name, names = flags.part, list(ladder)
    at, config = names.index(name), ladder[name]
    limit = float(flags.seconds[at]) if flags.seconds else float("inf")
    batches = iter(make_pipeline(config, "train", str(workdir), tokenizer=make_tokenizer(config.data, str(workdir))))
    batch = jax.tree.map(jax.numpy.asarray, dict(next(batches)))
    began = time.time()
    with ThreadPoolExecutor() as pool:
        program = pool.submit(make_train_step(config).lower(abstract_state(config), batch).compile)
        state = None if at else jax.jit(lambda: init_state(config))()
        step = program.result()
    compiled = time.time() - began
    tokens = config.data.batch_size * config.data.seq_len
    _say(name, f"{config.data.batch_size} x {config.data.seq_len:,} tokens a step, compiled in {compiled:.0f} s")
    if at:
        _wait(workdir / f"{names[at - 1]}.{'asked' if names[at - 1] in asked else 'state.npz'}")
        state = _read(workdir / f"{names[at - 1]}.state.npz", abstract_state(config))
    losses, seconds = [], []
    while len(losses) < config.train.steps - config.train.first_step and sum(seconds) < limit:
        began = time.time()
        state, metrics = step(state, batch)
        losses.append(float(metrics["train/loss"]))  # waits for the step
        seconds.append(time.time() - began)
        batch = jax.tree.map(jax.numpy.asarray, dict(next(batches, batch)))
        if len(losses) % max(1, (config.train.steps - config.train.first_step) // 12) == 0 or len(losses) == 1:
            _say(name, f"step {len(losses):4d}  loss {losses[-1]:.4f}  {seconds[-1]:.3f} s  largest logit "
                 f"{float(metrics['mla/max_logit']):.1f}")
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    typical = sorted(seconds[1:] or seconds)[len(seconds[1:] or seconds) // 2]
    result = {"window": config.data.seq_len, "rows": config.data.batch_size, "steps": len(losses), "losses": losses,
              "seconds": seconds, "tokens_per_second": tokens / typical, "compile_seconds": compiled}
    result |= {"peak_bytes": peak} if peak else {}
    (workdir / f"{name}.json").write_text(json.dumps(result))
    _write(workdir / f"{name}.state.npz", jax.tree.leaves(state))
    _say(name, f"{len(losses)} steps in {sum(seconds):.1f} s, {tokens / typical:,.0f} tokens/s, peak "
         f"{peak / 2**30:.1f} GiB")
    return result


def _ask(flags, ladder, asked, workdir):
    """The questions after every stage."""
    import jax
    import numpy as np

    from trillium_moe.data.pipeline import make_pipeline
    from trillium_moe.data.tokenizer import make_tokenizer
    from trillium_moe.evals.heldout import heldout
    from trillium_moe.evals.long import LongConfig, evaluate
    from trillium_moe.evals.reader import Reader
    from trillium_moe.train.ladder_report import table
    from trillium_moe.train.state import abstract_state, new_model
    from trillium_moe.train.step import make_eval_step

    first = next(iter(ladder.values()))
    tokenizer = make_tokenizer(first.data, str(workdir))
    lengths = sorted(map(int, flags.lengths)) or [config.data.seq_len for config in ladder.values()]
    held = make_pipeline(first, "heldout", tokenizer=tokenizer, threads=0)
    eval_step, chunk = make_eval_step(first), min(flags.eval_chunk, lengths[-1])

    began = time.time()
    params, bias = jax.jit(lambda: new_model(first.model, jax.random.key(0))[1:])()
    Reader(first.model, params, bias, lengths[-1], 1, chunk).read([np.zeros(chunk, np.int32)])
    heldout(eval_step, params, bias, iter(held), tokenizer.token_bytes, 1)
    _say("questions", f"compiled in {time.time() - began:.0f} s")
    results = {}
    for name in asked:
        config = ladder[name]
        _wait(workdir / f"{name}.state.npz")
        state = _read(workdir / f"{name}.state.npz", abstract_state(config))
        last = name == next(reversed(ladder))
        own = tuple(n for n in lengths if last or n <= flags.reach * config.data.seq_len)
        suite = LongConfig(tasks=tuple(flags.tasks), lengths=own, answers=flags.answers, tokens=flags.eval_tokens,
                           focus=config.data.seq_len, focus_tokens=flags.eval_focus, capacity=lengths[-1],
                           generate=0, text=False, rows=1, chunk=chunk)
        began = time.time()
        long = evaluate(first.model, state.params, state.router_bias, tokenizer, held.rows.documents, suite,
                        lambda line, name=name: _say(f"after {name}", line))
        loss = heldout(eval_step, state.params, state.router_bias, iter(held), tokenizer.token_bytes, 4)["heldout/loss"]
        _say(f"after {name}", f"loss at the first window {loss:.4f}; asked for {time.time() - began:.1f} s")
        results[name] = {"stage": name, **json.loads((workdir / f"{name}.json").read_text()), "short_loss": loss,
                         "cells": long["cells"], "text": long["text"], "failed": ["not asked"]}
        (workdir / "ladder.json").write_text(json.dumps({"stages": list(results.values())}))
        (workdir / f"{name}.asked").touch()
        (workdir / "table.md").write_text(table(results) + "\n")
    print(table(results), flush=True)
    return {}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))

"""Trains with pictures and measures what was read from them, for the figures of docs/results.md.

  python -m benchmarks.vision --config=configs/vision.py:scale=small                          # reads what it is shown
  python -m benchmarks.vision --config=configs/vision.py:scale=small --arms=joint,blind,text --seeds=3

Arms, each trained anew from every seed, 0, 1, ..:
  joint  text and pictures, as the config says
  blind  the same texts, and black pictures
  text   the rows of text alone, in the same order, without a tower

Every --every steps and at the end a run prints the held-out loss of text and the suite of `trillium_moe.evals.vision`;
then come means over the seeds, and differences from the first arm seed by seed. With --seconds a run takes the steps
that the time allows, and the schedule is laid over the time. Programs are compiled once, before the first step. Nothing
is saved.
"""

import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from absl.flags import DEFINE_float, DEFINE_integer, DEFINE_list, DEFINE_string

from benchmarks.turns import turn
from experiments.common import UsageError, command, config_of, define_config

ARMS = ("joint", "blind", "text")


def define_run(flags):
    """The flags of one run."""
    define_config(flags)
    own = {"flag_values": flags}
    DEFINE_integer("every", 250, "steps between evaluations", lower_bound=1, **own)
    DEFINE_integer("rows", 256, "held-out rows of text", lower_bound=1, **own)
    DEFINE_integer("said", 0, "answers to print of each task at the end", lower_bound=0, **own)
    DEFINE_float("seconds", 0.0, "of a run's training; 0: config.train.steps steps", lower_bound=0, **own)


def define(flags):
    define_run(flags)
    own = {"flag_values": flags}
    DEFINE_list("arms", ["joint"], f"what to train: {', '.join(ARMS)}", **own)
    DEFINE_integer("seeds", 1, "runs of every arm", lower_bound=1, **own)
    DEFINE_string("turn", "", "file that is locked while runs use the device: benchmarks/turns.py", **own)


def arm_config(config, arm):
    """The config of an arm. Without pictures there are as many rows of text a step, and no tower."""
    if arm == "blind":
        return replace(config, images=replace(config.images, blind=True))
    if arm == "joint":
        return config
    rows = config.data.batch_size
    return replace(config, model=replace(config.model, vision=replace(config.model.vision, n_layers=0)),
                   data=replace(config.data, batch_size=rows - int(rows * config.images.share)),
                   images=replace(config.images, share=0.0))


class Programs:
    """What a config runs, compiled side by side. Arms that differ in their pictures alone share them."""

    def __init__(self, config, tokenizer):
        import jax

        from trillium_moe.data.pipeline import make_pipeline
        from trillium_moe.evals import vision
        from trillium_moe.train.state import init_state
        from trillium_moe.train.step import make_eval_step, make_train_step

        self.config, self.tokenizer = config, tokenizer
        self.has_pictures = config.model.vision.n_layers > 0
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        self.init = jax.jit(lambda key: init_state(config, key), compiler_options=options)
        state = jax.eval_shape(self.init, jax.random.key(0))
        # a held-out batch has the arrays of every other
        batch = next(iter(make_pipeline(config, "heldout", tokenizer=tokenizer, threads=0)))
        lowered = [make_train_step(config).lower(state, batch),
                   make_eval_step(config).lower(state.params, state.router_bias, batch)]
        if self.has_pictures:
            lowered.append(vision.make_predict(config).lower(state.params, state.router_bias, batch))
        with ThreadPoolExecutor(len(lowered)) as pool:
            self.step, self.eval_step, *predict = pool.map(lambda program: program.compile(), lowered)
        self.predict = predict[0] if predict else None


def along(state, share, steps):
    """The state with its learning rate as far along a schedule of `steps` as `share` of it."""
    import jax.numpy as jnp

    at = jnp.int32(min(steps - 1, steps * share))
    rate = state.opt_state["learning_rate"]._replace(count=at)
    return replace(state, opt_state=state.opt_state | {"learning_rate": rate})


def finite(loss, step):
    """The loss, once it is there. Raises NonFiniteError."""
    from trillium_moe.train.checkpoint import NonFiniteError

    if not math.isfinite(loss := float(loss)):
        raise NonFiniteError(f"the loss is {loss} at step {step}")
    return loss


def train(programs, config, flags, say):
    """One run: its last figures, flat."""
    import jax

    from trillium_moe.data.pipeline import make_pipeline
    from trillium_moe.evals import vision
    from trillium_moe.evals.heldout import heldout

    tokenizer, steps = programs.tokenizer, config.train.steps
    batches = iter(make_pipeline(config, "train", tokenizer=tokenizer))
    held = make_pipeline(config, "heldout", tokenizer=tokenizer, threads=0)
    suite = vision.Suite(config, tokenizer) if programs.has_pictures else None
    if suite:
        suite.predict = programs.predict
    state = programs.init(jax.random.key(config.seed))

    def evaluate(number, loss):
        out = {"step": number, "train_loss": float(loss)}
        out |= heldout(programs.eval_step, state.params, state.router_bias, iter(held), tokenizer.token_bytes,
                       max(1, flags.rows // config.data.batch_size))
        if suite:
            scores = suite(state.params, state.router_bias)
            for line in vision.table(scores):
                say(line)
            out |= vision.as_metrics(scores)
        say(json.dumps(out))
        return out

    batch, number, spent, loss, result = next(batches), 0, 0.0, 0.0, {}
    while not result:
        began = time.perf_counter()
        for _ in range(flags.every):
            if flags.seconds:
                state = along(state, (spent + time.perf_counter() - began) / flags.seconds, steps)
            before = loss
            state, metrics = programs.step(state, batch)
            loss, number, batch = metrics["train/loss"], number + 1, next(batches)
            done = number - 1
            before = finite(before, done)  # while the device works on the next step
            if done == 1 or done and done % 50 == 0:
                say(f"step {done} loss {before:.4f}")
            late = bool(flags.seconds) and spent + time.perf_counter() - began > flags.seconds
            if late or (number == steps and not flags.seconds):
                break
        loss = finite(loss, number)
        spent += time.perf_counter() - began
        last = late or (number == steps and not flags.seconds)
        figures = evaluate(number, loss)
        result = figures | {"seconds": spent} if last else {}
    batches.close()
    for example, answer in suite.said(flags.said) if suite else ():
        say(f"{example.task} {example.answer!r} read as {answer!r}")
    return result


def compare(found):
    """Lines: the mean of every figure over the seeds, and what each arm's differs by from the first's."""
    import numpy as np

    first = next(iter(found))
    for arm, runs in found.items():
        for name in runs[0]:
            if name not in ("heldout/loss", "step") and not name.startswith("vision/") or name.endswith("_chance"):
                continue
            values = np.array([run[name] for run in runs])
            line = f"{arm:6} {name:28} {values.mean():9.4f}"
            if arm != first and name in found[first][0]:
                apart = values - [run[name] for run in found[first]]
                line += f"  minus {first}: {apart.mean():+.4f}  by seed " + " ".join(f"{a:+.4f}" for a in apart)
                line += f"  deviation {apart.std(ddof=1):.4f}" if len(apart) > 1 else ""
            yield line


def run(flags):
    from trillium_moe.data.tokenizer import make_tokenizer

    unknown = [arm for arm in flags.arms if arm not in ARMS]
    if unknown or not flags.arms:
        raise UsageError(f"flag --arms={','.join(flags.arms)}: must be among {', '.join(ARMS)}")
    config, zero = config_of(flags), time.perf_counter()
    tokenizer, programs, found = make_tokenizer(config.data), {}, {arm: [] for arm in flags.arms}

    def say(text, label="all"):
        print(f"[{label} {time.perf_counter() - zero:6.1f}s] {text}", flush=True)

    for arm in flags.arms:
        kind = "text" if arm == "text" else "pictures"  # what is drawn in them makes no other program
        programs[arm] = programs[kind] = programs.get(kind) or Programs(arm_config(config, arm), tokenizer)
        say("compiled", arm)
    with turn(flags.turn):
        for seed in range(flags.seeds):
            for arm in flags.arms:
                label = f"{arm} {seed}"
                own = replace(arm_config(config, arm), seed=seed)
                found[arm].append(train(programs[arm], own, flags, lambda text, label=label: say(text, label)))
    for line in compare(found):
        say(line)
    return found


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run))

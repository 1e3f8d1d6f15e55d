"""What pictures are worth to the captions of pictures that were never seen.

  F="--config=configs/vision.py:scale=small --config.images.path=runs/data/captions.jsonl --out=runs/captions
     --config.images.tasks=captions:0.5,signs:8,words:4 --config.optim.schedule=wsd --first_steps=1600"
  for seed in 0 1 2; do python -m benchmarks.captions $F --seed=$seed; done    # train
  python -m benchmarks.captions $F --compare                                   # what lies in --out

A run trains two models from one start, step by step on the same rows: `joint` sees the pictures, `blind` reads the same
texts and sees black ones. The first --first_steps steps read other pictures (--first), without a caption; from there
both go on once for each of --folds, to config.train.steps, with the tasks of the config and that part of the captions
held out: over all config.images.folds every caption is. A schedule of wsd keeps its rate over the first steps and falls
in the folds.
After every evaluation the nats of every held-out caption are written.

Runs may be processes beside each other: with JAX_COMPILATION_CACHE_DIR set, those that begin later compile nothing.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

from absl.flags import DEFINE_boolean, DEFINE_integer, DEFINE_list, DEFINE_string

from benchmarks import vision
from experiments.common import UsageError, command, config_of, define_config

ARMS = ("joint", "blind")
FIRST = "signs:8,words:8,letters:2,glyphs:2,shapes:1.5,photos:0.3"


def define(flags):
    define_config(flags)
    own = {"flag_values": flags}
    DEFINE_integer("seed", 0, "of the run", lower_bound=0, **own)
    DEFINE_integer("first_steps", 0, "steps before the folds", lower_bound=0, **own)
    DEFINE_string("first", FIRST, "tasks of those steps, as config.images.tasks", **own)
    DEFINE_list("folds", [], "of config.images.folds parts those to hold out, one after the other; none: all", **own)
    DEFINE_integer("every", 100, "steps of a fold between evaluations", lower_bound=1, **own)
    DEFINE_boolean("compare", False, "train nothing, compare the runs in --out", **own)
    DEFINE_string("out", "runs/captions", "folder of the runs' figures, FOLD_SEED.npz", **own)


class Run:
    """Both arms of a seed."""

    def __init__(self, config):
        from trillium_moe.data.tokenizer import make_tokenizer

        self.seed, self.zero = config.seed, time.perf_counter()
        self.tokenizer = make_tokenizer(config.data)
        self.programs = vision.Programs(config, self.tokenizer)
        self.say("compiled")

    def say(self, text):
        print(f"[{self.seed} {time.perf_counter() - self.zero:6.1f}s] {text}", flush=True)

    def suites(self, config):
        """arm -> the held-out examples of a config's tasks."""
        from trillium_moe.evals.vision import Suite

        found = {arm: Suite(vision.arm_config(config, arm), self.tokenizer) for arm in ARMS}
        for suite in found.values():
            suite.predict = self.programs.predict
        return found

    def advance(self, states, config, begin, end):
        """Takes `states` along, in place, over steps from the beginning of the config's stream, and yields the number
        of each, begin + 1 to end, once it is on its way. Raises NonFiniteError."""
        import numpy as np

        from trillium_moe.data.pipeline import make_pipeline

        batches, losses = iter(make_pipeline(config, "train", tokenizer=self.tokenizer)), {}
        for number in range(begin, end):
            batch = next(batches)
            black = batch | {"patches": np.zeros_like(batch["patches"])}
            before, losses = losses, {}
            for arm, seen in zip(ARMS, (batch, black)):
                states[arm], metrics = self.programs.step(states[arm], seen)
                losses[arm] = metrics["train/loss"]
            # while the device works on this step
            before = {arm: vision.finite(loss, number) for arm, loss in before.items()}
            if before and number % 50 == 0:
                self.say(f"step {number}: " + ", ".join(f"{arm} {loss:.4f}" for arm, loss in before.items()))
            yield number + 1
        batches.close()
        for loss in losses.values():
            vision.finite(loss, end)


def train(config, flags):
    """The first steps, then the folds; writes --out."""
    import jax
    import jax.numpy as jnp

    from trillium_moe.evals.vision import table

    run, out = Run(config), Path(flags.out)
    copies = jax.jit(lambda states: jax.tree.map(jnp.copy, states))
    start = {arm: run.programs.init(jax.random.key(config.seed)) for arm in ARMS}
    if flags.first_steps:
        first = replace(config, images=replace(config.images, tasks=flags.first))
        for _ in run.advance(start, first, 0, flags.first_steps):
            pass
        for arm, suite in run.suites(first).items():
            run.say(f"step {flags.first_steps}, {arm}")
            for line in table(suite(start[arm].params, start[arm].router_bias)):
                run.say(line)
    for fold in map(int, flags.folds or range(config.images.folds)):
        own = replace(config, images=replace(config.images, fold=fold))
        suites = run.suites(replace(own, images=replace(own.images, tasks="captions")))
        states, steps, nats = copies(start), [], []
        for number in run.advance(states, own, flags.first_steps, config.train.steps):
            if (number - flags.first_steps) % flags.every and number != config.train.steps:
                continue
            steps.append(number)
            nats.append([caption_nats(suites[arm], states[arm]) for arm in ARMS])
            shown = suites["joint"]
            write(out / f"{fold}_{config.seed}.npz", steps, nats, shown)
            losses = [sum(arm) / sum(len(a.nats) for a in shown.found["captions"]) for arm in nats[-1]]
            run.say(f"fold {fold}, step {number}, nats a token: joint {losses[0]:.4f}, blind {losses[1]:.4f}")
    return {"out": flags.out}


def caption_nats(suite, state):
    """Nats of every held-out caption."""
    suite(state.params, state.router_bias)
    return [answer.nats.sum() for answer in suite.found["captions"]]


def write(out, steps, nats_EAN, suite):
    import numpy as np

    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(out, nats_EAN=nats_EAN, steps=steps, tokens_N=[len(a.nats) for a in suite.found["captions"]],
             texts=[example.answer for example in suite.examples["captions"]])


def load(folder):
    """The runs in a folder by seed: seed -> fold -> (steps [E], nats [E, arm, N], tokens [N], texts)."""
    import numpy as np

    found = {}
    for path in Path(folder).glob("*_*.npz"):
        fold, seed = map(int, path.stem.split("_"))
        run = np.load(path)
        found.setdefault(seed, {})[fold] = tuple(run[name] for name in ("steps", "nats_EAN", "tokens_N", "texts"))
    if not found:
        raise UsageError(f"flag --out={folder}: no run there; train one without --compare")
    return {seed: dict(sorted(folds.items())) for seed, folds in sorted(found.items())}


class Pooled:
    """All captions of a seed, each from the fold that held it out, at the evaluations that its folds share."""

    def __init__(self, folds):
        import numpy as np

        self.steps = sorted(set.intersection(*(set(steps.tolist()) for steps, *_ in folds.values())))
        at = lambda steps, nats_EAN: nats_EAN[[steps.tolist().index(step) for step in self.steps]]
        self.nats_EAN = np.concatenate([at(steps, nats) for steps, nats, _, _ in folds.values()], axis=-1)
        self.tokens_N = np.concatenate([tokens for _, _, tokens, _ in folds.values()])
        self.keys = [(fold, i, str(text)) for fold, (*_, texts) in folds.items() for i, text in enumerate(texts)]
        self.loss_EA = self.nats_EAN.sum(-1) / self.tokens_N.sum()

    def apart(self, at_A):
        """Nats that pictures add to each caption, with the evaluation of each arm."""
        return self.nats_EAN[at_A[0], 0] - self.nats_EAN[at_A[1], 1]


def standard_error(apart_N, tokens_N):
    """Of sum(apart) / sum(tokens), captions being drawn."""
    return (apart_N - apart_N.sum() / tokens_N.sum() * tokens_N).std() * len(apart_N) ** 0.5 / tokens_N.sum()


def conclude(runs):
    """Lines: what pictures change, in nats a token, after the last evaluation and where each arm is lowest, by seed and
    over all; at every evaluation; by fold; and the captions that they help most and least at the end."""
    import numpy as np

    pools = {seed: Pooled(folds) for seed, folds in runs.items()}
    for name in ("last", "lowest"):
        margins, found = [], {}
        for seed, p in pools.items():
            at_A = p.loss_EA.argmin(0) if name == "lowest" else np.array([-1, -1])
            (joint, blind), apart_N = p.loss_EA[at_A, (0, 1)], p.apart(at_A)
            margins.append(joint - blind)
            yield (f"{name:6} seed {seed}: joint {joint:.4f}, blind {blind:.4f}: {margins[-1]:+.4f}, standard error "
                   f"over {len(p.keys)} captions {standard_error(apart_N, p.tokens_N):.4f}; after steps "
                   f"{p.steps[at_A[0]]} and {p.steps[at_A[1]]}")
            for key, tokens, apart, alone in zip(p.keys, p.tokens_N, apart_N, p.nats_EAN[at_A[1], 1]):
                found.setdefault(key, []).append((tokens, apart, alone))
        tokens_N, apart_N, alone_N = np.array([np.mean(seen, 0) for seen in found.values()]).T
        spread = f", deviation over seeds {np.std(margins, ddof=1):.4f}" if len(margins) > 1 else ""
        yield (f"{name:6} all: {apart_N.sum() / tokens_N.sum():+.4f}, standard error over {len(found)} captions "
               f"{standard_error(apart_N, tokens_N):.4f}{spread}; {(apart_N < 0).mean():.0%} of the captions helped")
        if name == "last":
            order = [(apart_N[i], alone_N[i], tokens_N[i], list(found)[i][2]) for i in np.argsort(apart_N)]
    for step in sorted({step for p in pools.values() for step in p.steps}):
        there = [dict(zip(p.steps, p.loss_EA))[step] if step in p.steps else None for p in pools.values()]
        yield f"step {step:6}: " + ", ".join(
            "-" if pair is None else f"{pair[0]:.4f} {pair[1]:.4f} {pair[0] - pair[1]:+.4f}" for pair in there)
    for fold in sorted({fold for folds in runs.values() for fold in folds}):
        ends = [folds[fold][1][-1].sum(-1) / folds[fold][2].sum() for folds in runs.values() if fold in folds]
        yield f"fold {fold}: " + " ".join(f"{joint - blind:+.4f}" for joint, blind in ends)
    for apart, alone, tokens, text in order:
        yield f"{apart:+8.2f} nats, blind {alone:7.2f}, {tokens:3.0f} tokens: {text[:80]}"


def run(flags):
    from trillium_moe.config import ConfigError, check
    from trillium_moe.data.picture_tasks import task_weights

    if flags.compare:
        lines = list(conclude(load(flags.out)))
        print(*lines, sep="\n")
        return {"lines": lines}
    config = replace(config_of(flags), seed=flags.seed)
    check("captions" in config.images.tasks, "images.tasks", config.images.tasks, "must name captions")
    try:
        first = task_weights(replace(config.images, tasks=flags.first))
    except ConfigError as error:
        raise UsageError(f"flag --first: {error}") from None
    if own := [name for name in ("captions", "folders") if name in first]:
        raise UsageError(f"flag --first={flags.first}: must not name {own[0]}, whose pictures the folds hold out")
    if flags.first_steps >= config.train.steps:
        raise UsageError(f"flag --first_steps={flags.first_steps}: must be less than train.steps={config.train.steps}")
    if not set(flags.folds) <= set(map(str, range(config.images.folds))):
        raise UsageError(f"flag --folds={','.join(flags.folds)}: must be numbers from 0 to {config.images.folds - 1}")
    return train(config, flags)


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run, config="configs/vision.py:scale=small"))

"""What pictures are worth to the captions of pictures that were never seen.

  F="--config=configs/vision.py:scale=small --config.images.path=runs/data/captions.jsonl --out=runs/captions"
  for seed in 0 1 2; do python -m benchmarks.captions $F --seed=$seed; done    # train
  python -m benchmarks.captions $F --compare                                   # what lies in --out

A run trains two models from one start, step by step on the same rows: `joint` sees the pictures, `blind` reads the same
texts and sees black ones. After every evaluation it writes the nats of every held-out caption. Which tenth of the
pictures is held out --config.images.fold says; over ten folds every caption is. Runs may be processes beside each
other: with JAX_COMPILATION_CACHE_DIR set, those that begin later compile nothing.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

from absl.flags import DEFINE_boolean, DEFINE_integer, DEFINE_string

from benchmarks import vision
from experiments.common import UsageError, command, config_of

ARMS = ("joint", "blind")


def define(flags):
    vision.define_run(flags)
    own = {"flag_values": flags}
    DEFINE_integer("seed", 0, "of the run", lower_bound=0, **own)
    DEFINE_boolean("compare", False, "train nothing, compare the runs in --out", **own)
    DEFINE_string("out", "runs/captions", "folder of the runs' figures, FOLD_SEED.npz", **own)


def train(config, flags, out):
    """Trains both arms and writes `out`: the steps of the evaluations and the nats of every caption for each arm."""
    import jax
    import numpy as np

    from trillium_moe.data.pipeline import make_pipeline
    from trillium_moe.data.tokenizer import make_tokenizer
    from trillium_moe.evals.vision import Suite, table

    tokenizer, steps, zero = make_tokenizer(config.data), config.train.steps, time.perf_counter()

    def say(text):
        print(f"[{config.seed} {time.perf_counter() - zero:6.1f}s] {text}", flush=True)

    programs = vision.Programs(config, tokenizer)
    say("compiled")
    suites = {arm: Suite(vision.arm_config(config, arm), tokenizer) for arm in ARMS}
    for suite in suites.values():
        suite.predict = programs.predict
    states = {arm: programs.init(jax.random.key(config.seed)) for arm in ARMS}
    batches = iter(make_pipeline(config, "train", tokenizer=tokenizer))
    kept = {"steps": [], "joint": [], "blind": []}

    def evaluate(number):
        kept["steps"].append(number)
        for arm, suite in suites.items():
            scores = suite(states[arm].params, states[arm].router_bias)
            found = suite.found["captions"]
            kept[arm].append([answer.nats.sum() for answer in found])
            say(f"step {number}, {arm}")
            for line in table(scores):
                say(line)
        out.parent.mkdir(parents=True, exist_ok=True)
        np.savez(out, nats_EAN=np.stack([kept[arm] for arm in ARMS], 1), steps=kept["steps"],
                 tokens_N=[len(answer.nats) for answer in found], texts=[e.answer for e in suite.examples["captions"]])

    batch, number, spent, losses, done = next(batches), 0, 0.0, {}, False
    black = np.zeros_like(batch["patches"])
    while not done:
        began = time.perf_counter()
        for _ in range(flags.every):
            share = (spent + time.perf_counter() - began) / flags.seconds if flags.seconds else number / steps
            before, losses = losses, {}
            for arm in ARMS:
                seen = batch if arm == "joint" else batch | {"patches": black}
                states[arm], metrics = programs.step(vision.along(states[arm], share, steps), seen)
                losses[arm] = metrics["train/loss"]
            number, batch = number + 1, next(batches)
            before = {arm: vision.finite(loss, number - 1) for arm, loss in before.items()}
            if before and (number - 1) % 50 == 0:
                say(f"step {number - 1}: " + ", ".join(f"{arm} {loss:.4f}" for arm, loss in before.items()))
            done = share >= 1 if flags.seconds else number == steps
            if done:
                break
        for loss in losses.values():
            vision.finite(loss, number)
        spent += time.perf_counter() - began
        evaluate(number)
    batches.close()
    return {"out": str(out)}


def load(folder):
    """The runs in a folder: (name, steps [E], nats [E, arm, N], tokens [N], texts) each."""
    import numpy as np

    runs = [(path.stem, np.load(path)) for path in sorted(Path(folder).glob("*.npz"))]
    if not runs:
        raise UsageError(f"flag --out={folder}: no run there; train one without --compare")
    return [(name, *(run[field] for field in ("steps", "nats_EAN", "tokens_N", "texts"))) for name, run in runs]


def conclude(runs):
    """Lines: what pictures change at the end of the runs and where each arm is lowest, run by run and over all, in nats
    a byte; at every evaluation; and the captions that they helped most and least where either arm is lowest.

    Runs of other folds hold out other captions; of the same fold, a caption counts by its mean.
    """
    import numpy as np

    losses = [nats_EAN.sum(-1) / tokens_N.sum() for _, _, nats_EAN, tokens_N, _ in runs]
    for name in ("last", "lowest"):
        apart, found = [], {}
        for (label, steps_E, nats_EAN, tokens_N, texts), loss_EA in zip(runs, losses):
            at_A = loss_EA.argmin(0) if name == "lowest" else np.full(2, len(steps_E) - 1)
            joint, blind = loss_EA[at_A, (0, 1)]
            apart.append(joint - blind)
            yield (f"{name:6} {label}: joint {joint:.4f}, blind {blind:.4f}: {apart[-1]:+.4f} after steps "
                   f"{steps_E[at_A[0]]} and {steps_E[at_A[1]]}")
            for i, text in enumerate(texts):
                pair = nats_EAN[at_A[0], 0, i], nats_EAN[at_A[1], 1, i]
                found.setdefault((i, str(text)), (tokens_N[i], []))[1].append(pair)
        tokens = np.array([n for n, _ in found.values()])
        alone = np.array([np.mean(pairs, 0)[1] for _, pairs in found.values()])
        helped = np.array([np.mean(pairs, 0)[0] for _, pairs in found.values()]) - alone
        error = helped.std() * len(helped) ** 0.5 / tokens.sum()
        spread = f", deviation over runs {np.std(apart, ddof=1):.4f}" if len(apart) > 1 else ""
        yield (f"{name:6} all: {helped.sum() / tokens.sum():+.4f}, standard error over {len(found)} captions "
               f"{error:.4f}{spread}; {(helped < 0).mean():.0%} of the captions helped")
    for step in sorted({step for _, steps_E, *_ in runs for step in steps_E}):
        there = [dict(zip(steps_E, loss_EA[:, 0] - loss_EA[:, 1])) for (_, steps_E, *_), loss_EA in zip(runs, losses)]
        yield f"step {step:6}: " + " ".join(f"{run[step]:+.4f}" if step in run else "      -" for run in there)
    texts = [text for _, text in found]
    for i in np.argsort(helped):
        yield f"{helped[i]:+8.2f} nats, blind {alone[i]:7.2f}, {tokens[i]:3} tokens: {texts[i][:80]}"


def run(flags):
    from trillium_moe.config import check

    if not flags.compare:
        config = replace(config_of(flags), seed=flags.seed)
        check("captions" in config.images.tasks, "images.tasks", config.images.tasks, "must name captions")
        return train(config, flags, Path(flags.out, f"{config.images.fold}_{flags.seed}.npz"))
    lines = list(conclude(load(flags.out)))
    print(*lines, sep="\n")
    return {"lines": lines}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run, config="configs/vision.py:scale=small"))

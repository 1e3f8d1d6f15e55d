"""What pictures are worth to the captions of pictures that were never seen.

  F="--config=configs/vision.py:scale=small --config.images.path=runs/data/captions.jsonl --out=runs/captions"
  for seed in 0 1 2; do python -m benchmarks.captions $F --seed=$seed; done    # train
  python -m benchmarks.captions $F --compare                                   # what lies in --out

A run trains two models from one start, step by step on the same rows: `joint` sees the pictures, `blind` reads the same
texts and sees black ones. After every evaluation it writes the nats of every held-out caption. Runs may be processes
beside each other: with JAX_COMPILATION_CACHE_DIR set, those that begin later compile nothing.
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
    DEFINE_string("out", "runs/captions", "folder of the runs' figures, SEED.npz", **own)


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
    while not done:
        began = time.perf_counter()
        for _ in range(flags.every):
            share = (spent + time.perf_counter() - began) / flags.seconds if flags.seconds else number / steps
            before, losses = losses, {}
            for arm in ARMS:
                seen = batch if arm == "joint" else batch | {"patches": np.zeros_like(batch["patches"])}
                states[arm], metrics = programs.step(vision.along(states[arm], share, steps), seen)
                losses[arm] = metrics["train/loss"]
            number, batch = number + 1, next(batches)
            before = {arm: vision.finite(loss, number - 1) for arm, loss in before.items()}
            if before and number % 50 == 0:
                say(f"step {number - 1} losses {before}")
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
    """(steps [E, S], nats [E, S, arm, N], tokens [N], texts) of the S runs in a folder, as far as all of them came."""
    import numpy as np

    runs = [np.load(path) for path in sorted(Path(folder).glob("*.npz"))]
    if not runs:
        raise UsageError(f"flag --out={folder}: no run there; train one without --compare")
    n = min(len(run["steps"]) for run in runs)
    stack = lambda name: np.stack([run[name][:n] for run in runs], 1)
    return stack("steps"), stack("nats_EAN"), runs[0]["tokens_N"], runs[0]["texts"]


def conclude(steps_ES, nats_ESAN, tokens_N, texts):
    """Lines: each arm's lowest evaluation and its last, their differences by seed, and the captions that pictures
    helped most and least where either arm is lowest.

    Args:
      steps_ES: when each run was evaluated.
      nats_ESAN: of every held-out caption then, for the arms joint and blind.
      tokens_N: bytes of each, with its end.
    """
    import numpy as np

    loss_ESA = nats_ESAN.sum(-1) / tokens_N.sum()
    by_seed = lambda x: " ".join(f"{v:+.4f}" for v in x)
    seeds, arms = np.arange(loss_ESA.shape[1])[:, None], np.arange(2)
    for name, at_SA in (("last", np.full_like(seeds * arms, len(loss_ESA) - 1)), ("lowest", loss_ESA.argmin(0))):
        loss_SA, nats_SAN = loss_ESA[at_SA, seeds, arms], nats_ESAN[at_SA, seeds, arms]
        apart_S, helped_N = loss_SA[:, 0] - loss_SA[:, 1], (nats_SAN[:, 0] - nats_SAN[:, 1]).mean(0)
        joint, blind = loss_SA.mean(0)
        yield f"{name:6} joint {joint:.4f}, blind {blind:.4f}: {apart_S.mean():+.4f}, by seed {by_seed(apart_S)}"
        error = helped_N.std() * len(helped_N) ** 0.5 / tokens_N.sum()
        yield f"       standard error over captions {error:.4f}; {(helped_N < 0).mean():.0%} of them helped"
        yield "       after steps " + ", ".join(f"{a} and {b}" for a, b in steps_ES[at_SA, seeds])
    for steps_S, loss_SA in zip(steps_ES, loss_ESA):
        joint, blind = loss_SA.mean(0)
        yield f"step {steps_S[0]:6} joint {joint:.4f}, blind {blind:.4f}: {by_seed(loss_SA[:, 0] - loss_SA[:, 1])}"
    for i in np.argsort(helped_N):
        alone = nats_SAN[:, 1, i].mean()
        yield f"{helped_N[i]:+8.2f} nats, blind {alone:7.2f}, {tokens_N[i]:3} tokens: {texts[i][:80]}"


def run(flags):
    from trillium_moe.config import check

    if not flags.compare:
        config = replace(config_of(flags), seed=flags.seed)
        check("captions" in config.images.tasks, "images.tasks", config.images.tasks, "must name captions")
        return train(config, flags, Path(flags.out, f"{flags.seed}.npz"))
    lines = list(conclude(*load(flags.out)))
    print(*lines, sep="\n")
    return {"lines": lines}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run, config="configs/vision.py:scale=small"))

"""What pictures are worth to the captions of pictures that were never seen.

  F="--config=configs/vision.py:scale=small --config.images.path=runs/data/captions.jsonl --out=runs/captions"
  for seed in 0 1 2; do
    python -m benchmarks.captions $F --arm=joint --seed=$seed    # sees the pictures
    python -m benchmarks.captions $F --arm=blind --seed=$seed    # reads the same texts and sees black ones
  done
  python -m benchmarks.captions $F                               # compares what lies in --out

A run is one of `benchmarks.vision`; after every evaluation it writes the nats of every held-out caption. Runs may be
processes beside each other: with JAX_COMPILATION_CACHE_DIR set, those that begin later compile nothing.
"""

import sys
from dataclasses import replace
from pathlib import Path

from absl.flags import DEFINE_integer, DEFINE_string

from benchmarks import vision
from experiments.common import UsageError, command, config_of

ARMS = ("joint", "blind")


def define(flags):
    vision.define_run(flags)
    own = {"flag_values": flags}
    DEFINE_string("arm", "", f"what to train: {' or '.join(ARMS)}; nothing: compare the runs in --out", **own)
    DEFINE_integer("seed", 0, "of the run", lower_bound=0, **own)
    DEFINE_string("out", "runs/captions", "folder of the runs' figures", **own)


def train(flags, out):
    """Trains a run and writes `out`, ARM_SEED.npz: the steps of its evaluations and the nats of every caption."""
    import numpy as np

    from trillium_moe.config import check
    from trillium_moe.data.tokenizer import make_tokenizer

    config = config_of(flags)
    check("captions" in config.images.tasks, "images.tasks", config.images.tasks, "must name captions")
    config = replace(vision.arm_config(config, flags.arm), seed=flags.seed)
    tokenizer = make_tokenizer(config.data)
    say = lambda text: print(f"[{flags.arm} {flags.seed}] {text}", flush=True)
    steps, nats = [], []

    def keep(number, suite):
        found = suite.found["captions"]
        steps.append(number)
        nats.append([a.nats.sum() for a in found])
        texts = [example.answer for example in suite.examples["captions"]]
        out.parent.mkdir(parents=True, exist_ok=True)
        np.savez(out, steps=steps, nats_EN=nats, tokens_N=[len(a.nats) for a in found], texts=texts)

    programs = vision.Programs(config, tokenizer)
    say("compiled")
    return vision.train(programs, config, flags, say, keep)


def load(folder):
    """(steps, nats [E, R, N] of joint and blind in turn by seed, tokens [N], texts) of the runs in a folder, as far as
    all of them came."""
    import numpy as np

    seeds = sorted(int(path.stem.removeprefix("joint_")) for path in Path(folder).glob("joint_*.npz"))
    missing = [f"blind_{seed}.npz" for seed in seeds if not Path(folder, f"blind_{seed}.npz").exists()]
    if not seeds or missing:
        raise UsageError(f"flag --out={folder}: no {missing[0] if seeds else 'joint_*.npz'} there; train it with --arm")
    runs = [np.load(Path(folder, f"{arm}_{seed}.npz")) for seed in seeds for arm in ARMS]
    n = min(len(run["steps"]) for run in runs)
    if any((run["steps"][:n] != runs[0]["steps"][:n]).any() for run in runs):
        raise UsageError(f"flag --out={folder}: the runs were evaluated after other steps; give all the same --every")
    nats_ERN = np.stack([run["nats_EN"][:n] for run in runs], 1)
    return runs[0]["steps"][:n], nats_ERN, runs[0]["tokens_N"], runs[0]["texts"]


def conclude(steps, nats_ERN, tokens_N, texts):
    """Lines: each arm's lowest evaluation and its last, their differences, and the captions that pictures helped most
    and least where either arm is lowest.

    Args:
      nats_ERN: of every held-out caption, in the evaluations after `steps`.
      tokens_N: bytes of each, with its end.
    """
    import numpy as np

    loss_ER = nats_ERN.sum(-1) / tokens_N.sum()
    by_seed = lambda x: " ".join(f"{v:+.4f}" for v in x)
    runs = np.arange(loss_ER.shape[1])
    for name, at_R in (("lowest", loss_ER.argmin(0)), ("last", np.full(len(runs), len(steps) - 1))):
        loss_R, nats_RN = loss_ER[at_R, runs], nats_ERN[at_R, runs]
        apart, helped_N = loss_R[::2] - loss_R[1::2], (nats_RN[::2] - nats_RN[1::2]).mean(0)
        error = helped_N.std() * len(helped_N) ** 0.5 / tokens_N.sum()
        spread = f", deviation {apart.std(ddof=1):.4f}" if len(apart) > 1 else ""
        yield (f"{name:6} joint {loss_R[::2].mean():.4f}, blind {loss_R[1::2].mean():.4f}: {apart.mean():+.4f} "
               f"by seed {by_seed(apart)}{spread}; standard error over captions {error:.4f}, "
               f"{(helped_N < 0).mean():.0%} of them helped; after steps {' '.join(str(steps[at]) for at in at_R)}")
        if name == "lowest":
            helped, alone = helped_N, nats_RN[1::2].mean(0)
    for step, loss_R in zip(steps, loss_ER):
        yield (f"step {step:6} joint {loss_R[::2].mean():.4f}, blind {loss_R[1::2].mean():.4f}: "
               f"{by_seed(loss_R[::2] - loss_R[1::2])}")
    for i in np.argsort(helped):
        yield f"{helped[i]:+8.2f} nats, blind {alone[i]:7.2f}, {tokens_N[i]:3} tokens: {texts[i][:80]}"


def run(flags):
    if flags.arm:
        if flags.arm not in ARMS:
            raise UsageError(f"flag --arm={flags.arm}: must be {' or '.join(ARMS)}, or nothing to compare the runs")
        return train(flags, Path(flags.out, f"{flags.arm}_{flags.seed}.npz"))
    lines = list(conclude(*load(flags.out)))
    print(*lines, sep="\n")
    return {"lines": lines}


if __name__ == "__main__":
    sys.exit(command(__doc__, define, run, config="configs/vision.py:scale=small"))

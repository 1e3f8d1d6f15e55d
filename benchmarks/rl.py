"""Reinforcement learning on one GPU: python -m benchmarks.rl --workdir=runs/rl_bench [--arms=lookup,k25-lag4]

    read_page, lookup, flaky, calculator, aggregate   RL from format SFT
    k25-lag4, grpo-lag0, grpo-lag4   the other objective, and rollouts that serve five updates; k25 with rollouts that
                serve one is `lookup` itself, whose SFT they begin with
    noise0.1, noise0.2   verdicts turned around with this probability (lookup, from its SFT)
    short, mid, far, long   up to 300, 3,000, 10,000 and 33,000 words precede each of two values or more, each from the
                policy before: `long` learns from trajectories beyond 64K tokens
    effort      format SFT that names efforts, and traces that give up after any number of calls (flaky, one key)
    low, high, max   one expert each, from `effort`, with token budgets
    distilled   one model from all three, from `effort`

Every arm is a run of experiments.rl, resumed where it was stopped, for each of `--seeds`; a line each. Processes with
arms or seeds of their own may share a workdir; who begins with another arm's policy waits for it. `--scale=cpu` takes
the small model and rollouts of configs/rl.py.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import numpy as np

from configs.rl import get_config
from trillium_moe.config import check_choice
from trillium_moe.config_files import from_config_dict, load_config
from trillium_moe.rl.config import RLConfig
from trillium_moe.rl.loop import train
from trillium_moe.rl.report import bounds, sft_only
from trillium_moe.rl.run import Run
from trillium_moe.train import checkpoint
from trillium_moe.train.metrics import read_metrics

ENVS = {  # steps of SFT until the copying of what was read is learned, updates, weight of the pull at first
    "read_page": ("read_page", 600, 280, 0.08),  # its index is of no use until it is followed: a longer pull
    "lookup": ("lookup", 1000, 140, 0.06),
    "flaky": ("flaky", 1200, 160, 0.06),
    "calculator": ("calculator", 2000, 180, 0.06),
    "aggregate": ("aggregate:docs=2:budget=2", 1200, 160, 0.06),
}
VARIANTS = {  # of `lookup`
    "k25-lag4": {"rollout": {"lag": 4}},
    "grpo-lag0": {"objective": {"name": "grpo", "std": True}},
    "grpo-lag4": {"objective": {"name": "grpo", "std": True}, "rollout": {"lag": 4}},
    "noise0.1": {"task": {"noise": 0.1}},
    "noise0.2": {"task": {"noise": 0.2}},
}
EFFORTS = {"low": 0.6, "high": 1.3, "max": 2.5}  # tau of each: one, three or all seven calls before an answer
EFFORT = "flaky:keys=1:busy=0.35:stale=0.35:budget=7"
LONG = "lookup:hops=2:budget=3:left=1"
ROADS = {  # begins with, words before a value, longest trajectory, groups, updates, held-out tasks
    "mid": ("short", (1000, 3000), 10_240, 8, 12, 32),
    "far": ("mid", (10_000,), 32_768, 8, 10, 32),
    "long": ("far", (33_000,), 69_632, 4, 40, 16),
}
ARMS = (*ENVS, *VARIANTS, "short", *ROADS, "effort", *EFFORTS, "distilled")


def changed(config, changes: dict):
    """The config with other values; changes of nested groups are dicts."""
    own = {name: changed(getattr(config, name), value) if isinstance(value, dict) else value
           for name, value in changes.items()}  # fmt: skip
    return dataclasses.replace(config, **own)


def config_of(arm: str, workdir: Path, scale: str = "gpu", updates: int = 0, sft: int = 0) -> RLConfig:
    """The run of an arm; `updates` and `sft`: other numbers of them. Directories that it begins with hold {seed}."""
    def base(env, steps, n, kl=0.06, anneal=0.75):
        n = updates or n
        return changed(from_config_dict(get_config(f"scale={scale},env={env}"), RLConfig), {
            "name": arm, "updates": n, "sft_only": False, "sft": {"steps": sft or steps},
            "objective": {"kl": kl, "kl_anneal": max(1, int(anneal * n))},
        })  # fmt: skip

    seed = lambda name: str(workdir / name / "seed{seed}")
    if arm in ENVS:
        return base(*ENVS[arm], anneal=1.0 if arm == "read_page" else 0.75)
    if arm in VARIANTS:
        return changed(base(*ENVS["lookup"]), {"start": seed("lookup") + "/sft"} | VARIANTS[arm])
    words = lambda *n: {"envs": tuple(f"{LONG}:prose={i}" for i in n)}
    sizes = lambda n, *chunks: {"max_tokens": n, "chunks": chunks}
    if arm == "short":
        return changed(base(LONG, 400, 20), {
            "task": words(0, 30, 300), "row": 1024, "rows": 16, "rollout": sizes(1024, 24, 128)})
    if arm in ROADS:  # wide micro-batches: a row takes as long as eight
        before, n, length, groups, steps, tasks = ROADS[arm]
        return changed(base(LONG, 400, steps, kl=0.0), {
            "task": words(*n), "row": length, "rows": 8, "start": seed(before), "eval_every": 8, "log_every": 1,
            "rollout": {"groups": groups, "samples": 4} | sizes(length, 24, 1024), "eval_tasks": tasks,
            "optim": {"lr": 1e-3}})
    names = (arm,) if arm in EFFORTS else tuple(EFFORTS)
    one = arm == "distilled"
    config = base(EFFORT, 600, 100 if one else 80, kl=0.0 if one else 0.06)
    config = changed(config, {"task": {"efforts": names}, "eval_tasks": 512 * len(names),
                              "eval_every": config.updates // 2, "sft": {"give_up": 0.5}})  # fmt: skip
    if arm == "effort":  # one update, which nothing uses
        return changed(config, {"updates": 1})
    config = changed(config, {"start": seed("effort") + "/sft"})
    if one:  # slowly: at a third of the rate the efforts come apart before giving up is forgotten
        return changed(config, {"teachers": tuple(map(seed, EFFORTS)), "optim": {"lr": 7e-4}})
    return changed(config, {"effort": {"tau": (EFFORTS[arm],), "anneal": config.updates // 3}})


def run(arm: str, config: RLConfig, seeds: list[int], workdir: Path) -> None:
    """Trains all seeds of one arm and prints them."""
    programs, marks, ends = Run(config), bounds(config), []
    for seed in seeds:
        folder = workdir / arm / f"seed{seed}"
        start, *teachers = (path.format(seed=seed) for path in (config.start, *config.teachers))
        wait(start, *teachers)
        own = dataclasses.replace(config, seed=seed, start=start, teachers=tuple(teachers))
        same = (start, own.teachers) == (config.start, config.teachers)
        train(own, folder, programs if same else None)
        lines = [m for m in read_metrics(folder) if "heldout/success" in m]
        first, last, other = lines[0], lines[-1], sft_only(folder)
        ends.append(last["heldout/success"])
        efforts = "".join(f"; {e} {last[f'heldout_{e}/success']:.3f} at {last[f'heldout_{e}/tokens']:.1f} tokens"
                          for e in config.task.efforts if f"heldout_{e}/success" in last)
        print(f"{arm:12s} seed {seed}  success {first['heldout/success']:.3f} -> {last['heldout/success']:.3f}, greedy "
              f"{first['greedy/success']:.3f} -> {last['greedy/success']:.3f}"
              + (f" (SFT only {other[-1]['heldout/success']:.3f})" if other else "")
              + f"  calls {first['heldout/calls']:.2f} -> {last['heldout/calls']:.2f}"
              f"  sampled {last['heldout/tokens']:.1f} of {last['heldout/length']:.0f} tokens{efforts}", flush=True)
    print(f"{arm:12s} mean {np.mean(ends):.3f} sd {np.std(ends):.3f}  oracle {marks['oracle_success']:.2f} with "
          f"{marks['oracle_calls']:.2f} calls, chance {marks['chance']:.3f}", flush=True)


def wait(*folders: str) -> None:
    """Until the runs that others train, or their SFT (RUN/sft), have their last checkpoint."""
    for folder in map(Path, filter(None, folders)):
        told = False
        while not _trained(folder):
            if not told:
                print(f"waits for {folder}", file=sys.stderr, flush=True)
            told = True
            time.sleep(1)


def _trained(folder: Path) -> bool:
    steps = checkpoint.steps(folder)
    return bool(steps) and (folder.name == "sft" or steps[-1] >= load_config(folder, RLConfig).updates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--scale", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--updates", type=int, default=0, help="of every arm; 0: the arm's own number")
    parser.add_argument("--sft", type=int, default=0, help="steps of SFT of every arm; 0: the arm's own number")
    args = parser.parse_args()
    arms = args.arms.split(",")
    for arm in arms:
        check_choice("--arms", arm, ARMS)
    for arm in arms:
        config = config_of(arm, args.workdir, args.scale, args.updates, args.sft)
        run(arm, config, [int(s) for s in args.seeds.split(",")], args.workdir)


if __name__ == "__main__":
    main()

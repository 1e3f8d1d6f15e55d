"""Reinforcement learning on one GPU: python -m benchmarks.rl --workdir=runs/rl_bench [--arms=lookup,objectives]

    read_page, lookup, flaky, calculator   RL from format SFT
    objectives  k25 and grpo with rollouts that serve one update, and five (read_page)
    noise       verdicts turned around with probability 0.1 and 0.2 (read_page)
    long        trajectories beyond 64K tokens: a policy of short ones goes on where 33,000 numbers precede a value
    effort      format SFT that reads the effort (flaky), from there
    low, high, max   one expert each, and
    distilled   one model from all three

Every arm is a run of experiments.rl, resumed where it was stopped; `--seeds` of each. One line a run. Processes with
arms or seeds of their own may share a workdir: the experts need `effort` and `distilled` needs them.
"""

import argparse
import dataclasses
from pathlib import Path

import numpy as np

from configs.rl import get_config
from trillium_moe.config import check_choice
from trillium_moe.config_files import from_config_dict
from trillium_moe.rl.config import RLConfig
from trillium_moe.rl.loop import train
from trillium_moe.rl.report import bounds, sft_only
from trillium_moe.rl.run import Run
from trillium_moe.train.metrics import read_metrics

ENVS = ("read_page", "lookup", "flaky", "calculator")
EFFORTS = {"low": 0.6, "high": 1.0, "max": 2.0}  # tau of each
ARMS = (*ENVS, "objectives", "noise", "long", "effort", *EFFORTS, "distilled")
LONG = "lookup:hops=2:budget=3"


def config_of(options: str, **changes) -> RLConfig:
    """A config of configs/rl.py at GPU scale without the arm of SFT alone; changes of nested groups are dicts of their
    fields."""
    config = from_config_dict(get_config(f"scale=gpu,{options}"), RLConfig)
    nested = {name: dataclasses.replace(getattr(config, name), **value) if isinstance(value, dict) else value
              for name, value in changes.items()}
    return dataclasses.replace(config, **{"sft_only": False} | nested)


def run(name: str, config: RLConfig, seeds: list[int], workdir: Path) -> None:
    """Trains all seeds of one arm and prints them."""
    programs, marks, ends = Run(config), bounds(config), []
    for seed in seeds:
        folder = workdir / name / f"seed{seed}"
        start = config.start.format(seed=seed)
        teachers = tuple(t.format(seed=seed) for t in config.teachers)
        own = dataclasses.replace(config, seed=seed, start=start, teachers=teachers)
        same = (start, teachers) == (config.start, config.teachers)
        train(own, folder, programs if same else None, progress=False)
        lines = [m for m in read_metrics(folder) if "heldout/success" in m]
        first, last, other = lines[0], lines[-1], sft_only(folder)
        ends.append(last["heldout/success"])
        efforts = "".join(f"; {e} {last[f'heldout_{e}/success']:.3f} at {last[f'heldout_{e}/tokens']:.1f} tokens"
                          for e in config.task.efforts if f"heldout_{e}/success" in last)
        print(f"{name:24s} seed {seed}  success {first['heldout/success']:.3f} -> {last['heldout/success']:.3f}"
              + (f" (SFT only {other[-1]['heldout/success']:.3f})" if other else "")
              + f"  calls {first['heldout/calls']:.2f} -> {last['heldout/calls']:.2f}"
              f"  length {last['heldout/length']:.0f}{efforts}", flush=True)
    print(f"{name:24s} mean {np.mean(ends):.3f} sd {np.std(ends):.3f}  oracle {marks['oracle_success']:.2f} with "
          f"{marks['oracle_calls']:.2f} calls, chance {marks['chance']:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--updates", type=int, default=100)
    args = parser.parse_args()
    seeds = [int(s) for s in args.seeds.split(",")]
    arms = args.arms.split(",")
    for arm in arms:
        check_choice("--arms", arm, ARMS)
    go = lambda name, config: run(name, dataclasses.replace(config, updates=args.updates), seeds, args.workdir)
    start = lambda name: str(args.workdir / name / "seed{seed}")
    for env in ENVS:
        if env in arms:
            go(env, config_of(f"env={env}"))
    if "objectives" in arms:
        for objective in ("k25", "grpo"):
            for lag in (0, 4):
                std = {"std": objective == "grpo"}
                go(f"{objective}-lag{lag}", config_of(f"objective={objective}", rollout={"lag": lag}, objective=std))
    if "noise" in arms:
        for noise in (0.1, 0.2):
            go(f"noise{noise}", config_of("", task={"noise": noise}))
    if "long" in arms:
        fillers = tuple(f"{LONG}:filler={n}" for n in (0, 30, 300))
        sizes = {"max_tokens": 1024, "chunks": (24, 128)}
        short = config_of("", task={"envs": fillers}, rollout=sizes, row=1024, rows=16, sft={"steps": 400})
        run("short", dataclasses.replace(short, updates=30), seeds[:1], args.workdir)
        sizes = {"groups": 2, "samples": 4, "max_tokens": 69_632, "chunks": (24, 1024)}
        long = config_of("", task={"envs": (f"{LONG}:filler=33000",)}, rollout=sizes, row=69_632, rows=1, eval_tasks=8,
                         start=start("short"))
        run("long", dataclasses.replace(long, updates=10, eval_every=5), seeds[:1], args.workdir)
    effort = lambda names, **kw: config_of("env=flaky", task={"efforts": names}, eval_tasks=384, eval_every=25, **kw)
    if "effort" in arms:  # one update, which nothing uses
        run("effort", dataclasses.replace(effort(tuple(EFFORTS)), updates=1), seeds, args.workdir)
    for name, tau in EFFORTS.items():
        if name in arms:
            go(name, effort((name,), effort={"tau": (tau,)}, start=start("effort") + "/sft"))
    if "distilled" in arms:
        go("distilled", effort(tuple(EFFORTS), objective={"kl": 0.0}, teachers=tuple(map(start, EFFORTS)),
                               start=start("effort") + "/sft"))


if __name__ == "__main__":
    main()

"""The context ladder: what each stage decides. `shrink` divides the window for small machines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trillium_moe.config import KINDS, Config, MixtureConfig, check, check_choice

RECALL = ("needle", "needle", "multi_query", "multi_value", "variable", "ordinal", "join")
ALL = (*RECALL, "needles", "common_words", "frequent_words", "graph", "document_qa", "count", "total", "chunk_order")


@dataclass(frozen=True)
class Stage:
    """One rung. Rows and mesh are those of shrink=1 on a pod."""

    window: int  # tokens per row
    rows: int  # per optimizer step; tokens per step stay 4M until a step would hold under 4 rows
    tokens: float  # share of the ladder's tokens
    mixture: MixtureConfig  # kinds of rows, tasks and their loss weight
    context: int  # devices that a row is cut over, if there are as many
    rewarm: float = 0.4  # with the rule `rewarm`: peak of the stage, as a share of the ladder's peak


def _mix(text: float, long: float, replay: float, joined: float, synthetic: float, weight: float) -> MixtureConfig:
    return MixtureConfig(text, long, replay, joined, synthetic, tasks=ALL, answer_weight=weight)


# Long rows 25 to 60 percent, the rest short (`training.md` B.1, B.2); the weight of an answer grows with the window,
# of which answers are an ever smaller part.
STAGES = {
    "8k": Stage(8_192, 512, 0.80, _mix(0.85, 0.0, 0.0, 0.05, 0.10, 2.0), 1),
    "64k": Stage(65_536, 64, 0.12, _mix(0.30, 0.30, 0.25, 0.05, 0.10, 4.0), 4),
    "256k": Stage(262_144, 16, 0.05, _mix(0.20, 0.40, 0.20, 0.08, 0.12, 8.0), 16),
    "1m": Stage(1_048_576, 4, 0.03, _mix(0.15, 0.45, 0.20, 0.08, 0.12, 16.0), 64),
}

# Mixtures for a model that is to show in minutes that it uses its window: nine rows in ten are recall, from the start.
# Recall is learned from short examples first: the first stage cuts all of its task rows, to 64 tokens (three needles or
# one) until 0.6 of it and then to sizes from there up.
RECALL_MIXTURES = {
    "8k": MixtureConfig(0.05, 0.0, 0.0, 0.05, 0.9, synthetic_from=0.0, tasks=RECALL[:3], answer_weight=4.0, split=1.0,
                        shortest=64, short_until=0.6),
} | {
    name: MixtureConfig(0.03, 0.05, 0.0, 0.02, 0.9, synthetic_from=0.0, tasks=RECALL[:3], answer_weight=4.0)
    for name in ("64k", "256k", "1m")
}
MIXTURES = {"pretrain": {name: stage.mixture for name, stage in STAGES.items()}, "recall": RECALL_MIXTURES}
RATES = ("continue", "rewarm")
EVALUATIONS = ("needle", "multi_query", "variable", "document_qa")  # after every stage, at every window of the ladder


def window(stage: str, shrink: int) -> int:
    """Tokens per row of a stage."""
    check_choice("stage", stage, tuple(STAGES))
    tokens = STAGES[stage].window
    check(shrink >= 1 and tokens % shrink == 0, "shrink", shrink, f"must divide the window of {tokens} tokens")
    return tokens // shrink


def ladder(
    base: Config,
    names: tuple[str, ...],
    *,
    tokens: int = 0,
    steps: tuple[int, ...] = (),
    mixtures: str = "pretrain",
    rate: str = "continue",
    floor: int = 4,
    devices: int = 1,
) -> dict[str, Config]:
    """The run of every stage, each to begin where the one before ends.

    Args:
      base: the first stage: model, data, optimizer, rows per step. Its window says by how much all are shrunk.
      names: stages, in order.
      tokens: of the whole ladder, split as STAGES says; 0: the base's.
      steps: instead of them, optimizer steps of every stage.
      mixtures: one of MIXTURES.
      rate: continue (one schedule over the ladder) or rewarm (a warm-up and a cosine of its own for every later stage).
      floor: rows per step at least; where a window leaves fewer, tokens per step grow.
      devices: rows are cut over as many of them as the stage asks for, unless the base cuts them already.

    Raises:
      ConfigError: for stages that do not grow, or a window that the first one's shrinking does not divide.
    """
    for name in names:
        check_choice("stages", name, tuple(STAGES))
    windows = [STAGES[name].window for name in names]
    check(len(names) > 0 and windows == sorted(set(windows)), "stages", ",".join(names),
          f"windows must grow from stage to stage; in order they are {','.join(STAGES)}")
    check_choice("mix", mixtures, tuple(MIXTURES))
    check_choice("rate", rate, RATES)
    check(len(steps) in (0, len(names)), "steps", steps, f"give one number for each of {','.join(names)}")
    shrink, rest = divmod(windows[0], base.data.seq_len)
    check(rest == 0 and shrink > 0, "data.seq_len", base.data.seq_len, f"must divide the {windows[0]} of {names[0]}")
    per_step = base.data.seq_len * base.data.batch_size
    total = tokens or base.train.steps * per_step
    share = sum(STAGES[name].tokens for name in names)
    out: dict[str, Config] = {}
    done = 0
    for i, name in enumerate(names):
        seq_len = window(name, shrink)
        rows = max(min(base.data.batch_size, floor), per_step // seq_len)
        rows = max(base.train.micro_batches, rows - rows % base.train.micro_batches)
        if not steps:
            n = max(1, round(total * STAGES[name].tokens / share / (rows * seq_len)))
        else:
            n = steps[i]
        mixture = MIXTURES[mixtures][name]
        if i:
            shares = tuple(getattr(MIXTURES[mixtures][names[i - 1]], kind) for kind in KINDS)
            mixture = replace(mixture, before=shares, replay_window=base.data.seq_len)
        context = base.mesh.context if base.mesh.context > 1 else math.gcd(devices, STAGES[name].context)
        out[name] = replace(
            base,
            name=f"{base.name.removesuffix(f'-{names[0]}')}-{name}",
            data=replace(base.data, seq_len=seq_len, batch_size=rows, mixture=mixture),
            train=replace(base.train, first_step=done, steps=done + n, start="before" if i else base.train.start),
            mesh=replace(base.mesh, context=context),
        )
        done += n
    for i, (name, config) in enumerate(out.items()):
        optim = replace(base.optim, horizon=done)
        if rate == "rewarm":
            optim = replace(base.optim, horizon=config.train.steps)
            if i:
                peak = base.optim.lr * STAGES[name].rewarm
                optim = replace(optim, begin=config.train.first_step, lr=peak, warmup=0.1)
        out[name] = replace(config, optim=optim)
    return out

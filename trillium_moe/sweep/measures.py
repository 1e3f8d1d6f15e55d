"""Columns of a sweep's table beside the held-out loss: each is a number read off the metrics of one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Lines = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Measure:
    title: str
    read: Callable[[Lines], float | None]  # None: the run does not have it, or never got there
    digits: int = 3
    missing: str = "-"  # what a table says of runs that do not have it


def last(name: str) -> Callable[[Lines], float | None]:
    """The newest value of a metric."""
    return lambda lines: next((line[name] for line in reversed(lines) if name in line), None)


def highest(name: str) -> Callable[[Lines], float | None]:
    return lambda lines: max((line[name] for line in lines if name in line), default=None)


def steps_below(limit: Callable[[dict[str, Any]], float]) -> Callable[[Lines], float | None]:
    """The first step after its peak at which MaxVio, mean over layers, is below the limit of that step.

    After its peak: a new router is balanced, because it knows nothing; it is learning that unbalances it.
    """
    def read(lines: Lines) -> float | None:
        lines = [line for line in lines if "router/floor" in line]
        peak = max(range(len(lines)), key=lambda i: lines[i]["router/max_violation"], default=0)
        for line in lines[peak:]:
            if line["router/max_violation"] < limit(line):
                return float(line["step"])
        return None

    return read


def violation_area(lines: Lines) -> float | None:
    """Mean of MaxVio over the steps of the run (area under the curve, over its length)."""
    pairs = [(line["step"], line["router/max_violation"]) for line in lines if "router/max_violation" in line]
    if len(pairs) < 2:
        return None
    steps, values = np.array(pairs, float).T
    return float(np.trapezoid(values, steps) / (steps[-1] - steps[0]))


def violation_tail(lines: Lines) -> float | None:
    """Mean of MaxVio over the last fifth of the steps."""
    values = [line["router/max_violation"] for line in lines if "router/max_violation" in line]
    return float(np.mean(values[-max(1, len(values) // 5):])) if values else None


MEASURES = {
    "steps_to_balance": Measure("step of MaxVio < 2 floors, after its peak",
                                steps_below(lambda line: 2 * line["router/floor"]), 0, "never"),
    "steps_to_half": Measure("step of MaxVio < 0.5, after its peak", steps_below(lambda line: 0.5), 0, "never"),
    "violation_area": Measure("mean MaxVio", violation_area),
    "violation_tail": Measure("MaxVio, last fifth", violation_tail),
    "violation_floor": Measure("sampling floor", last("router/floor")),
    "dead_experts": Measure("dead experts", last("router/dead_total"), 0),
    "churn": Measure("routing churn", last("router/churn")),
    "gate_max": Measure("largest value before the activation", lambda lines: None, 1),  # by the probe `activations`
    "activation_max": Measure("and after it", lambda lines: None, 1),  # likewise
    "max_logit": Measure("largest attention logit", highest("mla/max_logit"), 1),
    "min_log_decay": Measure("fastest log decay", last("kda/min_log_decay"), 2),
    "grad_norm_max": Measure("largest gradient norm", highest("train/grad_norm"), 2),
}

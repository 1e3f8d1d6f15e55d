"""From rewards to advantages: one number for every turn of every sample of a group."""

from __future__ import annotations

import zlib

import numpy as np

from trillium_moe.rl.config import EffortConfig, ObjectiveConfig, TaskConfig
from trillium_moe.rl.trajectory import Group, Trajectory


def rewards(t: Trajectory, task: TaskConfig, budget: float = 0.0) -> list[float]:
    """Rewards of a trajectory's turns as training sees them: noise, budget, sparsity, delay, in this order.

    Args:
      budget: sampled tokens; a longer trajectory has the reward -1, all of it at the last turn. 0: no budget.
    """
    out = list(t.rewards)
    if task.noise and np.random.default_rng([zlib.crc32(t.id.encode()), t.seed]).random() < task.noise:
        out[-1] += 1 - 2 * t.success
    if task.sparse:
        out[:-1] = [0.0] * (len(out) - 1)
    if budget and t.sampled > budget:
        out = [0.0] * (len(out) - 1) + [-1.0]
    if task.delay:
        late = [0.0] * len(out)
        for i, r in enumerate(out):
            late[min(i + task.delay, len(out) - 1)] += r
        out = late
    return out


def shaped(rewards: list[float], potentials: list[float], c: ObjectiveConfig) -> list[float]:
    """r + w (gamma Phi' - Phi), Phi of the end being 0: the best policy stays the best one (Ng et al. 1999)."""
    after = [*potentials[1:], 0.0]
    return [r + c.shaping * (c.gamma * b - a) for r, a, b in zip(rewards, potentials, after)]


def advantages(turn_rewards: list[list[float]], c: ObjectiveConfig) -> list[np.ndarray]:
    """Advantage of every turn, for the samples of one group.

    outcome: sum of rewards minus the group's mean (leave_one_out: the mean of the others), the same at every turn.
    turn: discounted return from the turn on, minus the mean of what the samples of the group that reached this turn
      got from it on (baseline=turn), or minus the mean return from the start (mean, leave_one_out).
    """
    totals = np.array([sum(r) for r in turn_rewards])
    K = len(totals)
    if c.baseline == "leave_one_out" and K > 1:
        base = (totals.sum() - totals) / (K - 1)
    else:
        base = np.full(K, totals.mean())
    scale = 1 / (totals.std() + 1e-6) if c.std else 1.0
    if c.credit == "outcome":
        return [np.full(len(r), (total - b) * scale) for r, total, b in zip(turn_rewards, totals, base)]
    returns = []
    for r in turn_rewards:
        g = np.zeros(len(r))
        for u in reversed(range(len(r))):
            g[u] = r[u] + (c.gamma * g[u + 1] if u + 1 < len(r) else 0.0)
        returns.append(g)
    if c.baseline != "turn":
        return [(g - b) * scale for g, b in zip(returns, base)]
    longest = max(map(len, returns))
    mean = [np.mean([g[u] for g in returns if len(g) > u]) for u in range(longest)]
    return [(g - mean[: len(g)]) * scale for g in returns]


def group_advantages(
    group: Group, task: TaskConfig, c: ObjectiveConfig, budget: float = 0.0
) -> tuple[list[np.ndarray], np.ndarray]:
    """Advantages of every turn of a group's samples, and the rewards they come from [K]."""
    turns = [rewards(t, task, budget) for t in group]
    totals = np.array([sum(r) for r in turns])
    if c.shaping:
        turns = [shaped(r, t.potentials, c) for r, t in zip(turns, group)]
    return advantages(turns, c), totals


def tau_of(c: EffortConfig, effort: str, efforts: tuple[str, ...], update: int) -> float:
    """Factor on b0 at an update: from `start` to the effort's own value, linearly over `anneal` updates. 0: none."""
    if not c.tau:
        return 0.0
    own = c.tau[efforts.index(effort)]
    part = min(1.0, update / c.anneal) if c.anneal else 1.0
    return c.start + (own - c.start) * part


def kl_of(c: ObjectiveConfig, update: int) -> float:
    """Weight of the divergence at an update: from `kl` to zero over `kl_anneal` updates, linearly; 0: constant."""
    return c.kl * max(0.0, 1 - update / c.kl_anneal) if c.kl_anneal else c.kl

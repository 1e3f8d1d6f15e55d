"""How evenly tokens spread over experts: what to watch of one [layers, experts] array of counts, and when to warn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from trillium_moe.config import TrainConfig
from trillium_moe.shapes import Array, Float, Int

DEAD = 0.1  # an expert with less than this share of the mean load counts as dead


def load_metrics(
    load_LE: Int[Array, "L E"], bias_LE: Float[Array, "L E"], ranks: int, floor: Float[Array, ""]
) -> dict[str, Array]:
    """Metrics of a step's loads: one value a layer (names in _L) and their mean, and the worst where it matters.

    Args:
      load_LE: tokens per expert, over the whole batch.
      ranks: devices that E / ranks neighbouring experts each live on.
      floor: MaxVio that sampling alone causes, sqrt(2 ln E / q) (training.md D.2).

    Returns:
      router/max_violation: largest load / mean - 1; also _worst, of all layers.
      router/min_violation: 1 - smallest load / mean: 1 if an expert has no token.
      router/dead: experts with less than DEAD of the mean, of a layer; _total, of all layers.
      router/entropy: of the loads as shares, over its largest value ln E.
      router/effective_experts: e^H, how many equally loaded experts have the same entropy.
      router/rank_imbalance: busiest device / mean - 1 at the experts' homes: what time is lost without replicas.
      router/bias_spread: largest - smallest bias of live experts.
      router/floor: as given.
    """
    load = load_LE.astype(jnp.float32)
    relative = load / jnp.maximum(load.mean(-1, keepdims=True), 1e-9)
    share = relative / load.shape[-1]
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1)), -1)
    live = jnp.isfinite(bias_LE)
    by_layer = {
        "max_violation": relative.max(-1) - 1,
        "min_violation": 1 - relative.min(-1),
        "dead": (relative < DEAD).sum(-1),
        "entropy": entropy / np.log(load.shape[-1]),
        "effective_experts": jnp.exp(entropy),
        "rank_imbalance": relative.reshape(load.shape[0], ranks, -1).mean(-1).max(-1) - 1,
        "bias_spread": jnp.where(live, bias_LE, -jnp.inf).max(-1) - jnp.where(live, bias_LE, jnp.inf).min(-1),
    }
    out = {f"router/{name}": value.mean() for name, value in by_layer.items()}
    out |= {f"router/{name}_L": value for name, value in by_layer.items()}
    out["router/max_violation_worst"] = by_layer["max_violation"].max()
    out["router/dead_total"] = by_layer["dead"].sum()
    out["router/floor"] = floor
    return out


def alarms(config: TrainConfig, metrics: Mapping[str, Any]) -> list[str]:
    """One line for every threshold that a layer has passed, naming the worst layer (counted among the MoE layers)."""
    out = []
    if config.alarm_violation and "router/max_violation_L" in metrics:
        violation, floor = np.asarray(metrics["router/max_violation_L"]), float(metrics["router/floor"])
        above = violation > config.alarm_violation
        if above.any():
            out.append(f"MoE layer {violation.argmax()}: MaxVio {violation.max():.2f} is above train.alarm_violation="
                       f"{config.alarm_violation:g} (sampling alone: {floor:.2f}; layers above: {above.sum()})")
    if config.alarm_dead and "router/dead_L" in metrics:
        dead, n = np.asarray(metrics["router/dead_L"]), metrics["router/load_LE"].shape[-1]
        if dead.max() > config.alarm_dead * n:
            out.append(f"MoE layer {dead.argmax()}: {dead.max()} of {n} experts have less than {DEAD:g} of the mean "
                       f"load, more than train.alarm_dead={config.alarm_dead:g} allows")
    return out

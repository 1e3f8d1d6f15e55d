"""Parameter counts from a config alone: shapes through `jax.eval_shape`, nothing allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
from flax import nnx

from trillium_moe.config import ModelConfig
from trillium_moe.model.trillium import Trillium

INPUT = "input embedding"
MTP = "multi-token prediction"
VISION = "vision"


@dataclass(frozen=True)
class Count:
    """Parameters of one module. `active` is how many of them one token meets: routed experts count k / n_experts."""

    total: int = 0
    active: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(self.total + other.total, self.active + other.active)


def count_modules(config: ModelConfig) -> dict[str, Count]:
    """Counts by module, in the order a token passes them. The router bias is state and not counted."""
    params = jax.eval_shape(lambda: nnx.state(Trillium(config, rngs=nnx.Rngs(0)), nnx.Param))
    order = [INPUT, *(_row(config, (kind,)) for kind in ("kda", "mla", "dense")), "MoE router", _experts(config),
             "MoE shared experts", "MoE latent projections", "norms and depth reads", "output head", MTP, VISION]
    counts = dict.fromkeys(order, Count())
    for path, variable in nnx.to_flat_state(params):
        size = math.prod(variable.get_value().shape)
        routed = "expert_mlp" in variable.get_metadata()["axes"]
        active = size * config.moe.k // config.moe.n_experts if routed else size
        counts[_experts(config) if routed and path[0] == "moe" else _row(config, path)] += Count(size, active)
    return {name: count for name, count in counts.items() if count.total}


def totals(counts: dict[str, Count]) -> dict[str, int]:
    """The sums that model cards quote. Multi-token prediction is training only and in `total` alone."""
    total = sum(counts.values(), Count())
    aside = sum((counts.get(name, Count()) for name in (MTP, VISION)), Count())
    return {
        "text": total.total - aside.total,
        "active_text_without_input_embedding": total.active - aside.active - counts[INPUT].active,
        "vision": counts.get(VISION, Count()).total,
        "total": total.total,
    }


def human(n: int | float) -> str:
    """1_234_567 as 1.23M."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= size:
            return f"{n / size:.4g}{unit}"
    return f"{n:.0f}"


def _row(config: ModelConfig, path: tuple) -> str:
    """The module of a parameter that is no routed expert."""
    match path[0]:
        case "embed":
            return INPUT
        case "head":
            return "output head"
        case "kda" | "mla":
            return f"{path[0].upper()} ({config.mixers.count(path[0])} layers)"
        case "dense":
            return f"dense FFN ({config.ffns.count('dense')} layers)"
        case "mtp":
            return MTP
        case "vision":
            return VISION
        case "moe" if path[1] == "router":
            return "MoE router"
        case "moe":
            return "MoE shared experts" if path[1] == "shared" else "MoE latent projections"
    return "norms and depth reads"


def _experts(config: ModelConfig) -> str:
    return f"MoE experts ({config.ffns.count('moe')} layers, {config.moe.k} of {config.moe.n_experts})"

"""Attention over depth against plain residual sums, and the size of a block."""

from configs.ablations.common import base
from trillium_moe.sweep.plan import Sweep, chain, named


def get_sweep(options: str = "") -> Sweep:
    config, seeds = base(options)
    sizes = [size for size in (1, 2, 4, 8) if size != config.model.block_size]
    return Sweep(
        question="Attention residuals: none, blocks, every sublayer",
        base=config,
        arms=chain(
            named("none", **{"model.residual": "none"}),
            named(f"blocks of {config.model.block_size} layers"),
            *(named(f"blocks of {size} layer{'s' * (size > 1)}", **{"model.block_size": size}) for size in sizes),
            named("full", **{"model.residual": "full"}),
        ),
        baseline="none",
        seeds=seeds,
        measures=("grad_norm_max", "max_logit"),
        published="block -0.020, full -0.029 nats (Attention Residuals, arXiv 2603.15031, 38.7B to 119B tokens: -0.022 "
                  "to -0.026 and -0.021 to -0.032 over sizes); in JAX at 20.8M active parameters and 1.25B tokens "
                  "-0.009 (marin-community/marin).",
    )

"""Does bounding KDA's decay cost anything, and where should the bound lie?"""

from configs.ablations.common import base
from trillium_moe.sweep.plan import Sweep, chain, named


def get_sweep(options: str = "") -> Sweep:
    config, seeds = base(options)
    g_min = lambda value: named(f"bounded, g_min {value:g}", **{"model.kda.g_min": value})
    return Sweep(
        question="Decay of KDA: bounded or softplus, and the bound",
        base=config,
        arms=chain(
            named("bounded, g_min -5"),
            g_min(-1.0),
            g_min(-2.5),
            named("bounded, g_min -10", **{"model.kda.decay": "deep", "model.kda.g_min": -10.0}),
            named("softplus", **{"model.kda.decay": "softplus"}),
        ),
        baseline="bounded, g_min -5",
        seeds=seeds,
        measures=("min_log_decay", "grad_norm_max"),
        published="no losses; the Kimi K3 report bounds the decay for the kernel's sake.",
    )

"""SiTU-GLU and its caps against SwiGLU."""

from configs.ablations.common import base
from trillium_moe.sweep.plan import Sweep, chain, named


def get_sweep(options: str = "") -> Sweep:
    config, seeds = base(options)
    caps = lambda gate, up: named(f"SiTU {gate:g}/{up:g}", **{"model.situ_beta": gate, "model.situ_linear_beta": up})
    return Sweep(
        question="Activation: SiTU and its caps, SwiGLU",
        base=config,
        arms=chain(named("SiTU 4/25"), caps(2.0, 8.0), caps(1.0, 1.0),
                   named("SwiGLU", **{"model.activation": "swiglu"})),
        baseline="SiTU 4/25",
        seeds=seeds,
        measures=("gate_max", "activation_max", "grad_norm_max"),
        probes=("activations",),
        published="no losses for 4/25, which the Kimi K3 report gives for stability; a gate and a linear part capped "
                  "at 1 trained 0.72 to 0.76 times as fast as SwiGLU (marin-community/marin).",
    )

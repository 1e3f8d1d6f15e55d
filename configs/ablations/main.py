"""The main questions against one baseline, so that its seeds are run once: balancing, residuals, decay, activation.

More arms of each question are in the file that is named after it.
Options of its own: `arms`, names with + between, to run some of them (the baseline is always run); `probe`, what is
measured of every finished run's model (nothing after an empty `probe=`): it compiles programs of its own.
"""

from configs.ablations.common import base, pick
from trillium_moe.config import check_choice
from trillium_moe.sweep.plan import Sweep, chain, named
from trillium_moe.sweep.probe import PROBES


def get_sweep(options: str = "") -> Sweep:
    options, wanted = pick(options, "arms")
    options, probe = pick(options, "probe", "activations")
    probes = tuple(filter(None, probe.split("+")))
    for name in probes:
        check_choice("option probe", name, tuple(PROBES))
    config, seeds = base(options)
    arms = chain(
        named("as released"),
        named("residual none", **{"model.residual": "none"}),
        named("softplus decay", **{"model.kda.decay": "softplus"}),
        named("SwiGLU", **{"model.activation": "swiglu"}),
        named("balancing sign 1e-3", **{"model.moe.balancing": "sign"}),
        named("balancing aux loss", **{"model.moe.balancing": "aux_loss"}),
        named("balancing none", **{"model.moe.balancing": "none"}),
        named("no latent norm", **{"model.moe.latent_norm": False}),
        named("residual full", **{"model.residual": "full"}),
        named("SiTU 1/1", **{"model.situ_beta": 1.0, "model.situ_linear_beta": 1.0}),
        named("g_min -1", **{"model.kda.g_min": -1.0}),
    )
    if wanted:
        wanted = ("as released", *wanted.split("+"))
        for name in wanted:
            check_choice("option arms", name, tuple(arm.name for arm in arms))
        arms = tuple(arm for arm in arms if arm.name in wanted)
    return Sweep(
        question="Balancing, residuals, decay, activation: one change at a time",
        base=config,
        arms=arms,
        baseline="as released",
        seeds=seeds,
        measures=("steps_to_balance", "steps_to_half", "violation_area", "violation_tail", "violation_floor",
                  "gate_max", "activation_max", "min_log_decay", "grad_norm_max"),
        probes=probes,
        published="attention residuals in blocks -0.01 to -0.025 nats against none; latent experts without norm "
                  "worse by 0.03 to 0.04 than with it; SiTU 4/25 neutral; balancing rules within 0.01 nats, quantile "
                  "balanced after about 5 steps, sign 1e-3 after hundreds (sources: docs/ablations.md).",
    )

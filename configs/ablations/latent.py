"""Experts in a latent width: its ratio to the model's at equal active FLOPs, and the norm before the way back up."""

from configs.ablations.common import base
from trillium_moe.sweep.plan import Sweep, chain, named


def get_sweep(options: str = "") -> Sweep:
    config, seeds = base(options)
    D, moe = config.model.d_model, config.model.moe

    def at(latent: int) -> tuple:
        """The expert width with which k experts and the two projections cost what the base's cost, in eights."""
        budget = 3 * moe.k * moe.latent_dim * moe.expert_dim + 2 * D * moe.latent_dim
        spent = 2 * D * latent if latent < D else 0
        width = max(8, round((budget - spent) / (3 * moe.k * latent) / 8) * 8)
        keys = {"model.moe.latent_dim": latent if latent < D else 0, "model.moe.expert_dim": width,
                "model.moe.n_shared": 0}
        return named(f"latent {latent}/{D}", **keys)

    shared = {"model.moe.n_shared": 0}  # the shared experts' width would follow that of the routed ones
    return Sweep(
        question="Latent experts: ratio and norm, without shared experts, at equal active FLOPs",
        base=config,
        arms=chain(
            named(f"latent {moe.latent_dim}/{D}", **shared),
            named(f"latent {moe.latent_dim}/{D}, no norm", **shared, **{"model.moe.latent_norm": False}),
            at(D // 4),
            at(D),
        ),
        baseline=f"latent {moe.latent_dim}/{D}",
        seeds=seeds,
        measures=("grad_norm_max", "max_logit"),
        published="at equal experts +0.055 and +0.045 nats without the norm, +0.012 and +0.0045 with it, against "
                  "full-width experts (marin-community/marin, 20.8M and 60.6M active parameters).",
    )

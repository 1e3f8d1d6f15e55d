"""AdamW, Muon over whole matrices and over heads, QK-Clip: the learning rate chosen anew for each."""

from configs.ablations.common import base
from trillium_moe.sweep.plan import Sweep, chain, named, over, product


def get_sweep(options: str = "") -> Sweep:
    config, seeds = base(options)
    lr = config.optim.lr
    return Sweep(
        question="Optimizer: AdamW, Muon, Muon per head, QK-Clip",
        base=config,
        arms=product(
            chain(
                named("Muon per head, QK-Clip"),
                named("Muon per head", **{"optim.qk_clip": 0.0}),
                named("Muon", **{"optim.per_head": False, "optim.qk_clip": 0.0}),
                named("AdamW", **{"optim.name": "adamw", "optim.qk_clip": 0.0}),
            ),
            over("optim.lr", (lr / 2, lr, 2 * lr), "tuned"),
        ),
        baseline="Muon per head, QK-Clip",
        seeds=seeds,
        measures=("max_logit", "grad_norm_max"),
        published="Muon needs about half of AdamW's compute (Moonlight, arXiv 2502.16982); -0.056 nats at 20.8M active "
                  "parameters, shrinking with scale (marin-community/marin). Per-head Muon: no numbers.",
    )

"""Cosine against warm-up, stable, decay: the learning rate chosen anew for each."""

from configs.ablations.common import base
from trillium_moe.sweep.plan import Sweep, chain, named, over, product


def get_sweep(options: str = "") -> Sweep:
    config, seeds = base(options)
    lr = config.optim.lr
    return Sweep(
        question="Learning-rate schedule: cosine or warm-up, stable, decay",
        base=config,
        arms=product(
            chain(named("cosine"), named("wsd", **{"optim.schedule": "wsd"})),
            over("optim.lr", (lr / 2, lr, 2 * lr), "tuned"),
        ),
        baseline="cosine",
        seeds=seeds,
        published="cosine ends lower when both are tuned for themselves (Kimi K3 report; no numbers).",
    )

"""Routed experts trained through MXFP4 weights and MXFP8 inputs against bfloat16 ones."""

from dataclasses import replace

from configs.ablations.common import base
from pallas_kernels.mxfp4 import GROUP
from trillium_moe.sweep.plan import Sweep, chain, named


def get_sweep(options: str = "") -> Sweep:
    config, seeds = base(options)
    moe, up = config.model.moe, lambda n: -(-n // GROUP) * GROUP  # tiny's experts are no multiple of a group wide
    moe = replace(moe, expert_dim=up(moe.expert_dim), latent_dim=up(moe.latent_dim))
    return Sweep(
        question="Quantisation-aware training: MXFP4 experts with MXFP8 inputs",
        base=replace(config, model=replace(config.model, moe=moe)),
        arms=chain(named("unquantised"), named("MXFP4", **{"model.moe.quantise": "mxfp4"})),
        baseline="unquantised",
        seeds=seeds,
        measures=("grad_norm_max", "max_logit"),
        published="no losses; Kimi K3 was trained like this from supervised fine-tuning on (arXiv 2607.24653).",
    )

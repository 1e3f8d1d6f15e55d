"""What mixes tokens: attention with and without positions, KDA, their ratio, and KDA's parts one by one."""

from configs.ablations.common import base
from trillium_moe.sweep.plan import Sweep, chain, named


def get_sweep(options: str = "") -> Sweep:
    config, seeds = base(options)
    return Sweep(
        question="Token mixer: attention, KDA, and what KDA is made of",
        base=config,
        arms=chain(
            named("KDA:MLA 3:1"),
            named("1:1", **{"model.kda_per_mla": 1}),
            named("7:1", **{"model.kda_per_mla": 7}),
            named("MLA, no positions", **{"model.kda_per_mla": 0}),
            named("MLA, RoPE", **{"model.kda_per_mla": 0, "model.mla.position": "rope"}),
            named("3:1, RoPE in MLA", **{"model.mla.position": "rope"}),
            named("one decay per head", **{"model.kda.decay_per": "head"}),
            named("last layer not global", **{"model.final_global": False}),
            named("no output gate in KDA", **{"model.kda.gate": "none"}),
            named("low-rank gate in KDA", **{"model.kda.gate": "low_rank"}),
            named("no convolution", **{"model.kda.conv_size": 0}),
        ),
        baseline="KDA:MLA 3:1",
        seeds=seeds,
        measures=("min_log_decay", "max_logit"),
        published="validation perplexity 5.65 at 3:1, 5.66 at 1:1, 5.70 at 7:1, 5.77 for MLA alone, 5.67 without gate, "
                  "5.70 without convolution (Kimi Linear, arXiv 2510.26692, 38.8B tokens).",
    )

"""How fast does a balancing rule balance, and does the model pay for it?

Steps to balance and the area under MaxVio are the outcome: published differences in loss (0.006 nats between the
auxiliary loss and the sign rule, Wang et al. 2024) are within the noise of runs as short as these.
Option `rules`: four (default) or all.
"""

from configs.ablations.common import base, pick
from trillium_moe.config import check_choice
from trillium_moe.sweep.plan import Sweep, chain, named

BALANCING = "model.moe.balancing"
FOUR = chain(
    named("quantile"),
    named("sign 1e-3", **{BALANCING: "sign"}),
    named("aux loss 1e-2", **{BALANCING: "aux_loss"}),
    named("none", **{BALANCING: "none"}),
)
REST = chain(
    named("quantile, exact", **{BALANCING: "quantile_exact"}),
    named("load quantile 1e-2", **{BALANCING: "load_quantile"}),
    named("sign 1e-2", **{BALANCING: "sign", "model.moe.sign_eta": 1e-2}),
    named("batch threshold (not causal)", **{BALANCING: "batch_threshold"}),
)


def get_sweep(options: str = "") -> Sweep:
    options, rules = pick(options, "rules", "four")
    check_choice("option rules", rules, ("four", "all"))
    config, seeds = base(options)
    return Sweep(
        question="Balancing of experts: how fast, and at what price?",
        base=config,
        arms=chain(FOUR, REST) if rules == "all" else FOUR,
        baseline="quantile",
        seeds=seeds,
        measures=("steps_to_balance", "violation_area", "violation_tail", "violation_floor", "dead_experts"),
        published="quantile balancing is at the sampling floor after about 5 steps, the sign rule (1e-3) after 100 to "
                  "1000; losses of all rules within 0.01 nats (Kimi K3 report; Wang et al., arXiv 2408.15664).",
    )

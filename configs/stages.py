"""The context ladder: what each stage decides. `shrink` divides the window for small machines."""

from trillium_moe.config import check, check_choice

# window in tokens, rows per optimizer step at shrink=1; tokens per step stay 4M until a step would hold under 4 rows
STAGES = {
    "8k": (8_192, 512),
    "64k": (65_536, 64),
    "256k": (262_144, 16),
    "1m": (1_048_576, 4),
}


def window(stage: str, shrink: int) -> int:
    """Tokens per row of a stage."""
    check_choice("stage", stage, tuple(STAGES))
    tokens = STAGES[stage][0]
    check(shrink >= 1 and tokens % shrink == 0, "shrink", shrink, f"must divide the window of {tokens} tokens")
    return tokens // shrink

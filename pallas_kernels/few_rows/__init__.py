"""Layers of a decoding step, whose few rows make reading weights all the time there is."""

from pallas_kernels.few_rows.api import Routes, exact, exact_parts, experts, heads, join, linear, pack, route
from pallas_kernels.few_rows.pallas_gpu import MOST_ROWS
from pallas_kernels.few_rows.xla import slots

__all__ = [
    "MOST_ROWS", "Routes", "exact", "exact_parts", "experts", "heads", "join", "linear", "pack", "route", "slots",
]  # fmt: skip

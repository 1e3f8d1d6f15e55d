"""Layers of a decoding step, whose few rows make reading weights all the time there is."""

from pallas_kernels.few_rows.api import exact, exact_parts, experts, heads, join, linear, pack, route
from pallas_kernels.few_rows.pallas_gpu import MOST_ROWS

__all__ = ["MOST_ROWS", "exact", "exact_parts", "experts", "heads", "join", "linear", "pack", "route"]

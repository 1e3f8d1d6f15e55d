"""Kimi Delta Attention: a linear-attention state with one decay per key channel and a delta-rule update."""

from pallas_kernels.kda.api import kda

__all__ = ["kda"]

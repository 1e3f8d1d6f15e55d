"""Causal softmax attention over packed documents."""

from pallas_kernels.attention.api import attention

__all__ = ["attention"]

"""Causal softmax attention over packed documents."""

from pallas_kernels.attention.api import attention, attention_from, attention_runs

__all__ = ["attention", "attention_from", "attention_runs"]

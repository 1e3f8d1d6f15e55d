"""The feed-forward networks of many experts, each over its own rows."""

from pallas_kernels.expert_ffn.activation import Activation
from pallas_kernels.expert_ffn.api import expert_ffn

__all__ = ["Activation", "expert_ffn"]

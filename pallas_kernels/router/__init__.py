"""Routing of tokens to experts, and the bias that balances them."""

from pallas_kernels.router.api import Routing, router
from pallas_kernels.router.bias import quantile_bias

__all__ = ["Routing", "quantile_bias", "router"]

"""A sublayer's input during decoding: residual sum, depth attention and pre-norm of a token."""

from pallas_kernels.depth_read.api import depth_read

__all__ = ["depth_read"]

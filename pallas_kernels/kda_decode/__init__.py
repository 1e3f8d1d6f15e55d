"""One decoding step of a KDA layer, between its input projections and its output projection."""

from pallas_kernels.kda_decode.api import kda_decode

__all__ = ["kda_decode"]

"""The public depth read."""

from jaxtyping import Array, Float

from pallas_kernels.depth_read import pallas_gpu, xla
from pallas_kernels.dispatch import dispatch

IMPLEMENTATIONS = {"xla": xla.depth_read, "pallas_gpu": pallas_gpu.depth_read}


def depth_read(
    query_D: Float[Array, " D"] | None,
    sealed: tuple[Float[Array, "*b D"], ...],
    live_MD: Float[Array, "*b D"] | None,
    new_MD: Float[Array, "*b D"] | None,
    norm_D: Float[Array, " D"] | None,
    eps: float,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "*b D"], Float[Array, "*b D"]]:
    """What a sublayer reads, pre-normed, and the running sum it belongs to.

        live <- live + new;   h = sum_i p_i c_i over sealed sums and the live one;   x = rms_norm(h) norm

    p is the softmax of <query, c_i / rms(c_i)> (attention residuals, arXiv 2603.15031). Not differentiable in the
    kernel: it is for generation.

    Args:
      query_D: pseudo-query; None: x reads the live sum alone.
      sealed: finished sums.
      live_MD, new_MD: the running sum and what is added to it; one of them may be None.
      norm_D: weight of the norm; None: x is h.
      eps: added to every mean of squares.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      x and live, in the dtype of the sums. Scores and mix are at least float32; h, h / rms(h) and x are each rounded.
    """
    if live_MD is None:
        live_MD, new_MD = new_MD, None
    return dispatch("depth_read", IMPLEMENTATIONS, implementation, query_D, sealed, live_MD, new_MD, norm_D, eps)

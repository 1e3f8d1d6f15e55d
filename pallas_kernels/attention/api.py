"""The public attention op."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.attention import reference, xla
from pallas_kernels.dispatch import dispatch

IMPLEMENTATIONS = {"reference": reference.attention, "xla": xla.attention}


def attention(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    *,
    scale: float,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """Causal attention; a token sees the tokens of its own segment up to itself.

    Args:
      q_BTHK, k_BTHK, v_BTHV: queries, keys and values; V may differ from K.
      scale: factor on the dot products.
      segment_ids: id of each token's document, constant inside a document; None: one document per row.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      The output in at least float32 (rounding it to bfloat16 before the output gate biases training), and the largest
      scaled logit of each head, for QK-Clip; no gradient flows through the latter.
    """
    return dispatch("attention", IMPLEMENTATIONS, implementation, q_BTHK, k_BTHK, v_BTHV, scale, segment_ids)

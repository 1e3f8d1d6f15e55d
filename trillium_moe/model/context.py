"""What every layer is told beside its input."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from trillium_moe.shapes import Array, Bool, Float, Int


class Context(NamedTuple):
    """Facts about a batch that all layers share.

    segment_ids: document of each token, constant inside a document and different between neighbours; 0 marks padding,
      which is computed but counts in no statistic. None: one document per row, no padding.
    aux_scale: factor on the gradient of the auxiliary balancing loss: 1 / micro-batches.
    start: where every row continues a sequence whose past the mixers are given, the position of its first token; None:
      rows have no past.
    """

    segment_ids: Int[Array, "B T"] | None = None
    aux_scale: float | Float[Array, ""] = 1.0
    start: Int[Array, " B"] | None = None

    def real_tokens(self, shape: tuple[int, int]) -> Bool[Array, "B T"]:
        """True for every token that is not padding."""
        return jnp.ones(shape, bool) if self.segment_ids is None else self.segment_ids > 0

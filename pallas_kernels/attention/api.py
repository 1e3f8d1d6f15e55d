"""The public attention ops."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Array, Float, Int, PyTree

from pallas_kernels.attention import blocks, pallas_gpu, reference, xla
from pallas_kernels.dispatch import dispatch

IMPLEMENTATIONS = {"reference": reference.attention, "xla": xla.attention, "pallas_gpu": pallas_gpu.attention}

FROM = dict.fromkeys(("reference", "xla"), reference.attention_from) | {"pallas_gpu": pallas_gpu.attention_from}

RUNS = {"xla": blocks.runs, "pallas_gpu": pallas_gpu.runs}


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


def attention_from(
    q_BtHK: Float[Array, "B t H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    start_B: Int[Array, " B"],
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B t H V"], Float[Array, " H"]]:
    """What `attention` gives t neighbouring queries of every row, whose first one stands at position start_B.

    On a GPU to the bit where start_B and t are multiples of 128, in whatever longer row the queries stood there; by
    other backends to the order of a softmax's sums. Keys after a query may hold anything finite. Not for several
    devices. Arguments and results as there.
    """
    return dispatch("attention_from", FROM, implementation, q_BtHK, k_BTHK, v_BTHV, start_B, scale)


def attention_runs(
    expand: Callable[[PyTree, PyTree], tuple[Array, Array]],
    q_GBTHK: Float[Array, "G B t H K"],
    start_G: Int[Array, " G"],
    ids_GBT: Int[Array, "G B t"] | None,
    weights: PyTree,
    source: PyTree,
    ids_BT: Int[Array, "B T"] | None,
    *,
    scale: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "G B t H V"], Float[Array, " H"]]:
    """Attention of G runs of t neighbouring queries over a whole sequence, for sequences cut over devices.

    Args:
      expand: (weights, part of source) -> (k [B, c, H, K], v [B, c, H, V]) of c neighbouring tokens.
      q_GBTHK: queries; run g starts at position start_G[g] of the sequence.
      ids_GBT, ids_BT: document of every query and of every key; None: one document per row.
      weights: differentiable arguments of `expand` that are the same for all tokens.
      source: leaves [B, T, ..], what keys and values are made from.
      scale, implementation: as in `attention`.

    Returns:
      As `attention`.
    """
    arguments = expand, q_GBTHK, start_G, ids_GBT, weights, source, ids_BT, scale
    return dispatch("attention_runs", RUNS, implementation, *arguments)

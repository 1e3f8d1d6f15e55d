"""Held-out loss, in units that do not depend on the tokenizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from trillium_moe.shapes import Int, PyTree


def heldout(
    eval_step: Callable[[PyTree, PyTree, Any], dict[str, Any]],
    params: PyTree,
    router_bias: PyTree,
    batches: Iterable[dict[str, Any]],
    token_bytes: Int[np.ndarray, "vocab"],
    n: int,
    place: Callable[[dict[str, Any]], Any] = lambda batch: batch,
) -> dict[str, float]:
    """Loss over the first `n` batches (fewer if there are fewer).

    Args:
      eval_step: gives the negative log-likelihood `nll` (nats, summed over weighted tokens) and the summed `weight`.
      token_bytes: UTF-8 bytes of every token id. End-of-document tokens have none, so their nats count and their
        bytes do not: the model pays for knowing where a text ends.
      place: puts a batch where `eval_step` wants it. Every process reads whole batches, so their bytes count once.

    Returns:
      heldout/bits_per_byte: sum of nats / (ln 2 * sum of bytes).
      heldout/loss: nats per token.

    Raises:
      ValueError: if the batches hold no text to predict.
    """
    sums, n_bytes = [], 0.0
    for batch in itertools.islice(batches, n):
        sums.append(eval_step(params, router_bias, place(batch)))  # not fetched here: the device keeps busy
        n_bytes += float(np.sum(token_bytes[np.asarray(batch["targets"])] * np.asarray(batch["weights"])))
    sums = jax.device_get(sums)
    nats = math.fsum(float(s["nll"]) for s in sums)
    weight = math.fsum(float(s["weight"]) for s in sums)
    if n_bytes == 0:
        raise ValueError("the held-out split holds no text to predict; raise data.heldout or add files")
    return {"heldout/bits_per_byte": nats / (math.log(2) * n_bytes), "heldout/loss": nats / weight}

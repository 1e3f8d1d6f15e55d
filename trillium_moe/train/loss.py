"""Next-token cross entropy, in chunks of tokens so that [B,T,V] logits never exist whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trillium_moe.model.context import Context
from trillium_moe.model.params import wide, wide_dtype
from trillium_moe.model.trillium import Trillium
from trillium_moe.model.vision import images_of
from trillium_moe.parallel import sharding
from trillium_moe.shapes import Array, Float, Int

LOGITS_AT_ONCE = 1 << 28  # elements of a logits chunk: 1 GiB in float32


def cross_entropy(logits_V: Float[Array, "*b V"], target: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """-log softmax(logits)[target] in nats, at least float32."""
    logits = wide(logits_V)
    picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def nll_sum(
    model: Trillium, h_BTD: Float[Array, "B T D"], targets_BT: Int[Array, "B T"], weights_BT: Float[Array, "B T"]
) -> Float[Array, ""]:
    """Sum over tokens of weight * nats, through the model's head; logits are recomputed in the backward."""
    M, mesh = targets_BT.size, sharding.current_mesh()
    devices, context = (mesh.size, mesh.shape["context"]) if mesh else (1, 1)
    length = M if mesh is None else targets_BT.shape[1] // context
    n_chunks = max(1, -(-M * model.config.vocab_size // (LOGITS_AT_ONCE * devices)))
    while length % n_chunks:
        n_chunks += 1

    @jax.checkpoint
    def chunk(h, targets, weights):
        return jnp.sum(weights * cross_entropy(model.logits(h), targets))

    def split(x):
        if mesh is None:
            return x.reshape(n_chunks, -1, *x.shape[2:])
        # [B,T] -> [chunk,B,context,t]: each device chunks its own tokens, nothing moves
        x = x.reshape(x.shape[0], context, n_chunks, -1, *x.shape[2:])
        return sharding.constrain(jnp.moveaxis(x, 2, 0), sharding.P(None, sharding.BATCH, "context"))

    parts = jax.tree.map(split, (h_BTD, targets_BT, weights_BT))
    if n_chunks == 1:
        return chunk(*jax.tree.map(lambda x: x[0], parts))
    total, _ = jax.lax.scan(lambda total, xs: (total + chunk(*xs), None), jnp.zeros((), wide_dtype(h_BTD)), parts)
    return total


def loss_sum(model: Trillium, batch: dict[str, Array], aux_scale: float = 1.0) -> tuple[Float[Array, ""], tuple]:
    """The training objective of a batch, summed over its weighted tokens.

    Args:
      batch: tokens, targets, segment_ids [B,T] int32 and weights [B,T] float32; with vision also the arrays of
        `model.vision.Images`.
      aux_scale: see `Context`.

    Returns:
      The objective (with the multi-token-prediction loss, if the model has it) and (the plain next-token sum, aux).
    """
    ctx = Context(batch["segment_ids"], aux_scale)
    h, aux = model.hidden(batch["tokens"], ctx, images_of(batch))
    nll = nll_sum(model, h, batch["targets"], batch["weights"])
    if not model.config.n_mtp:
        return nll, (nll, aux)
    # position t sees the token at t + 1 (its target) and predicts the target at t + 1, inside the same document
    shift = lambda x: jnp.pad(x[:, 1:], ((0, 0), (0, 1)))
    same = shift(batch["segment_ids"]) == batch["segment_ids"]
    weights = jnp.where(same, batch["weights"] * shift(batch["weights"]), 0)
    h2, aux["mtp"] = model.mtp_hidden(h, batch["targets"], ctx)
    mtp = nll_sum(model, h2, shift(batch["targets"]), weights)
    return nll + model.config.mtp_weight * mtp, (nll, aux)

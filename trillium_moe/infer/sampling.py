"""Choosing the next token of every sequence of a batch, each by its own settings and its own seed.

Noise belongs to token ids, not to ranks, and cuts only remove tokens: what a sequence draws depends on its own logits,
settings, seed and position, whatever the other sequences of the batch ask for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trillium_moe.config import check
from trillium_moe.model.params import wide
from trillium_moe.shapes import Array, Bool, Float, Int


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from the logits."""

    temperature: float = 1.0  # 0 takes the most probable token
    top_k: int = 0  # keep the k most probable tokens; 0: all
    top_p: float = 1.0  # keep the most probable tokens whose probabilities sum to p; 1: all
    seed: int = 0

    def __post_init__(self):
        check(self.temperature >= 0, "temperature", self.temperature, "must be 0 (greedy) or positive")
        check(0 <= self.top_k < 1 << 31, "top_k", self.top_k, "must be 0 (all tokens) or positive")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]")


class Settings(NamedTuple):
    """`Sampling` of every sequence. Fields are untyped: [B] arrays of numpy or JAX."""

    seed: Any  # uint32
    temperature: Any  # float32
    top_k: Any  # int32
    top_p: Any  # float32


def sample(
    logits_BV: Float[Array, "B V"], count_B: Int[Array, " B"], settings: Settings, greedy: bool = False
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws one token per sequence.

    The cuts act on the tempered distribution, top-k first; the best token always stays. Of equal logits the lower id is
    the better token.

    Args:
      count_B: tokens that each sequence has drawn so far: with the seed, all that the noise depends on.
      greedy: every sequence takes its best token: there is nothing to ask the settings, which on a GPU takes time.

    Returns:
      The tokens, and the model's own log-probabilities of them (temperature 1, no cuts), as the trainer computes them.
    """
    logits_BV = wide(logits_BV)
    greedy_B = settings.temperature <= 0
    best_B = jnp.argmax(logits_BV, -1)

    def draw():
        scaled = logits_BV / jnp.where(greedy_B, 1.0, settings.temperature)[:, None]
        cut_B = (settings.top_k > 0) | (settings.top_p < 1)
        keep = jax.lax.cond(cut_B.any(), lambda: kept(scaled, settings.top_k, settings.top_p),
                            lambda: jnp.ones(scaled.shape, bool))
        noise = jax.vmap(lambda s, i: jax.random.gumbel(jax.random.fold_in(jax.random.key(s), i), scaled.shape[1:]))
        drawn = jnp.argmax(jnp.where(keep, scaled, -jnp.inf) + noise(settings.seed, count_B), -1)
        return jnp.where(greedy_B, best_B, drawn)

    token_B = (best_B if greedy else jax.lax.cond(greedy_B.all(), lambda: best_B, draw)).astype(jnp.int32)
    picked_B = jnp.take_along_axis(logits_BV, token_B[:, None], -1)[:, 0]
    return token_B, picked_B - jax.nn.logsumexp(logits_BV, -1)


def kept(
    scaled_BV: Float[Array, "B V"], top_k_B: Int[Array, " B"], top_p_B: Float[Array, " B"]
) -> Bool[Array, "B V"]:
    """Which tokens the cuts leave."""
    order = jnp.argsort(-scaled_BV, -1, stable=True)
    ranked = jnp.take_along_axis(scaled_BV, order, -1)
    rank = jnp.arange(ranked.shape[-1])
    stays = (rank < top_k_B[:, None]) | (top_k_B[:, None] == 0)
    probs = jax.nn.softmax(jnp.where(stays, ranked, -jnp.inf), -1)
    before = jnp.cumsum(probs, -1) - probs  # probability of all better tokens
    stays &= (before < top_p_B[:, None]) | (top_p_B[:, None] >= 1) | (rank == 0)
    return jnp.put_along_axis(jnp.zeros_like(stays), order, stays, -1, inplace=False)

"""Policy objectives: one registry, one convention, losses to be minimised.

Log-probabilities of every sampled token, in nats: `logp` of the policy in training (the only one with a gradient),
`old` that ratios are taken against, `sampler` of the policy that drew the token. r = logp - old, rho = exp(r), A the
advantage. Every objective is sum_t weight_t * term_t; how the terms are weighed is part of it:

    token       1 / all tokens of the batch
    sequence    1 / (tokens of the sequence * sequences of the batch)
    constant    1 / (longest sequence allowed * sequences of the batch)
    whole       1 / sequences of the batch; the term is the sequence's (gspo, k15)

    k25         -[alpha <= r <= beta] rho A + tau r^2                      token      Kimi K2.5, Eq. 1; K3
    grpo        -min(rho A, clip(rho) A)                                  sequence   2402.03300
    dr_grpo     the same                                                  constant   2503.20783
    dapo        the same, clip_high > clip                                token      2503.14476
    gspo        -min(s A, clip(s) A), s = exp(mean_t r)                   whole      2507.18071
    cispo       -sg(clip(rho)) A logp                                     token      2506.13585
    k15         -A sum_t logp + tau/2 (sum_t r)^2                         whole      Kimi k1.5, Eq. 3
    reinforce   -A logp                                                   token
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trillium_moe.rl.config import ObjectiveConfig
from trillium_moe.shapes import Array, Float

MOST = 20.0  # nats: log-ratios are clipped here before they are exponentiated


class Tokens(NamedTuple):
    """Arrays [M], one entry a token; fields are untyped. What is not sampled has mask 0."""

    logp: Any
    old: Any
    sampler: Any
    advantage: Any
    mask: Any
    weight: Any  # as the objective's weighting says
    sequence: Any  # int32 in [0, n)
    n: int  # sequences there is room for


Objective = Callable[[Tokens, ObjectiveConfig], tuple[Array, Array]]  # terms [M], and 1 where a token was cut off
WEIGHTING: dict[str, str] = {}
TERMS: dict[str, Objective] = {}


def objective(name: str, weighting: str) -> Callable[[Objective], Objective]:
    def add(term):
        TERMS[name], WEIGHTING[name] = term, weighting
        return term
    return add


def loss(
    x: Tokens, c: ObjectiveConfig, imitate: bool | Array = False
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """The loss of some tokens of a batch, and sums over them for the metrics.

    Args:
      imitate: terms are -logp instead: supervised training by the same program.
    """
    r = log_ratio(x)
    terms, cut = TERMS[c.name](x, c)
    if c.tis:
        terms = terms * jax.lax.stop_gradient(jnp.minimum(jnp.exp(jnp.clip(x.old - x.sampler, -MOST, MOST)), c.tis))
    terms = jnp.where(imitate, -x.logp, terms)
    drift = jnp.clip(jax.lax.stop_gradient(x.logp) - x.sampler, -MOST, MOST)
    stats = {"tokens": x.mask.sum(), "cut": (cut * x.mask).sum(), "log_ratio": (jnp.abs(drift) * x.mask).sum(),
             "log_ratio_max": jnp.max(jnp.abs(drift) * x.mask), "squared": (r * r * x.mask).sum()}
    return jnp.sum(jnp.where(x.mask > 0, x.weight * terms, 0.0)), jax.lax.stop_gradient(stats)


def log_ratio(x: Tokens) -> Float[Array, " M"]:
    return jnp.where(x.mask > 0, jnp.clip(x.logp - x.old, -MOST, MOST), 0.0)


def per_sequence(x: Tokens, values: Float[Array, " M"]) -> Float[Array, " M"]:
    """Sum over each token's sequence, at every token."""
    return jax.ops.segment_sum(values * x.mask, x.sequence, x.n)[x.sequence]


def _clipped(rho, c: ObjectiveConfig):
    return jnp.clip(rho, 1 - c.clip, 1 + (c.clip_high or c.clip))


@objective("k25", "token")
def k25(x: Tokens, c: ObjectiveConfig):
    r = log_ratio(x)
    keep = (r >= c.alpha) & (r <= c.beta)  # whatever the sign of the advantage, unlike a clipped minimum
    return -jnp.where(keep, jnp.exp(jnp.where(keep, r, 0)) * x.advantage, 0) + c.tau * r * r, 1.0 - keep


def _ppo(rho, x: Tokens, c: ObjectiveConfig):
    clipped = _clipped(rho, c)
    cut = (clipped * x.advantage < rho * x.advantage).astype(jnp.float32)
    return -jnp.minimum(rho * x.advantage, clipped * x.advantage), cut


@objective("grpo", "sequence")
@objective("dr_grpo", "constant")
@objective("dapo", "token")
def ppo(x: Tokens, c: ObjectiveConfig):
    return _ppo(jnp.exp(log_ratio(x)), x, c)


@objective("gspo", "whole")
def gspo(x: Tokens, c: ObjectiveConfig):
    length = jnp.maximum(per_sequence(x, jnp.ones_like(x.mask)), 1)
    terms, cut = _ppo(jnp.exp(per_sequence(x, log_ratio(x)) / length), x, c)
    return terms / length, cut  # every token holds its sequence's term: an n-th of it each


@objective("cispo", "token")
def cispo(x: Tokens, c: ObjectiveConfig):
    rho = jax.lax.stop_gradient(jnp.exp(log_ratio(x)))
    return -_clipped(rho, c) * x.advantage * x.logp, (_clipped(rho, c) != rho).astype(jnp.float32)


@objective("k15", "whole")
def k15(x: Tokens, c: ObjectiveConfig):
    length = jnp.maximum(per_sequence(x, jnp.ones_like(x.mask)), 1)
    total = per_sequence(x, log_ratio(x))
    return -x.advantage * x.logp + c.tau / 2 * total * total / length, jnp.zeros_like(x.mask)


@objective("reinforce", "token")
def reinforce(x: Tokens, c: ObjectiveConfig):
    return -x.advantage * x.logp, jnp.zeros_like(x.mask)


def divergence(logp: Float[Array, " M"], reference: Float[Array, " M"]) -> Float[Array, " M"]:
    """exp(d) - d - 1 with d = reference - logp: unbiased for KL(policy | reference) on the policy's own samples, and
    never negative (Schulman's third estimator)."""
    d = jnp.clip(reference - logp, -MOST, MOST)
    return jnp.exp(d) - d - 1

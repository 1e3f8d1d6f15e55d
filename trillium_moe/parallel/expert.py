"""Experts over the expert axis: routing on shards, tokens to the devices of their experts and back.

A device holds E / R neighbouring experts and m of the tokens. Every (token, choice) pair travels as one row, with its
weight, to the device of its expert (`transport`), passes that expert, and returns to be summed. The weight multiplies
inside the expert, and its gradient comes from there: no result is kept, or fetched again, for the backward pass.

There is room for the worst case, every token of every device to one: m min(k, E / R) rows per sender. With
`moe.capacity` c there is room for c times the even share (padded: of each pair of devices; ragged: of all that a device
receives); rows beyond are dropped, their choices count as zero, and `dropped` says how many there were. With
`moe.balance=exact` experts are replicated so that every device computes m k rows (`balance`); nothing is dropped.

Routing statistics leave a layer as they are on every shard, [shards, ..]; `reduce_stats` adds them up once a step.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.mxfp4 import Packed
from pallas_kernels.router import router
from trillium_moe.config import ModelConfig, MoEConfig
from trillium_moe.model.experts import Matrices, alignment, ffn, mixture
from trillium_moe.model.permute import dispatch, gather_sum, plan
from trillium_moe.parallel.balance import replicate
from trillium_moe.parallel.manual import Layout
from trillium_moe.parallel.replicas import with_replicas
from trillium_moe.parallel.transport import AXIS, UPDATES, Padded, Ragged, TwoHop, worst_case
from trillium_moe.shapes import Array, Float, Int, PyTree

# --- routing


def route(
    where: Layout | None, c: MoEConfig, scores: Array, bias_E: Array, real: Array
) -> tuple[Int[Array, "*b k"], Float[Array, "*b k"], Float[Array, "*b"], dict]:
    """Experts, their weights and the cutoff of every token, and the statistics of each shard.

    Args:
      where: the cut of the tokens; scores [B, T, E] and real [B, T] then, else [M, E] and [M].

    Returns:
      experts, weights, cutoff (see `pallas_kernels.router`), {"load": [S, E], "histogram": [S, E, bins] (quantile
      only)}, without S if tokens are not cut.
    """
    bins = c.bins if c.balancing == "quantile" else 0

    def local(scores, bias, real):
        found = router(
            scores, bias, k=c.k, scale=c.routed_scale, bins=bins, real_M=real,
            implementation=c.router_implementation or None,
        )  # fmt: skip
        stats = {"load": found.load_E} | ({"histogram": found.histogram} if bins else {})
        return found.experts_MK, found.weights_MK, found.cutoff_M, stats

    if where is None:
        return local(scores, bias_E, real)

    def shard(scores, bias, real):
        experts, weights, cutoff, stats = local(scores.reshape(-1, c.n_experts), bias, real.reshape(-1))
        shape = real.shape
        experts, weights = (x.reshape(*shape, c.k) for x in (experts, weights))
        return experts, weights, cutoff.reshape(shape), jax.tree.map(lambda x: x[None], stats)

    tokens = where.tokens()
    out = tokens, tokens, tokens, _per_shard(where)
    return where.shard(shard, (tokens, jax.P(), tokens), out)(scores, jax.lax.stop_gradient(bias_E), real)


def _per_shard(where: Layout) -> jax.P:
    return jax.P(where.token_axes or None)


def reduce_stats(aux: PyTree) -> PyTree:
    """The statistics of the whole batch: per-shard entries of an aux tree summed over shards, in one all-reduce.

    Call it once a step, on aux summed over micro-batches. Other entries, and aux of a model that ran without a mesh,
    stay as they are.
    """
    flat, tree = jax.tree_util.tree_flatten_with_path(aux)
    # [L, S, ..]; without a mesh they have no S
    rank = {"load": 3, "histogram": 4, "dropped": 2}
    parts = [i for i, (path, x) in enumerate(flat) if rank.get(getattr(path[-1], "key", None)) == x.ndim]
    leaves = [x for _, x in flat]
    if parts:
        by_shard = [jnp.moveaxis(leaves[i], 1, 0) for i in parts]
        total = jnp.concatenate([x.reshape(x.shape[0], -1) for x in by_shard], axis=1).sum(0)
        ends = [sum(math.prod(x.shape[1:]) for x in by_shard[: n + 1]) for n in range(len(parts))]
        for i, x, one in zip(parts, by_shard, jnp.split(total, ends[:-1])):
            leaves[i] = one.reshape(x.shape[1:])
    return jax.tree.unflatten(tree, leaves)


# --- experts


def mix(
    where: Layout | None,
    config: ModelConfig,
    z: Array,
    experts: Array,
    p: Array,
    weights: tuple[Matrices, Matrices, Matrices],
) -> tuple[Array, dict]:
    """sum_j p_j E_j(z) of every token, at least float32.

    Args:
      where: the cut of the tokens; z [B, T, L], experts and p [B, T, k] then, else [M, ..].
      weights: w_gate, w_up [E, L, F] and w_down [E, F, L].

    Returns:
      The sums, and {"dropped": [S]}, (token, choice) pairs without room, if experts are on several devices.

    Raises:
      ValueError: the expert axis does not divide the experts.
    """
    c = config.moe

    if where is None:
        return mixture(config, z, experts, p, *weights), {}
    R, E = where.size(AXIS), c.n_experts
    if E % R:
        near = E // R * R
        raise ValueError(
            f"config model.moe.n_experts={E}: does not divide over mesh.expert={R}; use {near or R} or {near + R}"
        )
    model = where.divides("model", weights[0].shape[-1])

    def shard(z, experts, p, *weights):
        flat = lambda x: x.reshape(-1, x.shape[-1])
        args = (flat(z), flat(experts), flat(p))
        if R > 1:
            u, dropped = exchanged(config, where.platform, *args, *weights)
        else:
            u, dropped = mixture(config, *args, *weights), None
        u = jax.lax.psum(u, model) if model else u  # each device had a part of every expert's hidden width
        return u.reshape(*z.shape[:-1], -1), {} if dropped is None else {"dropped": dropped[None]}

    own = AXIS if R > 1 else None
    tokens, w_in, w_out = where.tokens(), jax.P(own, None, model), jax.P(own, model, None)
    if c.experts_format == "mxfp4":
        w_in, w_out = Packed(w_out, w_in), Packed(w_in, w_out)
    # the weights travel to their shards in the compute dtype
    weights = tuple(w.astype(z.dtype) for w in weights)
    run = where.shard(shard, (tokens, tokens, tokens, w_in, w_in, w_out), (tokens, _per_shard(where)))
    return run(z, experts, p, *weights)


def exchanged(
    config: ModelConfig, platform: str, z_ML: Array, experts_MK: Array, p_MK: Array, *weights: Matrices
) -> tuple[Float[Array, "M L"], Int[Array, ""]]:
    """`mix` of one device's tokens with its experts [E / R, ..], and how many pairs were dropped. Inside a shard."""
    c = config.moe
    expert_A, n_experts = experts_MK.reshape(-1), c.n_experts
    # XLA has no ragged exchange for CPUs; on GPUs a training step with it has come to a standstill (docs/pods.md)
    name = c.transport or ("ragged" if platform == "tpu" else "padded")
    updates = UPDATES.get(platform, 1) if name == "ragged" else None
    if c.balance == "exact":
        count_E = jnp.zeros(n_experts, jnp.int32).at[expert_A].add(1)
        expert_A, donors = replicate(jax.lax.all_gather(count_E, AXIS), expert_A, jax.lax.axis_index(AXIS))
        n_experts *= 2
        weights = jax.tree.map(lambda w: with_replicas(w, donors, updates), weights)
    route = transport(c, updates, expert_A, n_experts)
    slot, source, sizes = plan(route.expert_Q, weights[0].shape[0], alignment(config), route.place_Q)
    there = lambda x_ML, k: dispatch(route.send(dispatch(x_ML, route.slot_A, route.source_R, k)), slot, source, 1)
    rows, weight = there(z_ML, c.k), there(p_MK.reshape(-1, 1), 1)[:, 0]
    y = ffn(config, rows, weight, sizes, *weights)
    back = route.receive(dispatch(y, source, slot, 1))  # the inverse of the dispatch before
    return gather_sum(back, route.slot_A, route.source_R, c.k), route.dropped


def transport(c: MoEConfig, updates: int | None, expert_A: Array, n_experts: int) -> Padded | Ragged | TwoHop:
    """The transport that the config asks for, with room for what it asks for; ragged in `updates` pieces, if any."""
    A, R = expert_A.shape[0], jax.lax.axis_size(AXIS)
    exact, most = c.balance == "exact", worst_case(A // c.k, c.k, c.n_experts // R)
    if updates is not None:
        room = min(R * most, math.ceil(c.capacity * A)) if c.capacity else R * most
        return Ragged(updates, expert_A, n_experts, A if exact else room)
    if exact:
        return TwoHop(expert_A, n_experts)
    return Padded(expert_A, n_experts, min(most, math.ceil(c.capacity * A / R)) if c.capacity else most)

"""Experts over the expert axis: routing on shards, tokens to the devices of their experts and back.

A device holds E / R neighbouring experts and m of the tokens. Every (token, choice) pair travels as one row to the
device of its expert, passes that expert, and returns to be summed with its weight. Two transports:

  padded  one dense all-to-all of blocks of `capacity` rows per pair of devices. Static, runs everywhere.
  ragged  only the rows there are, by `jax.lax.ragged_all_to_all` (TPU, GPU; XLA has none for CPU). On a GPU one update
          runs on one thread block, so every slice is sent in UPDATES pieces: 85 times as fast on two H200s.

There is room for the worst case, every token of every device to one: m min(k, E / R) rows per sender. With
`moe.capacity` c there is room for c times the even share (padded: of each pair of devices; ragged: of all that a device
receives); rows beyond are dropped, their choices count as zero, and `dropped` says how many there were.

Routing statistics leave a layer as they are on every shard, [shards, ..]; `reduce_stats` adds them up once a step.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import grouped_matmul
from trillium_moe.config import ModelConfig, MoEConfig
from trillium_moe.model import router
from trillium_moe.model.ffn import activate
from trillium_moe.model.permute import ALIGN, combine, dispatch, plan
from trillium_moe.parallel.manual import Layout
from trillium_moe.shapes import Array, Float, Int, PyTree

AXIS = "expert"
UPDATES = {"gpu": 512}  # pieces of a slice that travel at the same time; elsewhere 1


# --- routing


def route(
    where: Layout | None, c: MoEConfig, scores: Array, bias_E: Array, real: Array
) -> tuple[Int[Array, "*b k"], Float[Array, "*b"], dict]:
    """Experts and cutoff of every token, and the statistics of each shard.

    Args:
      where: the cut of the tokens; scores [B, T, E] and real [B, T] then, else [M, E] and [M].

    Returns:
      experts, alpha (see `router.select`), {"load": [S, E], "histogram": [S, E, bins] (quantile only)}, without S if
      tokens are not cut.
    """

    def local(scores, bias, real):
        experts, alpha = router.select(scores, bias, c.k)
        stats = {"load": router.loads(experts, c.n_experts, real)}
        if c.balancing == "quantile":
            stats["histogram"] = router.margin_histogram(scores, alpha, bias, c.bins, real)
        return experts, alpha, stats

    if where is None:
        return local(scores, bias_E, real)

    def shard(scores, bias, real):
        experts, alpha, stats = local(scores.reshape(-1, c.n_experts), bias, real.reshape(-1))
        shape = real.shape
        return experts.reshape(*shape, c.k), alpha.reshape(shape), jax.tree.map(lambda x: x[None], stats)

    tokens = where.tokens()
    return where.shard(shard, (tokens, jax.P(), tokens), (tokens, tokens, _per_shard(where)))(scores, bias_E, real)


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


def ffn(
    config: ModelConfig, z_RL: Float[Array, "R L"], sizes_E: Int[Array, " E"], w_gate: Array, w_up: Array, w_down: Array
) -> Float[Array, "R L"]:
    """Every row through its own expert; rows by expert, as `permute.plan` places them."""
    product = functools.partial(
        grouped_matmul, group_sizes_G=sizes_E, align=ALIGN, implementation=config.moe.implementation or None
    )
    weight = lambda w: w.astype(z_RL.dtype)
    hidden = activate(config, product(z_RL, weight(w_gate)), product(z_RL, weight(w_up)))
    return product(hidden, weight(w_down))


def mix(
    where: Layout | None,
    config: ModelConfig,
    z: Array,
    scores: Array,
    experts: Array,
    weights: tuple[Array, Array, Array],
) -> tuple[Array, dict]:
    """sum_j p_j E_j(z) of every token, at least float32.

    Args:
      where: the cut of the tokens; z [B, T, L], scores [B, T, E], experts [B, T, k] then, else [M, ..].
      weights: w_gate, w_up [E, L, F] and w_down [E, F, L].

    Returns:
      The sums, and {"dropped": [S]}, (token, choice) pairs without room, if experts are on several devices.

    Raises:
      ValueError: the expert axis does not divide the experts.
    """
    c = config.moe

    def local(z_ML, scores_ME, experts_MK, *weights):
        p = router.weights_of(scores_ME, experts_MK, c.routed_scale)
        slot, source, sizes = plan(experts_MK.reshape(-1), c.n_experts)
        return combine(ffn(config, dispatch(z_ML, slot, source, c.k), sizes, *weights), p, slot, source)

    if where is None:
        return local(z, scores, experts, *weights), {}
    R, E = where.size(AXIS), c.n_experts
    if E % R:
        near = E // R * R
        raise ValueError(
            f"config model.moe.n_experts={E}: does not divide over mesh.expert={R}; use {near or R} or {near + R}"
        )
    model = where.divides("model", weights[0].shape[-1])

    def shard(z, scores, experts, *weights):
        flat = lambda x: x.reshape(-1, x.shape[-1])
        args = (flat(z), flat(scores), flat(experts))
        u, dropped = exchanged(config, where.platform, *args, *weights) if R > 1 else (local(*args, *weights), None)
        u = jax.lax.psum(u, model) if model else u  # each device had a part of every expert's hidden width
        return u.reshape(*z.shape[:-1], -1), {} if dropped is None else {"dropped": dropped[None]}

    own = AXIS if R > 1 else None
    tokens, w_in, w_out = where.tokens(), jax.P(own, None, model), jax.P(own, model, None)
    # the weights travel to their shards in the compute dtype
    weights = tuple(w.astype(z.dtype) for w in weights)
    run = where.shard(shard, (tokens, tokens, tokens, w_in, w_in, w_out), (tokens, _per_shard(where)))
    return run(z, scores, experts, *weights)


def exchanged(
    config: ModelConfig, platform: str, z_ML: Array, scores_ME: Array, experts_MK: Array, *weights: Array
) -> tuple[Float[Array, "M L"], Int[Array, ""]]:
    """`mix` of one device's tokens with its experts [E / R, ..], and how many pairs were dropped. Inside a shard."""
    c = config.moe
    name = c.transport or ("padded" if platform == "cpu" else "ragged")
    transport = Padded if name == "padded" else functools.partial(Ragged, UPDATES.get(platform, 1))
    p = router.weights_of(scores_ME, experts_MK, c.routed_scale)
    route = transport(experts_MK.reshape(-1), c.n_experts, c.k, c.capacity)
    rows = route.send(dispatch(z_ML, route.slot_A, route.source_R, c.k))
    slot, source, sizes = plan(route.expert_Q, weights[0].shape[0])
    y = ffn(config, dispatch(rows, slot, source, 1), sizes, *weights)
    back = route.receive(dispatch(y, source, slot, 1))  # the inverse of the dispatch before
    return combine(back, p, route.slot_A, route.source_R), route.dropped


def worst_case(m: int, k: int, n_local: int) -> int:
    """Rows that m tokens can send to one device: a token has k experts, a device n_local."""
    return m * min(k, n_local)


class Padded:
    """Blocks of equal size for every pair of devices.

    slot_A: row of each assignment in the send buffer, past its end if there was no room; source_R: assignment of each
    of its rows, A if none; expert_Q: local expert of each row received, n_local if none.
    """

    def __init__(self, expert_A: Array, n_experts: int, k: int, capacity: float):
        A, R = expert_A.shape[0], jax.lax.axis_size(AXIS)
        n_local = n_experts // R
        room = worst_case(A // k, k, n_local)
        if capacity:
            room = min(room, math.ceil(capacity * A / R))
        peer_A = expert_A // n_local
        place_A = _place(peer_A, R)
        self.R, self.room = R, room
        self.slot_A = jnp.where(place_A < room, peer_A * room + place_A, R * room)
        self.source_R = jnp.full(R * room, A).at[self.slot_A].set(jnp.arange(A), mode="drop")
        self.dropped = (place_A >= room).sum().astype(jnp.int32)
        self.expert_Q = self.send(jnp.take(expert_A % n_local, self.source_R, mode="fill", fill_value=n_local))

    def send(self, x_R: Array) -> Array:
        """Block p of the result is what device p has for this one."""
        blocks = x_R.reshape(self.R, self.room, *x_R.shape[1:])
        return jax.lax.all_to_all(blocks, AXIS, 0, 0).reshape(x_R.shape)

    receive = send  # its own inverse


def _place(group_A: Int[Array, " A"], n: int) -> Int[Array, " A"]:
    """Index of each element among those of its group, in order."""
    order = jnp.argsort(group_A, stable=True)
    count = jnp.zeros(n, jnp.int32).at[group_A].add(1)
    start = jnp.cumsum(count) - count
    return jnp.zeros_like(group_A).at[order].set(jnp.arange(group_A.shape[0]) - start[group_A[order]])


class Ragged:
    """Slices of the sizes there are. Attributes as `Padded`; rows are sorted by expert, so also by device."""

    def __init__(self, updates: int, expert_A: Array, n_experts: int, k: int, capacity: float):
        A, R, me = expert_A.shape[0], jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
        n_local = n_experts // R
        self.rows, self.room = A, R * worst_case(A // k, k, n_local)
        if capacity:
            self.room = min(self.room, math.ceil(capacity * A))
        order = jnp.argsort(expert_A, stable=True)
        self.source_R = order
        self.slot_A = jnp.zeros_like(order).at[order].set(jnp.arange(A))

        count_E = jnp.zeros(n_experts, jnp.int32).at[expert_A].add(1)
        count_SPE = jax.lax.all_gather(count_E, AXIS).reshape(R, R, n_local)  # from S to P, by P's expert
        wanted_SP = count_SPE.sum(-1)
        begin = lambda x, axis: jnp.cumsum(x, axis) - x
        at_sender_SP, at_receiver_SP = begin(wanted_SP, 1), begin(wanted_SP, 0)
        sizes_SP = jnp.clip(self.room - at_receiver_SP, 0, wanted_SP)
        self.dropped = (wanted_SP - sizes_SP)[me].sum().astype(jnp.int32)

        # rows arrive by sender, then by expert
        ends = jnp.cumsum(count_SPE[:, me].reshape(-1))
        index = jnp.searchsorted(ends, jnp.arange(self.room), side="right")
        self.expert_Q = jnp.where(index < ends.shape[0], index % n_local, n_local).astype(jnp.int32)

        # per peer, in pieces: where my rows for it begin, here and there, and how many they are; and so for its rows
        pieces = functools.partial(_pieces, updates)
        mine_here, mine = pieces(at_sender_SP[me], sizes_SP[me])
        mine_there, _ = pieces(at_receiver_SP[me], sizes_SP[me])
        theirs_here, theirs = pieces(at_receiver_SP[:, me], sizes_SP[:, me])
        theirs_there, _ = pieces(at_sender_SP[:, me], sizes_SP[:, me])
        self.there = (mine_here, mine, mine_there, theirs)
        self.back = (theirs_here, theirs, theirs_there, mine)

    def send(self, x_R: Array) -> Array:
        return _move(self.room, x_R, self.there, self.back)

    def receive(self, y_Q: Array) -> Array:
        return _move(self.rows, y_Q, self.back, self.there)


def _pieces(n: int, begin_P: Array, size_P: Array) -> tuple[Array, Array]:
    """Every slice as n neighbouring ones whose sizes differ by at most 1: begins and sizes, [P n]."""
    part, rest = jnp.divmod(size_P[:, None], n)
    u = jnp.arange(n)
    begin = begin_P[:, None] + u * part + jnp.minimum(u, rest)
    size = part + (u < rest)
    return begin.reshape(-1).astype(jnp.int32), size.reshape(-1).astype(jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _move(n_rows, x, there, back):
    """Slices of x to their devices, into n_rows rows that are zero where nothing arrives; `back` undoes `there`."""
    out = jnp.zeros((n_rows, *x.shape[1:]), x.dtype)
    return jax.lax.ragged_all_to_all(x, out, *there, axis_name=AXIS)


def _move_fwd(n_rows, x, there, back):
    return _move(n_rows, x, there, back), (jnp.zeros((x.shape[0], 0)), there, back)


def _move_bwd(n_rows, saved, d):
    like, there, back = saved
    return _move(like.shape[0], d, back, there), None, None


_move.defvjp(_move_fwd, _move_bwd)

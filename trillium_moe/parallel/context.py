"""Mixers on shards: sequences cut over the context axis, heads over the model axis.

KDA needs of the tokens to the left only the state they leave. A device's tokens change the state by an affine map
(M, N), so every device computes its own map, one all-gather of fixed size (K x (K + V) float32 numbers per head,
whatever the length) shares them, and each device folds the maps to its left and runs its tokens once, from the right
state (Kimi K3, KCP; flash-linear-attention #691). The backward is the same with the transposed maps.

The short convolution needs the last taps - 1 tokens of the left neighbour.

MLA needs every earlier token. What is gathered is the latent (kv_lora_rank + rope_dim numbers per token), never heads;
keys and values are expanded from it on every device, a block at a time where no kernel takes them whole. Under a causal
mask the last device would have all the work, so with an even number of devices queries are exchanged in half shards:
device i computes halves i and 2 R - 1 - i of 2 R. With an odd number they stay, and the last device sets the pace.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attention import attention, attention_from, attention_runs
from pallas_kernels.kda import affine
from pallas_kernels.kda import kda_gated as kda_op
from pallas_kernels.kda_decode import kda_decode as kda_decode_op
from trillium_moe.parallel.manual import layout
from trillium_moe.shapes import Array, Bool, Float, Int

HIGHEST = jax.lax.Precision.HIGHEST


# --- KDA


def kda_gated(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T H V"],
    decay_logits: Float[Array, "B T H K"],
    beta_logits: Float[Array, "B T H"],
    a_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    *,
    initial_state: Float[Array, "B H K V"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    g_min: float | None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """`pallas_kernels.kda.kda_gated` under the current mesh: arguments and results as there, one state per row.

    a_log and dt_bias are at least float32.
    """
    inputs, settings = (q, k, v, decay_logits, beta_logits, a_log, dt_bias), (g_min, implementation)
    where = layout(*q.shape[:2])
    if where is None:
        return _kda(settings, inputs, initial_state, segment_ids)
    B, _, H, K = q.shape
    if initial_state is None:
        initial_state = jnp.zeros((B, H, K, v.shape[-1]), a_log.dtype)
    heads = where.divides("model", H)
    tokens, state, weight = where.tokens(heads), where.rows(heads), jax.P(heads)

    def shard(inputs, entry, ids):
        if where.context:
            return _chained_kda(where.context, settings, inputs, entry, ids)
        return _kda(settings, inputs, entry, ids)

    run = where.shard(shard, ((tokens,) * 5 + (weight,) * 2, state, where.tokens()), (tokens, state))
    return run(inputs, initial_state, segment_ids)


def _kda(settings, inputs, entry, ids):
    g_min, implementation = settings
    return kda_op(*inputs, initial_state=entry, segment_ids=ids, g_min=g_min, implementation=implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chained_kda(axis, settings, inputs, initial, ids):
    """One shard's outputs, and the state after the last token of the whole row."""
    entry, final, _, _ = _entry_state(axis, settings, inputs, initial, ids)
    return _kda(settings, inputs, entry, ids)[0], final


def _entry_state(axis, settings, inputs, initial, ids):
    """The state before this shard's first token, the one after the row's last, and what the backward folds with."""
    q, k, v, *rest = inputs
    # queries are not asked for: the keys are at hand
    maps = affine.affine_map(lambda v, entry: _kda(settings, (k, k, v, *rest), entry, ids), k, v)
    maps = jnp.concatenate(maps, axis=-1)
    M, N = jnp.split(jax.lax.all_gather(maps, axis), [k.shape[-1]], axis=-1)
    index, links = jax.lax.axis_index(axis), _links(axis, ids, M.shape[:2])

    def step(carry, xs):
        (state, own), (i, M, N, link) = carry, xs
        entry = jnp.where(link, state, 0)
        state = jnp.einsum("bhkj,bhjv->bhkv", M, entry, precision=HIGHEST) + N
        return (state, jnp.where(i == index, entry, own)), None

    (final, entry), _ = jax.lax.scan(step, (initial, initial), (jnp.arange(len(M)), M, N, links))
    return entry, final, M, links


def _chained_fwd(axis, settings, inputs, initial, ids):
    entry, final, M, links = _entry_state(axis, settings, inputs, initial, ids)
    (o, _), vjp = jax.vjp(lambda inputs, entry: _kda(settings, inputs, entry, ids), inputs, entry)
    return (o, final), (inputs, M, links, vjp, ids)


def _chained_bwd(axis, settings, saved, cotangents):
    inputs, M, links, vjp, ids = saved
    d_o, d_final = cotangents
    (q, k, v, *rest), index = inputs, jax.lax.axis_index(axis)
    E = affine.entry_adjoint(lambda v, entry: _kda(settings, (q, k, v, *rest), entry, ids), k, v, d_o)

    def step(carry, xs):
        (d_exit, own), (i, M, E, link) = carry, xs
        d_entry = jnp.einsum("bhjk,bhjv->bhkv", M, d_exit, precision=HIGHEST) + E
        return (jnp.where(link, d_entry, 0), jnp.where(i == index, d_exit, own)), None

    # every device returned the same final state and holds a share of its gradient
    d_final = jax.lax.psum(d_final, axis)
    shards = (jnp.arange(len(M)), M, jax.lax.all_gather(E, axis), links)
    (d_initial, d_exit), _ = jax.lax.scan(step, (d_final, d_final), shards, reverse=True)
    d_inputs, _ = vjp((d_o, d_exit))
    # the initial state is one array on all devices: their gradients are added up
    return d_inputs, jnp.where(index == 0, d_initial, 0), None


_chained_kda.defvjp(_chained_fwd, _chained_bwd)


def _links(axis, ids_BT, shape):
    """[R, B, 1, 1, 1]: whether a shard's first token is of the document that ended the shard before."""
    if ids_BT is None:
        return jnp.ones((*shape, 1, 1, 1), bool)
    first, last = jax.lax.all_gather(jnp.stack([ids_BT[:, 0], ids_BT[:, -1]]), axis).swapaxes(0, 1)
    links = jnp.concatenate([jnp.ones_like(first[:1], bool), first[1:] == last[:-1]])
    return links[..., None, None, None]


def kda_decode(
    qkv: Float[Array, "B 3 H K"],
    decay: Float[Array, "B H K"] | Float[Array, "B R"],
    beta: Float[Array, "B H"] | Float[Array, "B D"],
    gate: Float[Array, "B H K"] | None,
    taps: Float[Array, "B S 3 H K"],
    state: Float[Array, "B H K K"],
    *,
    conv: Float[Array, "3 H K C"] | None,
    a_log: Float[Array, " H"],
    dt_bias: Float[Array, "H K"],
    out_norm: Float[Array, " K"],
    active: Bool[Array, " B"],
    **settings,
) -> tuple[Float[Array, "B H K"], Float[Array, "B S 3 H K"], Float[Array, "B H K K"]]:
    """`pallas_kernels.kda_decode` under the current mesh: arguments and results as there, factors on one device."""

    def run(arrays, weights, active):
        names = ("conv", "a_log", "dt_bias", "out_norm")
        return kda_decode_op(*arrays, **dict(zip(names, weights)), active=active, **settings)

    args = (qkv, decay, beta, gate, taps, state), (conv, a_log, dt_bias, out_norm), active
    where = layout(len(qkv))
    if where is None:
        return run(*args)
    heads = where.divides("model", state.shape[1])
    row, inputs, history = where.rows(heads), where.rows(None, heads), where.rows(None, None, heads)
    weights = (jax.P(None, heads), jax.P(heads), jax.P(heads), jax.P())
    specs = (inputs, row, row, row, history, row), weights, where.rows()
    return where.shard(run, specs, (row, history, row))(*args)


# --- short convolution


def with_halo(conv, x_BTHK: Array, weight_HKC: Array, segment_ids: Array | None) -> Array:
    """A causal convolution conv(x, weight, segment_ids) of C taps, under the current mesh.

    Raises:
      ValueError: a shard has fewer than C - 1 tokens.
    """
    B, T, H, _ = x_BTHK.shape
    where, reach = layout(B, T), weight_HKC.shape[-1] - 1
    if where is None or where.context is None or reach == 0:
        return conv(x_BTHK, weight_HKC, segment_ids)
    axis, size = where.context, where.size(where.context)
    if T // size < reach:
        raise ValueError(
            f"{T} tokens over mesh.context={size} leave {T // size} a device, fewer than the convolution's "
            f"{reach} past taps; use at least {size * reach} tokens"
        )
    to_right = [(i, i + 1) for i in range(size - 1)]

    def shard(x, weight, ids):
        x = jnp.concatenate([jax.lax.ppermute(x[:, -reach:], axis, to_right), x], axis=1)
        if ids is not None:
            left = jax.lax.ppermute(ids[:, -reach:], axis, to_right)
            left = jnp.where(jax.lax.axis_index(axis) == 0, -1, left)  # id -1: no document reaches before the row
            ids = jnp.concatenate([left, ids], axis=1)
        return conv(x, weight, ids)[:, reach:]

    heads = where.divides("model", H)
    specs = (where.tokens(heads), jax.P(heads), where.tokens())
    return where.shard(shard, specs, where.tokens(heads))(x_BTHK, weight_HKC, segment_ids)


# --- MLA


def latent_attention(
    q: Float[Array, "B T H K"],
    latent: Float[Array, "B C R"],
    k_rope: Float[Array, "B C P"],
    k_up: Float[Array, "R H N"],
    v_up: Float[Array, "R H V"],
    *,
    scale: float,
    segment_ids: Int[Array, "B T"] | None = None,
    start: Int[Array, " B"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, " H"]]:
    """Causal attention with keys [latent k_up, k_rope] and values latent v_up, under the current mesh.

    Args:
      q: queries, K = N + P.
      latent: normed latents, C = T without `start`.
      k_rope: the key part that all heads share, rotated already.
      scale, segment_ids, implementation: see `pallas_kernels.attention`, and `attention_runs` there when tokens are cut
        over context.
      start: where q are the queries from that position on of longer rows of keys; on one device.

    Returns:
      Outputs, at least float32, and the largest scaled logit of each head over all tokens.
    """
    B, T, H, _ = q.shape
    where = layout(B, T) if start is None else None

    def whole(q, latent, k_rope, k_up, v_up, ids):
        k, v = _expand((k_up, v_up), (latent, k_rope))
        if start is not None:
            return attention_from(q, k, v, start, scale=scale, implementation=implementation)
        return attention(q, k, v, scale=scale, segment_ids=ids, implementation=implementation)

    args = (q, latent, k_rope, k_up, v_up, segment_ids)
    if where is None:
        return whole(*args)

    def shard(*args):
        run = functools.partial(_cut_attention, where.context, scale, implementation) if where.context else whole
        o, highest = run(*args)
        highest = jax.lax.stop_gradient(highest)
        return o, jax.lax.pmax(highest, where.token_axes) if where.token_axes else highest

    heads = where.divides("model", H)
    per_head, tokens, weight = where.tokens(heads), where.tokens(), jax.P(None, heads)
    specs = (per_head, tokens, tokens, weight, weight, tokens)
    return where.shard(shard, specs, (per_head, jax.P(heads)))(*args)


def _expand(weights, source):
    """Keys and values of some tokens, from their latents."""
    (k_up, v_up), (latent, k_rope) = weights, source
    heads = lambda w: jnp.einsum("btr,rhk->bthk", latent, w.astype(latent.dtype))
    shared = jnp.broadcast_to(k_rope[:, :, None], (*k_rope.shape[:2], k_up.shape[1], k_rope.shape[-1]))
    return jnp.concatenate([heads(k_up), shared], axis=-1), heads(v_up)


def _cut_attention(axis, scale, implementation, q, latent, k_rope, k_up, v_up, ids):
    t = q.shape[1]
    gather = lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True)
    index = jax.lax.axis_index(axis)
    balanced = jax.lax.axis_size(axis) % 2 == 0 and t % 2 == 0
    if balanced:
        cut = functools.partial(_to_halves, axis)
        pair = jnp.stack([index, 2 * jax.lax.axis_size(axis) - 1 - index])
        start = jnp.where(index % 2 == 0, pair, pair[::-1]) * (t // 2)
    else:
        cut, start = lambda x: x[None], index[None] * t
    rows, ids = (None, None) if ids is None else (cut(ids), gather(ids))
    o, highest = attention_runs(
        _expand, cut(q), start, rows, (k_up, v_up), (gather(latent), gather(k_rope)), ids,
        scale=scale, implementation=implementation,
    )  # fmt: skip
    return (_from_halves(axis, o) if balanced else o[0]), highest


def _half_routes(R):
    """Where a device's first and second half shards go. Half h of 2 R belongs to device min(h, 2 R - 1 - h).

    R is even, so either list is a permutation, and even devices receive a low half by the first one.
    """
    owner = lambda h: min(h, 2 * R - 1 - h)
    return [[(i, owner(2 * i + s)) for i in range(R)] for s in (0, 1)]


def _to_halves(axis, x_BT):
    """[B, t, ..] -> [2, B, t / 2, ..], one low and one high half of the sequence, in the order they arrive."""
    halves = jnp.split(x_BT, 2, axis=1)
    routes = _half_routes(jax.lax.axis_size(axis))
    return jnp.stack([jax.lax.ppermute(x, axis, route) for x, route in zip(halves, routes)])


def _from_halves(axis, x_GBT):
    """Undoes `_to_halves`."""
    routes = _half_routes(jax.lax.axis_size(axis))
    back = lambda x, route: jax.lax.ppermute(x, axis, [(j, i) for i, j in route])
    return jnp.concatenate([back(x, route) for x, route in zip(x_GBT, routes)], axis=1)

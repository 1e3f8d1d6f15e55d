"""The model over cached sequences: prefill and decoding are this one function at different numbers of tokens.

Layers are unrolled, each with weights of its own: sliced out of a stack at every step they would be copied first, which
for decoding is most of the time. `serving_weights` cuts the stacks up once, in the compute dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.depth_read import depth_read
from trillium_moe.config import ModelConfig
from trillium_moe.model.cache import Cache
from trillium_moe.model.kda import settled
from trillium_moe.model.norms import rms_norm
from trillium_moe.model.params import layer, linear, wide, wide_dtype
from trillium_moe.model.stack import Schedule
from trillium_moe.parallel import sharding
from trillium_moe.shapes import Array, Bool, Float, Int, PyTree, Shaped
from trillium_moe.train.state import model_def


class Weights(NamedTuple):
    """A model cut up for generation. Pytree fields are untyped: arrays or shapes."""

    embed: Any  # [V, D]
    head: Any  # [D, V]
    norm: Any  # [D]
    sublayer_norm: tuple[Any, ...]  # S of [D]
    query: tuple[Any, ...]  # S + 1 of [D]: pseudo-queries of the depth reads; zeros without
    layers: tuple[Any, ...]  # per sublayer: its variables
    vision: Any = None  # variables of the tower and the projector
    mtp: Any = None  # {"fuse", "hidden_norm", "token_norm", "mixer_norm", "ffn_norm": arrays, "mla", "moe": variables}


class Flat(NamedTuple):
    """`Weights` as a list of arrays: layers of variables take most of a millisecond to look through at every call."""

    leaves: Any
    shape: Any  # what puts them together again


@functools.cache  # one object for equal shapes, so that programs are found by identity
def _shape(treedef) -> "_Shape":
    return _Shape(treedef)


@jax.tree_util.register_static
class _Shape:
    def __init__(self, treedef):
        self.treedef = treedef


def flat(weights: Weights) -> Flat:
    leaves, treedef = jax.tree.flatten(weights)
    return Flat(leaves, _shape(treedef))


def whole(weights: Flat) -> Weights:
    return jax.tree.unflatten(weights.shape.treedef, weights.leaves)


@functools.cache
def _graphdefs(config: ModelConfig) -> dict[str, nnx.GraphDef]:
    """Graphdef of one layer of each kind."""
    model = nnx.merge(*model_def(config))
    defs = {kind: nnx.split(getattr(model, kind))[0] for kind in Schedule.of(config).kinds}
    if config.n_mtp:
        defs |= {f"mtp_{kind}": nnx.split(getattr(model.mtp, kind))[0] for kind in ("mla", "moe")}
    if config.vision.n_layers:
        defs["vision"] = nnx.split(model.vision)[0]
    return defs


@functools.cache
def _packer(config: ModelConfig, kind: str) -> Callable[[nnx.State], nnx.State]:
    """Packs the variables of one layer of a kind; one program for all layers of the kind."""
    graphdef = _graphdefs(config)[kind]
    return jax.jit(lambda variables: _pack(graphdef, variables)[1])


def _pack(graphdef, variables):
    module = nnx.merge(graphdef, variables)
    if hasattr(module, "pack"):
        module.pack()
    return nnx.split(module)


@functools.cache
def _packed_graphdefs(config: ModelConfig) -> dict[str, nnx.GraphDef]:
    """`_graphdefs` of packed layers."""
    found = {}

    def trace(params, router_bias):
        model = nnx.merge(model_def(config)[0], params, router_bias)
        for name, graphdef in _graphdefs(config).items():
            if name != "vision":
                owner, kind = (model.mtp, name[4:]) if name.startswith("mtp_") else (model, name)
                found[name], _ = _pack(graphdef, layer(nnx.split(getattr(owner, kind))[1], 0))

    jax.eval_shape(trace, *model_def(config)[1:])
    return found


def _module(config: ModelConfig, kind: str, variables: nnx.State) -> nnx.Module:
    packed = "inner" in variables
    return nnx.merge((_packed_graphdefs if packed else _graphdefs)(config)[kind], variables)


def serving_weights(config: ModelConfig, params: PyTree, router_bias: PyTree) -> Weights:
    """Weights by layer: matrices in the compute dtype, cut over the mesh in context as layers use them.

    Without a mesh, matrices that share their input are packed into one (`pallas_kernels.few_rows`); heads that lie side
    by side in one matrix could not be cut over devices.
    """
    mesh = sharding.current_mesh()
    graphdef = model_def(config)[0]
    compute = jnp.dtype(config.dtypes.compute)

    def dtype_of(variable):
        # as sharding.gathered casts: router logits are computed in at least float32
        axes, meta = variable.get_metadata()["axes"], variable.get_metadata()
        matrix = isinstance(variable, nnx.Param) and (meta["muon"] and axes[-1] != "experts" or "vocab" in axes)
        return compute if matrix else None

    def cut(state, i=None):
        def one(_, variable):
            value = variable[...] if i is None else variable[...][i]
            dtype = dtype_of(variable)
            return variable.replace(value if dtype is None else value.astype(dtype))

        return nnx.map_state(one, state)

    def unstack(params, router_bias):
        model = nnx.merge(graphdef, params, router_bias)
        schedule = Schedule.of(config)
        states = {kind: nnx.split(getattr(model, kind))[1] for kind in schedule.kinds}
        pack = lambda kind, variables: _packer(config, kind)(variables) if mesh is None else variables
        names = [schedule.kinds[k] for k in schedule.kind]
        layers = tuple(pack(kind, cut(states[kind], i)) for kind, i in zip(names, schedule.index))
        if config.residual == "none":
            query = jnp.zeros((schedule.n_sublayers + 1, config.d_model), jnp.float32)
        else:
            query = wide(model.read_norm[...]) * wide(model.read_query[...])
        mtp = None
        if config.n_mtp:
            names = ("fuse", "hidden_norm", "token_norm", "mixer_norm", "ffn_norm")
            mtp = {name: getattr(model.mtp, name)[...] for name in names}
            for kind in ("mla", "moe"):
                mtp[kind] = pack(f"mtp_{kind}", cut(nnx.split(getattr(model.mtp, kind))[1], 0))
        vision = cut(nnx.split(model.vision)[1]) if config.vision.n_layers else None
        return Weights(model.embed[...].astype(compute), model.head[...].astype(compute), model.norm[...],
                       tuple(model.sublayer_norm[...]), tuple(query), layers, vision, mtp)

    if mesh is None:
        return unstack(params, router_bias)  # slices and casts: compiling them as one program would take longer
    place = _placed(jax.eval_shape(unstack, params, router_bias), dict(mesh.shape))
    return jax.jit(unstack, out_shardings=place)(params, router_bias)


def _placed(weights: Weights, sizes: dict[str, int]) -> Weights:
    """Specs: heads, hidden widths and vocabulary over model, experts over expert, the rest whole."""
    def one(x):
        if not isinstance(x, nnx.Variable):
            return jax.tree.map(lambda _: jax.P(), x)
        axes = [axis for axis in x.get_metadata()["axes"] if axis != "layers"]
        spec = sharding.as_spec(sharding.tensor_spec(tuple(axes), sizes))
        return jax.tree.map(lambda _: spec, x)

    placed = jax.tree.map(one, weights, is_leaf=lambda x: isinstance(x, nnx.Variable))
    model = "model" if sizes["model"] > 1 else None
    vision = jax.tree.map(lambda _: jax.P(), weights.vision)  # whole: it runs once for a picture
    return placed._replace(embed=jax.P(model), head=jax.P(None, model), vision=vision)


def extend(
    config: ModelConfig,
    weights: Weights,
    cache: Cache,
    tokens_ST: Int[Array, "S T"],
    n_S: Int[Array, " S"],
    rows_S: Int[Array, " S"] | None = None,
    undecided: bool = False,
    seen: tuple[Bool[Array, "S T"], Float[Array, "S T D"]] | None = None,
) -> tuple[Float[Array, "S T D"], Cache]:
    """Continues sequences: the first n of the tokens of each row follow what its sequence already holds.

    A row with n = 0 stays as it is; what stands in the places past n does not matter.

    Args:
      tokens_ST: up to T tokens for each of S sequences.
      rows_S: which sequences of the cache, without repeats; None: all of them, in order.
      undecided: how many of the tokens count is said later, by `settle` (few tokens, all sequences).
      seen: where a picture's features stand in place of a token's embedding, and the features (`see`).

    Returns:
      Hidden states before the final norm, for `logits`; those past n are meaningless. And the cache with the tokens.
    """
    pick = lambda tree: tree if rows_S is None else jax.tree.map(lambda x: x[rows_S], tree)
    put = lambda tree, part: part if rows_S is None else jax.tree.map(lambda x, p: x.at[rows_S].set(p), tree, part)
    schedule = Schedule.of(config)
    length_S = pick(cache.length)
    mla, kda = list(cache.mla), list(cache.kda)

    live = embed(config, weights, tokens_ST)
    if seen is not None:
        live = jnp.where(seen[0][..., None], seen[1].astype(live.dtype), live)
    sealed, new = [], None
    how = None if sharding.current_mesh() is None else "xla"  # kernels are not cut over devices by themselves
    for s, variables in enumerate(weights.layers):
        query = weights.query[s] if schedule.reads else None
        x, live = _read(query, tuple(sealed), live, new, weights.sublayer_norm[s], config.norm_eps, implementation=how)
        if schedule.reads and s % schedule.block == 0:
            sealed, live = [*sealed, live], None
        kind, i = schedule.kinds[schedule.kind[s]], schedule.index[s]
        match kind:
            case "mla":
                new, mla[i] = _mixer(config, kind, variables, x, n_S, mla[i], rows_S, length_S)
            case "kda":
                new, state = _mixer(config, kind, variables, x, n_S, pick(kda[i]), undecided=undecided)
                kda[i] = put(kda[i], state)
            case _:
                new = _ffn(config, kind, variables, x)
    query = weights.query[-1] if schedule.reads else None
    h, _ = _read(query, tuple(sealed), live, new, None, config.norm_eps, implementation=how)
    length = cache.length if undecided else put(cache.length, length_S + n_S)
    return h, cache._replace(length=length, mla=tuple(mla), kda=tuple(kda))


# Programs inside the program: layers of a kind are traced and lowered once, not once each.

_read = jax.jit(depth_read, static_argnames=("eps", "implementation"))


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="undecided")
def _mixer(config: ModelConfig, kind: str, variables, x, n_S, past, *where, **options) -> tuple[Array, Any]:
    return _module(config, kind, variables).extend(x, n_S, past, *where, **options)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _ffn(config: ModelConfig, kind: str, variables, x) -> Array:
    module = _module(config, kind, variables)
    return module.each(x) if kind.endswith("moe") else module(x)[0]


def settle(cache: Cache, n_B: Int[Array, " B"]) -> Cache:
    """The cache after the first n tokens of an undecided extension; what it holds of the others is never read."""
    return cache._replace(length=cache.length + n_B, kda=tuple(settled(x, n_B) for x in cache.kda))


def extend_mtp(
    config: ModelConfig,
    weights: Weights,
    cache: Cache,
    h_STD: Float[Array, "S T D"],
    next_ST: Int[Array, "S T"],
    n_S: Int[Array, " S"],
    length_S: Int[Array, " S"],
    rows_S: Int[Array, " S"] | None = None,
) -> tuple[Float[Array, "S T D"], Cache]:
    """The multi-token-prediction layer behind `extend`.

    Args:
      h_STD: what `extend` returned for these tokens.
      next_ST: the token that follows each of them.
      length_S: tokens before them.

    Returns:
      Hidden states whose `logits` predict the token after the next one, and the cache with the layer's latents.
    """
    m, eps = weights.mtp, config.norm_eps
    h = rms_norm(rms_norm(h_STD, weights.norm, eps), m["hidden_norm"], eps)
    x = linear(jnp.concatenate([h, rms_norm(embed(config, weights, next_ST), m["token_norm"], eps)], -1), m["fuse"])
    h = rms_norm(x, m["mixer_norm"], eps)
    y, latents = _mixer(config, "mtp_mla", m["mla"], h, n_S, cache.mtp, rows_S, length_S)
    x = x + y
    y = _ffn(config, "mtp_moe", m["moe"], rms_norm(x, m["ffn_norm"], eps))
    return x + y, cache._replace(mtp=latents)


def see(
    config: ModelConfig, weights: Weights, patches: Shaped[Array, "B P pixels"], place: Int[Array, "B P 7"]
) -> Float[Array, "B N D"]:
    """Features of packed pictures, as `model.vision.Vision` gives them."""
    return nnx.merge(_graphdefs(config)["vision"], weights.vision)(patches, place)


def embed(config: ModelConfig, weights: Weights, tokens: Int[Array, "*b"]) -> Float[Array, "*b D"]:
    return jnp.take(weights.embed, tokens, axis=0).astype(config.dtypes.compute)


def logits(config: ModelConfig, weights: Weights, h: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
    """Logits of hidden states, as `Trillium.logits` of their final norm."""
    h = rms_norm(h, weights.norm, config.norm_eps)
    head = weights.head.astype(h.dtype)
    return jnp.dot(h, head, preferred_element_type=wide_dtype(h)).astype(config.dtypes.logits)

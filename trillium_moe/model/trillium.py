"""The whole language model: embedding, layer stack, final norm, untied head, optional multi-token prediction."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from trillium_moe.config import ModelConfig
from trillium_moe.model.context import Context
from trillium_moe.model.ffn import DenseFFN
from trillium_moe.model.kda import KDA
from trillium_moe.model.mla import MLA
from trillium_moe.model.moe import MoE
from trillium_moe.model.norms import rms_norm
from trillium_moe.model.params import (
    RouterBias,
    layer,
    linear,
    normal,
    ones,
    param,
    stack,
    wide,
    wide_dtype,
    zeros,
)
from trillium_moe.model.stack import Schedule, run_stack
from trillium_moe.model.vision import Images, Vision
from trillium_moe.parallel import sharding
from trillium_moe.shapes import Array, Float, Int, PyTree


def make_layer(kind: str, config: ModelConfig, rngs: nnx.Rngs) -> nnx.Module:
    """One layer of a kind."""
    match kind:
        case "kda":
            return KDA(config, rngs=rngs)
        case "mla":
            return MLA(config, rngs=rngs)
        case "dense":
            return DenseFFN(config, config.ffn_dim, rngs=rngs)
    return MoE(config, rngs=rngs)


class Trillium(nnx.Module):
    """Kimi K3's text tower (model.md 2.1), and by configuration its relatives.

    `nnx.split(model, nnx.Param, RouterBias)` gives (graphdef, parameters, router bias). Layers of one kind are stacked
    on a leading `layers` axis: `kda`, `mla`, `dense`, `moe`. Sublayer s is layer s // 2's mixer (even) or FFN (odd).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        D, V, S, dtype = config.d_model, config.vocab_size, 2 * config.n_layers, config.dtypes.param
        init = normal(config.init_std)
        self.embed = param(rngs, (V, D), ("vocab", "embed"), dtype, init, decay=True)
        self.head = param(rngs, (D, V), ("embed", "vocab"), dtype, init, decay=True)
        self.norm = param(rngs, (D,), ("embed",), dtype, ones)
        self.sublayer_norm = param(rngs, (S, D), ("layers", "embed"), dtype, ones)
        if config.residual != "none":
            # one depth read before every sublayer and one at the end; the first never runs (nothing to choose from)
            self.read_norm = param(rngs, (S + 1, D), ("layers", "embed"), dtype, ones)
            self.read_query = param(rngs, (S + 1, D), ("layers", "embed"), dtype, zeros)
        schedule = Schedule.of(config)
        for kind in schedule.kinds:
            setattr(self, kind, stack(lambda rngs, k=kind: make_layer(k, config, rngs), schedule.count(kind), rngs))
        if config.n_mtp:
            self.mtp = MultiTokenPrediction(config, rngs=rngs)
        if config.vision.n_layers:
            self.vision = Vision(config, rngs=rngs)

    def hidden(
        self,
        tokens_BT: Int[Array, "B T"],
        ctx: Context,
        images: Images | None = None,
        past: dict[str, PyTree] | None = None,
    ) -> tuple[Float[Array, "B T D"], dict]:
        """Normed output of the last layer, and aux as `run_stack` gives it.

        Placeholder tokens of pictures are tokens like any other to all that follows: segments, router statistics.

        past: {kind of mixer: what its layers are given of the sequences that the rows continue, stacked}; the mixers'
          aux is then {"past": what they give of the new tokens}. For `trillium_moe.infer.exact`.
        """
        kinds, state, fns = {}, {}, {}
        for kind in Schedule.of(self.config).kinds:
            graphdef, kinds[kind], own = nnx.split(getattr(self, kind), nnx.Param, RouterBias)
            state[kind] = own, () if past is None or kind not in past else (past[kind],)
            fns[kind] = functools.partial(self.sublayer, graphdef)
        if self.config.residual == "none":
            query = jnp.zeros_like(self.sublayer_norm[...])  # not read
        else:
            query = wide(self.read_norm[...]) * wide(self.read_query[...])
        params = {"kinds": kinds, "norm": self.sublayer_norm[...], "read": query}
        x = self.embedding(tokens_BT)
        x = x if images is None else self.vision.insert(x, images)
        h, aux = run_stack(self.config, fns, params, state, x, ctx)
        return rms_norm(h, self.norm[...], self.config.norm_eps), aux

    def sublayer(self, graphdef, params, state, x_BTD, ctx) -> tuple[Float[Array, "B T D"], dict]:
        """One layer of a kind, its weights gathered for as long as it runs."""
        params, (own, past) = sharding.gathered(params, self.config.dtypes.compute), state
        y, aux = nnx.merge(graphdef, params, own)(sharding.activations(x_BTD), ctx, *past)
        return sharding.activations(y), aux

    def mtp_hidden(
        self, h_BTD: Float[Array, "B T D"], next_BT: Int[Array, "B T"], ctx: Context
    ) -> tuple[Float[Array, "B T D"], dict]:
        """Normed hidden states that predict the token after next, given those for the next token and that token."""
        h, aux = self.mtp(h_BTD, self.embedding(next_BT), ctx)
        return rms_norm(h, self.norm[...], self.config.norm_eps), aux

    def embedding(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        dtype = self.config.dtypes.compute
        table_VD = sharding.gathered_variable(self.embed, dtype)[...]
        return sharding.activations(jnp.take(table_VD, tokens_BT, axis=0).astype(dtype))

    def logits(self, h_BTD: Float[Array, "*b D"]) -> Float[Array, "*b V"]:
        """Logits of normed hidden states, in the policy's logits dtype."""
        dtype = self.config.dtypes.logits
        head_DV = sharding.gathered_variable(self.head, h_BTD.dtype)
        return jnp.dot(h_BTD, head_DV.astype(h_BTD.dtype), preferred_element_type=wide_dtype(h_BTD)).astype(dtype)

    def __call__(
        self, tokens_BT: Int[Array, "B T"], segment_ids_BT: Int[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T V"], dict]:
        """Logits of the next token at every position, and aux."""
        h, aux = self.hidden(tokens_BT, Context(segment_ids_BT))
        return self.logits(h), aux


class MultiTokenPrediction(nnx.Module):
    """Predicts the token after next: one more MLA + MoE layer over [hidden; embedding of the next token].

    K3 was pre-trained with one such layer whose fusion is not published; this is the form of DeepSeek-V3 (2412.19437,
    Eq. 21-25): both inputs normed, one projection, a backbone layer, the shared final norm and head.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        D, dtype = config.d_model, config.dtypes.param
        self.fuse = param(rngs, (2 * D, D), ("embed", "embed"), dtype, normal(config.init_std), muon="whole")
        for name in ("hidden_norm", "token_norm", "mixer_norm", "ffn_norm"):
            setattr(self, name, param(rngs, (D,), ("embed",), dtype, ones))
        for kind in ("mla", "moe"):  # stacked, though there is one of each: their state is handled like the backbone's
            setattr(self, kind, stack(lambda rngs, k=kind: make_layer(k, config, rngs), 1, rngs))

    def __call__(
        self, h_BTD: Float[Array, "B T D"], next_BTD: Float[Array, "B T D"], ctx: Context
    ) -> tuple[Float[Array, "B T D"], dict]:
        """Hidden states for token t + 2 at t, from those for t + 1 and its embedding; the final norm is not applied."""
        eps, aux = self.config.norm_eps, {}
        both = [rms_norm(h_BTD, self.hidden_norm[...], eps), rms_norm(next_BTD, self.token_norm[...], eps)]
        dtype = self.config.dtypes.compute
        x = linear(jnp.concatenate(both, axis=-1), sharding.gathered_variable(self.fuse, dtype))
        for kind, norm in (("mla", self.mixer_norm), ("moe", self.ffn_norm)):
            graphdef, state = nnx.split(getattr(self, kind))
            state = sharding.gathered(layer(state, 0), dtype)
            y, own = nnx.merge(graphdef, state)(rms_norm(x, norm[...], eps), ctx)
            x, aux[kind] = x + y, jax.tree.map(lambda a: a[None], own)
        return x, jax.lax.stop_gradient(aux)

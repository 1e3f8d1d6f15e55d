"""Stable LatentMoE: many routed experts in a latent width, shared experts at full width (model.md 2.6)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels import few_rows
from pallas_kernels.mxfp4 import GROUP, Packed
from pallas_kernels.router import router as route
from trillium_moe.config import ModelConfig
from trillium_moe.model import few, router
from trillium_moe.model.context import Context
from trillium_moe.model.experts import Matrices, activation, alignment, ffn
from trillium_moe.model.ffn import DenseFFN, activate
from trillium_moe.model.norms import rms_norm
from trillium_moe.model.params import RouterBias, linear, normal, ones, param, wide, wide_dtype, zeros
from trillium_moe.model.permute import dispatch, plan
from trillium_moe.model.quantise import mxfp4_weights, mxfp8
from trillium_moe.parallel import expert, sharding
from trillium_moe.parallel.manual import layout
from trillium_moe.shapes import Array, Float


class MoE(nnx.Module):
    """One mixture layer: y = up(norm(sum_j p_j E_j(down x))) + shared(x)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c, D, R = config.moe, config.d_model, config.expert_width
        E, F, dtype, init = c.n_experts, c.expert_dim, config.dtypes.param, normal(config.init_std)
        self.config = config
        width = "latent" if c.latent_dim else "embed"
        weight = lambda shape, axes: param(rngs, shape, axes, dtype, init, muon="whole")
        self.router = weight((D, E), ("embed", "experts"))
        self.bias = RouterBias(jnp.zeros(E, jnp.promote_types(dtype, jnp.float32)), axes=("experts",))
        if c.latent_dim:
            self.down = weight((D, R), ("embed", "latent"))
            if c.latent_norm:
                self.norm = param(rngs, (R,), ("latent",), dtype, ones)
            self.up = weight((R, D), ("latent", "embed"))
        for name, inner, outer in (("w_gate", R, F), ("w_up", R, F), ("w_down", F, R)):
            axes = (width, "expert_mlp") if name != "w_down" else ("expert_mlp", width)
            if c.experts_format == "dense":
                setattr(self, name, weight((E, inner, outer), ("experts", *axes)))
            else:  # as `pallas_kernels.mxfp4.Packed` holds them
                byte = lambda shape, axes: param(rngs, (E, *shape), ("experts", *axes), "uint8", zeros)
                setattr(self, f"{name}_codes", byte((outer, inner // 2), axes[::-1]))
                setattr(self, f"{name}_scales", byte((inner // GROUP, outer), axes))
        if c.n_shared:
            self.shared = DenseFFN(config, c.n_shared * F, rngs=rngs)

    def logits(self, x_MD: Float[Array, "*b D"]) -> Float[Array, "*b E"]:
        """x W, float32 throughout: near-tie experts flip when a TPU runs this dot in one bfloat16 pass."""
        x = wide(x_MD)
        return jnp.dot(x, self.router.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)

    def scores(self, x_MD: Float[Array, "*b D"]) -> Float[Array, "*b E"]:
        """What selects and weighs experts, at least float32."""
        return jax.nn.sigmoid(self.logits(x_MD))

    def latents(self, x: Float[Array, "*b D"]) -> Float[Array, "*b L"]:
        """What routed experts take: x in their width."""
        c, z = self.config.moe, x
        if c.latent_dim and c.quantise:
            z = jnp.einsum("...d,dl->...l", x, self.down.astype(x.dtype), preferred_element_type=wide_dtype(x))
        elif c.latent_dim:
            z = linear(x, self.down)
        return self._quantised(z, x.dtype)

    def _quantised(self, z: Float[Array, "*b L"], dtype: Any) -> Float[Array, "*b L"]:
        """z as quantised experts take it, in a dtype that holds MXFP8 exactly.

        Rounded once and from float32: the last bit of bfloat16 hangs on the order of a sum, and what differs there is a
        whole step of E4M3 where it crosses a tie.
        """
        return mxfp8(z).astype(dtype) if self.config.moe.quantise else z

    def weights(self) -> tuple[Matrices, Matrices, Matrices]:
        """w_gate, w_up [E, L, F] and w_down [E, F, L], as the config has them multiplied: packed or quantised, too."""
        names = ("w_gate", "w_up", "w_down")
        if self.config.moe.experts_format == "mxfp4":
            return tuple(Packed(*(getattr(self, f"{n}_{part}")[...] for part in ("codes", "scales"))) for n in names)
        weights = (getattr(self, n)[...] for n in names)
        return tuple(map(mxfp4_weights, weights) if self.config.moe.quantise else weights)

    def __call__(self, x_BTD: Float[Array, "B T D"], ctx: Context) -> tuple[Float[Array, "B T D"], dict]:
        c, (B, T, D) = self.config.moe, x_BTD.shape
        real = ctx.real_tokens((B, T))
        where = None if c.balancing == "batch_threshold" else layout(B, T)
        # cut over a mesh, rows and time cannot merge into one axis
        x, real = (x_BTD, real) if where else (x_BTD.reshape(-1, D), real.reshape(-1))
        scores, bias = self.scores(x), self.bias[...]
        z = self.latents(x)
        if c.balancing == "batch_threshold":
            u, aux = self.expert_choice(z, scores, real)
        else:
            # statistics of `aux` are those of each shard until `parallel.expert.reduce_stats`
            experts, weights, alpha, aux = expert.route(where, c, scores, bias, real)
            if c.balancing == "quantile_exact":
                scores = jax.lax.stop_gradient(scores)
                all_tokens = scores.reshape(-1, c.n_experts), alpha.reshape(-1)
                aux["bhat"] = router.exact_bhat(*all_tokens, c.k, real.reshape(-1))
                aux["batches"] = jnp.ones((), jnp.int32)
            elif c.balancing == "aux_loss":
                load = aux["load"].sum(0) if where else aux["load"]
                loss = router.aux_loss(scores.reshape(-1, c.n_experts), load, real.reshape(-1))
                weights = router.add_loss(weights, c.aux_weight * ctx.aux_scale * loss)
                aux["aux_loss"] = jax.lax.stop_gradient(loss)
            if c.record:
                first = experts[: -(-c.record // T)] if where else experts
                aux["experts"] = first.reshape(-1, c.k)[: c.record]
            u, dropped = expert.mix(where, self.config, z, experts, weights, self.weights())
            aux |= dropped
        return self.output(x, u).reshape(x_BTD.shape), aux

    def each(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The layer for generation: no statistics, nothing dropped, no token's result depends on another token."""
        c, (B, T, D) = self.config.moe, x_BTD.shape
        where = layout(B, T)
        # experts cut over devices stay where they are: every device runs its own for all tokens
        how = few.variant(B * T, c.k, c.n_experts, gather=where is None, packed=c.experts_format == "mxfp4",
                          fused=hasattr(self, "inner") and few.fuses(self.config))
        x = x_BTD if where and how == "grouped" else x_BTD.reshape(-1, D)
        z, logits, shared = self._projections(x)
        bias, scores = self.bias[...], jax.nn.sigmoid(logits.reshape(*x.shape[:-1], -1, c.n_experts).sum(-2))
        if how == "fused":
            routes = few_rows.route(logits, bias, k=c.k, scale=float(c.routed_scale))
            u = few_rows.experts(z, routes, c.k, *self.weights(), activation=activation(self.config))
        elif how == "grouped":
            plain = dataclasses.replace(c, balancing="none", capacity=0.0)  # without statistics, with room for all
            experts, p, _, _ = expert.route(where, plain, scores, bias, jnp.ones(x.shape[:-1], bool))
            u, _ = expert.mix(where, dataclasses.replace(self.config, moe=plain), z, experts, p, self.weights())
        else:
            # kernels run on shards, and here all tokens are on every device: XLA's form where there are several
            implementation = "xla" if where else c.router_implementation or None
            found = route(scores, bias, k=c.k, scale=c.routed_scale, implementation=implementation)
            u = getattr(few, how)(self.config, z, found.weights_MK, found.experts_MK, self.weights())
        if not hasattr(self, "inner"):
            return self.output(x, u).reshape(x_BTD.shape)
        return self._packed_output(u if how == "fused" else u[None], *shared).reshape(x_BTD.shape)

    def pack(self) -> None:
        """For generation on one device: one matrix for all that multiplies x (`pallas_kernels.few_rows`), one for what
        leads back to the model's width."""
        c, dtype = self.config.moe, self.config.dtypes.compute
        latent = ["down", "up"] if c.latent_dim else []
        inner = [getattr(self, name)[...] for name in latent[:1]]
        outer = [getattr(self, name)[...] for name in latent[1:]]
        if c.n_shared:
            inner += [self.shared.gate[...], self.shared.up[...]]
            outer.append(self.shared.down[...])
        inner.append(few_rows.exact(self.router[...], dtype))
        self.inner = nnx.Param(few_rows.pack(inner, dtype))
        if outer:
            self.outer = nnx.Param(few_rows.pack([jnp.concatenate(outer)], dtype))
        for name in (*latent, *(["shared"] if c.n_shared else []), "router"):
            delattr(self, name)

    def _projections(self, x) -> tuple[Array, Array, list[Array]]:
        """What experts take, router logits (packed: that add up), and (packed only) the shared experts' gate and up."""
        c, M = self.config.moe, x.shape[0]
        if not hasattr(self, "inner"):
            return self.latents(x), self.logits(x), []
        E, parts = c.n_experts, few_rows.exact_parts(x.dtype)
        sizes = [c.latent_dim] if c.latent_dim else []
        sizes += [c.n_shared * c.expert_dim] * 2 if c.n_shared else []
        dtypes = [x.dtype] * len(sizes)
        if c.latent_dim and c.quantise:
            dtypes[0] = wide_dtype(x)
        *rest, logits = few_rows.linear(x, self.inner[...], (*sizes, parts * E), (*dtypes, wide_dtype(x)))
        z = self._quantised(rest.pop(0) if c.latent_dim else x, x.dtype)
        return z, logits, rest or [jnp.zeros((M, 0), x.dtype)] * 2

    def _packed_output(self, parts_GML, gate, up):
        """`output` of packed weights, from the shared experts' gate and up and routed experts' sums, to be added up."""
        c, D = self.config.moe, self.config.d_model
        if not c.latent_dim:
            u = parts_GML.sum(0).astype(gate.dtype)
            hidden = activate(self.config, gate, up)
            return u + few_rows.linear(hidden, self.outer[...], (D,))[0] if c.n_shared else u
        norm = self.norm[...] if c.latent_norm else None
        joined = few_rows.join(parts_GML, norm, self.config.norm_eps, gate, up, activation=activation(self.config))
        return few_rows.linear(joined, self.outer[...], (D,))[0]

    def output(self, x: Float[Array, "*b D"], u: Float[Array, "*b L"]) -> Float[Array, "*b D"]:
        """Mixed experts back in the model's width, and the shared ones."""
        c, u = self.config.moe, u.astype(x.dtype)
        if not c.latent_dim:
            return u + self.shared(x)[0] if c.n_shared else u
        u = rms_norm(u, self.norm[...], self.config.norm_eps) if c.latent_norm else u
        if not c.n_shared:
            return linear(u, self.up)
        mesh = sharding.current_mesh()
        if mesh is not None and mesh.shape.get("model", 1) > 1:  # the shared experts' hidden width is cut, u is whole
            return linear(u, self.up) + self.shared(x)[0]
        # one product, and so one rounding, as in generation (`_packed_output`)
        outer = [w.astype(x.dtype) for w in (self.up, self.shared.down)]
        return linear(jnp.concatenate([u, self.shared.hidden(x)], axis=-1), jnp.concatenate(outer))

    def expert_choice(self, z_ML, scores_ME, real_M) -> tuple[Float[Array, "M L"], dict]:
        """Balancing by batch_threshold: experts pick tokens, so a token has between 0 and E experts."""
        c, (M, E) = self.config.moe, scores_ME.shape
        visible = jnp.where(real_M[:, None], jax.lax.stop_gradient(scores_ME), -1)
        tokens_EQ, taken_ME = router.batch_threshold(visible, c.k)
        total_M = jnp.where(taken_ME, scores_ME, 0).sum(-1) + 1e-18  # whose square, in the gradient, is above zero
        token_A = tokens_EQ.reshape(-1)
        expert_A = jnp.repeat(jnp.arange(E), tokens_EQ.shape[1])
        slot, source, sizes = plan(expert_A, E, alignment(self.config))
        rows = dispatch(jnp.take(z_ML, token_A, axis=0), slot, source, 1)
        weight_A = c.routed_scale * scores_ME[token_A, expert_A] / total_M[token_A]
        weight_R = dispatch(weight_A[:, None], slot, source, 1)[:, 0]
        y_AL = jnp.take(ffn(self.config, rows, weight_R, sizes, *self.weights()), slot, axis=0)
        u = jnp.zeros((M, z_ML.shape[1]), weight_A.dtype).at[token_A].add(wide(y_AL))
        return u, {"load": (taken_ME & real_M[:, None]).sum(0).astype(jnp.int32)}

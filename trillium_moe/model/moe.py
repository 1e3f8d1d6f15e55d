"""Stable LatentMoE: many routed experts in a latent width, shared experts at full width (model.md 2.6)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from pallas_kernels.grouped_matmul import grouped_matmul
from trillium_moe.config import ModelConfig
from trillium_moe.model import router
from trillium_moe.model.context import Context
from trillium_moe.model.ffn import DenseFFN, activate
from trillium_moe.model.norms import rms_norm
from trillium_moe.model.params import RouterBias, linear, normal, ones, param, wide
from trillium_moe.shapes import Array, Float, Int

ALIGN = 64  # rows per block of the grouped matmul: every expert's rows start at a multiple of it


def plan(expert_A: Int[Array, " A"], n_experts: int, align: int = ALIGN) -> tuple[Array, Array, Array]:
    """Where each assignment goes when rows are sorted by expert and every expert starts at a multiple of `align`.

    Args:
      expert_A: expert of every (token, choice) pair; n_experts for an assignment that is dropped.

    Returns:
      slot_A: row of each assignment; dropped ones get the number of rows.
      source_R: assignment of each row; empty rows get A.
      sizes_E: rows per expert, multiples of `align`.
    """
    A = expert_A.shape[0]
    rows = -(-A // align) * align + n_experts * align
    count = jnp.zeros(n_experts, jnp.int32).at[expert_A].add(1, mode="drop")
    sizes = -(-count // align) * align
    order = jnp.argsort(expert_A, stable=True)
    shift = (jnp.cumsum(sizes) - sizes) - (jnp.cumsum(count) - count)  # padding before each expert's first row
    slot = jnp.arange(A) + jnp.take(shift, expert_A[order], mode="fill", fill_value=rows)
    slot_A = jnp.full(A, rows).at[order].set(jnp.minimum(slot, rows))
    source_R = jnp.full(rows, A).at[slot_A].set(jnp.arange(A), mode="drop")
    return slot_A, source_R, sizes


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def dispatch(x_ML, slot_A, source_R, k):
    """Rows of x by expert: row r holds the token of assignment source_R[r], empty rows zero. Gathers both ways."""
    return jnp.take(x_ML, source_R // k, axis=0, mode="fill", fill_value=0)


def _dispatch_bwd(k, slot_A, d_RL):
    d = jnp.take(d_RL, slot_A, axis=0, mode="fill", fill_value=0)
    return wide(d).reshape(-1, k, d.shape[-1]).sum(1).astype(d.dtype), None, None


dispatch.defvjp(lambda x, slot, source, k: (dispatch(x, slot, source, k), slot), _dispatch_bwd)


@jax.custom_vjp
def combine(y_RL, weight_MK, slot_A, source_R):
    """sum_j weight_j y[slot_j] of every token, in at least float32; no scatter in either direction."""
    M, K = weight_MK.shape
    y = jnp.take(y_RL, slot_A, axis=0, mode="fill", fill_value=0).reshape(M, K, -1)
    return jnp.einsum("mkl,mk->ml", wide(y), wide(weight_MK))


def _combine_bwd(saved, d_ML):
    y_RL, weight_MK, slot_A, source_R = saved
    M, K = weight_MK.shape
    y = jnp.take(y_RL, slot_A, axis=0, mode="fill", fill_value=0).reshape(M, K, -1)
    d_weight = jnp.einsum("mkl,ml->mk", wide(y), d_ML)
    weight_R = jnp.take(wide(weight_MK).reshape(-1), source_R, mode="fill", fill_value=0)
    d_y = weight_R[:, None] * jnp.take(d_ML, source_R // K, axis=0, mode="fill", fill_value=0)
    return d_y.astype(y_RL.dtype), d_weight.astype(weight_MK.dtype), None, None


combine.defvjp(lambda *args: (combine(*args), args), _combine_bwd)


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
        self.w_gate = weight((E, R, F), ("experts", width, "expert_mlp"))
        self.w_up = weight((E, R, F), ("experts", width, "expert_mlp"))
        self.w_down = weight((E, F, R), ("experts", "expert_mlp", width))
        if c.n_shared:
            self.shared = DenseFFN(config, c.n_shared * F, rngs=rngs)

    def scores(self, x_MD: Float[Array, "M D"]) -> Float[Array, "M E"]:
        """sigmoid(x W), float32 throughout: near-tie experts flip when a TPU runs this dot in one bfloat16 pass."""
        x = wide(x_MD)
        return jax.nn.sigmoid(jnp.dot(x, self.router.astype(x.dtype), precision=jax.lax.Precision.HIGHEST))

    def experts(self, z_RL: Float[Array, "R L"], sizes_E: Int[Array, " E"]) -> Float[Array, "R L"]:
        """Every row through its own expert."""
        product = functools.partial(
            grouped_matmul, group_sizes_G=sizes_E, align=ALIGN, implementation=self.config.moe.implementation or None
        )
        weight = lambda w: w.astype(z_RL.dtype)
        hidden = activate(self.config, product(z_RL, weight(self.w_gate)), product(z_RL, weight(self.w_up)))
        return product(hidden, weight(self.w_down))

    def __call__(self, x_BTD: Float[Array, "B T D"], ctx: Context) -> tuple[Float[Array, "B T D"], dict]:
        c, E = self.config.moe, self.config.moe.n_experts
        x = x_BTD.reshape(-1, x_BTD.shape[-1])
        real = ctx.real_tokens(x_BTD.shape[:2]).reshape(-1)
        scores, bias = self.scores(x), self.bias[...]
        z = linear(x, self.down) if c.latent_dim else x
        if c.balancing == "batch_threshold":
            u, aux = self.expert_choice(z, scores, real)
        else:
            experts, alpha = router.select(jax.lax.stop_gradient(scores), bias, c.k)
            load = router.loads(experts, E, real)
            aux = {"load": load}
            if c.balancing == "quantile":
                aux["histogram"] = router.margin_histogram(jax.lax.stop_gradient(scores), alpha, bias, c.bins, real)
            elif c.balancing == "quantile_exact":
                aux["bhat"] = router.exact_bhat(jax.lax.stop_gradient(scores), alpha, c.k, real)
                aux["batches"] = jnp.ones((), jnp.int32)
            elif c.balancing == "aux_loss":
                loss = router.aux_loss(scores, load, real)
                scores = router.add_loss(scores, c.aux_weight * ctx.aux_scale * loss)
                aux["aux_loss"] = jax.lax.stop_gradient(loss)
            weights = router.weights_of(scores, experts, c.routed_scale)
            slot, source, sizes = plan(experts.reshape(-1), E)
            u = combine(self.experts(dispatch(z, slot, source, c.k), sizes), weights, slot, source)
        u = u.astype(x.dtype)
        if c.latent_dim:
            u = rms_norm(u, self.norm[...], self.config.norm_eps) if c.latent_norm else u
            u = linear(u, self.up)
        y = u + self.shared(x)[0] if c.n_shared else u
        return y.reshape(x_BTD.shape), aux

    def expert_choice(self, z_ML, scores_ME, real_M) -> tuple[Float[Array, "M L"], dict]:
        """Balancing by batch_threshold: experts pick tokens, so a token has between 0 and E experts."""
        c, (M, E) = self.config.moe, scores_ME.shape
        visible = jnp.where(real_M[:, None], jax.lax.stop_gradient(scores_ME), -1)
        tokens_EQ, taken_ME = router.batch_threshold(visible, c.k)
        total_M = jnp.where(taken_ME, scores_ME, 0).sum(-1) + 1e-20
        token_A = tokens_EQ.reshape(-1)
        expert_A = jnp.repeat(jnp.arange(E), tokens_EQ.shape[1])
        slot, source, sizes = plan(expert_A, E)
        rows = dispatch(jnp.take(z_ML, token_A, axis=0), slot, source, 1)
        y_AL = jnp.take(self.experts(rows, sizes), slot, axis=0)
        weight_A = c.routed_scale * scores_ME[token_A, expert_A] / total_M[token_A]
        u = jnp.zeros((M, z_ML.shape[1]), weight_A.dtype).at[token_A].add(wide(y_AL) * weight_A[:, None])
        return u, {"load": (taken_ME & real_M[:, None]).sum(0).astype(jnp.int32)}

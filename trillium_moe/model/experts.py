"""The routed experts of a mixture layer, on one device: rows out to experts, through them and back (model.md 2.6)."""

from __future__ import annotations

import functools

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.dispatch import is_hopper, target
from pallas_kernels.expert_ffn import Activation, expert_ffn
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.mxfp4 import Packed
from trillium_moe.config import ModelConfig
from trillium_moe.model.ffn import activate
from trillium_moe.model.params import wide, wide_dtype
from trillium_moe.model.permute import dispatch, gather_sum, plan
from trillium_moe.model.quantise import mxfp8
from trillium_moe.shapes import Array, Float, Int

Matrices = Float[Array, "E _ _"] | Packed  # of all experts
ROWS = "expert_rows"  # the tokens' copies, one per expert of a token: not kept for the backward pass, gathered again
BLOCK = 64  # rows that XLA multiplies as one block


def alignment(config: ModelConfig) -> int:
    """Rows that every expert's rows start at a multiple of: what a kernel moves at least, if it takes the call."""
    c, widths = config.moe, (config.moe.expert_dim, config.expert_width)
    if c.implementation in ("xla", "reference"):
        return BLOCK
    if is_hopper() and config.dtypes.compute == "bfloat16" and all(width % 64 == 0 for width in widths):
        return 8
    return 16 if target()[0] == "tpu" and all(width % 128 == 0 for width in widths) else BLOCK


def ffn(
    config: ModelConfig,
    z_RL: Float[Array, "R L"],
    weight_R: Float[Array, " R"],
    sizes_E: Int[Array, " E"],
    w_gate: Float[Array, "E L F"] | Packed,
    w_up: Float[Array, "E L F"] | Packed,
    w_down: Float[Array, "E F L"] | Packed,
) -> Float[Array, "R L"]:
    """weight_r E(z_r) of every row; rows by expert, as `permute.plan` places them for `alignment(config)`.

    Of quantised experts z holds MXFP8 numbers already (`moe.MoE.latents`).
    """
    w_gate, w_up, w_down = (w.astype(z_RL.dtype) for w in (w_gate, w_up, w_down))
    how = {"align": alignment(config), "implementation": config.moe.implementation or None}
    if config.moe.quantise:  # the activation is rounded before its row's weight multiplies: decoding weighs later
        product = functools.partial(grouped_matmul, group_sizes_G=sizes_E, **how)
        gate, up = (product(z_RL, w, dtype=wide_dtype(z_RL)) for w in (w_gate, w_up))
        hidden_RF = mxfp8(activate(config, gate, up)).astype(z_RL.dtype)
        return (weight_R[:, None] * wide(product(hidden_RF, w_down))).astype(z_RL.dtype)
    return expert_ffn(
        z_RL,
        weight_R,
        sizes_E,
        w_gate,
        w_up,
        w_down,
        activation=activation(config),
        **how,
    )


def activation(config: ModelConfig) -> Activation:
    """The activation the config asks for, as kernels take it."""
    return Activation(config.activation, float(config.situ_beta), float(config.situ_linear_beta))


def mixture(
    config: ModelConfig,
    z_ML: Float[Array, "M L"],
    experts_MK: Int[Array, "M k"],
    p_MK: Float[Array, "M k"],
    *weights: Matrices,
) -> Float[Array, "M L"]:
    """sum_j p_j E_j(z) of every token, at least float32.

    The weight multiplies inside the expert, and its gradient comes from there, so experts' results are not kept.
    """
    M, k = experts_MK.shape
    slot_A, source_R, sizes_E = plan(experts_MK.reshape(-1), weights[0].shape[0], alignment(config))

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_anything_except_these_names(ROWS))
    def run(z_ML, p_MK, *weights):
        rows_RL = checkpoint_name(dispatch(z_ML, slot_A, source_R, k), ROWS)
        weight_R = dispatch(p_MK.reshape(M * k, 1), slot_A, source_R, 1)[:, 0]
        return gather_sum(ffn(config, rows_RL, weight_R, sizes_E, *weights), slot_A, source_R, k)

    return run(z_ML, p_MK, *weights)

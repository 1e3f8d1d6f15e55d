"""Routed experts of few tokens, where reading weights is all the time there is.

Sorting rows by expert (`permute`) pads every expert to a block of rows, which suits thousands of tokens. For a step of
decoding there are better orders of the same sums, none of which drops a token or lets it see another:

    gathered   every (token, choice) pair brings its own expert's weights: k M experts are read
    dense      every expert multiplies every token, and the weights of the choices not taken are zero: E experts are
               read, once each, by batched products
    fused      as dense, without the experts that no token takes, in two kernels: `pallas_kernels.few_rows`
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import is_hopper, target
from pallas_kernels.few_rows import MOST_ROWS
from pallas_kernels.mxfp4 import Packed
from pallas_kernels.rounding import rounded
from trillium_moe.config import ModelConfig
from trillium_moe.model.ffn import activate
from trillium_moe.model.params import wide, wide_dtype
from trillium_moe.model.quantise import mxfp8
from trillium_moe.shapes import Array, Float, Int

# Tokens up to which reading all experts takes longer than multiplying them: 790 TFLOP/s over 4.3 TB/s is 184.
DENSE_TOKENS = 256

Weights = tuple[Array | Packed, Array | Packed, Array | Packed]  # w_gate, w_up [E, L, F], w_down [E, F, L]


def fuses(config: ModelConfig) -> bool:
    """Whether kernels serve these experts on the device that the program is for, if tokens are few."""
    c, widths = config.moe, (config.moe.expert_dim, config.expert_width)
    plain = c.experts_format == "dense" and not c.quantise and not c.implementation and not c.router_implementation
    return plain and is_hopper() and config.dtypes.compute == "bfloat16" and all(width % 64 == 0 for width in widths)


def variant(
    n_tokens: int, k: int, n_experts: int, gather: bool = True, packed: bool = False, fused: bool = False
) -> str:
    """fused, gathered, dense or grouped (rows sorted by expert). gather=False where experts are on several devices.

    packed: the weights are MXFP4. Dense would unpack all experts of a layer at once, so it is grouped instead, which on
      Hopper GPUs unpacks inside the product, and so is better for the fewest tokens, too.
    fused: see `fuses`.
    """
    if packed and is_hopper():
        return "grouped"
    if fused and n_tokens <= MOST_ROWS:
        return "fused"
    if gather and 2 * n_tokens * k <= n_experts:
        return "gathered"
    return "dense" if n_tokens <= DENSE_TOKENS and not packed else "grouped"


def gathered(
    config: ModelConfig, z_ML: Float[Array, "M L"], p_MK: Float[Array, "M k"], experts_MK: Int[Array, "M k"], w: Weights
) -> Float[Array, "M L"]:
    """sum_j p_j E_j(z), at least float32, by the weights of every choice."""
    w_gate, w_up, w_down = (_unpacked(jax.tree.map(lambda a: jnp.take(a, experts_MK, axis=0), x), z_ML) for x in w)
    hidden = _hidden(config, "ml,mklf->mkf", z_ML, w_gate, w_up)
    y_MKL = jnp.einsum("mkf,mkfl->mkl", hidden, w_down)
    return _weighed(p_MK[..., None], y_MKL).sum(1)


def dense(
    config: ModelConfig, z_ML: Float[Array, "M L"], p_MK: Float[Array, "M k"], experts_MK: Int[Array, "M k"], w: Weights
) -> Float[Array, "M L"]:
    """sum_j p_j E_j(z), at least float32, by every expert for every token."""
    w_gate, w_up, w_down = (_unpacked(x, z_ML) for x in w)
    E = w_gate.shape[0]
    hidden = _hidden(config, "ml,elf->emf", z_ML, w_gate, w_up)
    p_EM = (wide(p_MK).T[:, None] * (experts_MK.T[:, None] == jnp.arange(E)[:, None])).sum(0)
    if config.moe.quantise:
        return _weighed(p_EM[..., None], jnp.einsum("emf,efl->eml", hidden, w_down)).sum(0)
    # weighed before the last product, as in `expert_ffn`, which then sums over experts, too
    weighed = (p_EM[:, :, None] * wide(hidden)).astype(z_ML.dtype)
    return jnp.einsum("emf,efl->ml", weighed, w_down, preferred_element_type=wide_dtype(z_ML))


def _hidden(config: ModelConfig, spec: str, z_ML: Array, w_gate: Array, w_up: Array) -> Array:
    """What experts' last product takes, in z's dtype: the activation, of quantised ones as MXFP8."""
    if not config.moe.quantise:
        return activate(config, *(jnp.einsum(spec, z_ML, w) for w in (w_gate, w_up)))
    z, w_gate, w_up = (wide(x) if target()[0] == "cpu" else x for x in (z_ML, w_gate, w_up))  # as `few_rows.xla.heads`
    product = functools.partial(jnp.einsum, spec, z, preferred_element_type=wide_dtype(z_ML))
    return mxfp8(activate(config, product(w_gate), product(w_up))).astype(z_ML.dtype)


def _weighed(p, y):
    """Experts' results times their weights, at least float32, rounded where training of quantised experts rounds."""
    return wide(rounded(wide(p) * wide(y), y.dtype))


def _unpacked(w, x):
    """Matrices in x's dtype."""
    return w.unpack(x.dtype) if isinstance(w, Packed) else w.astype(x.dtype)

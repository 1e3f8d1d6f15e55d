"""The public expert feed-forward op."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.expert_ffn import pallas_gpu, pallas_tpu, reference, xla
from pallas_kernels.expert_ffn.activation import Activation
from pallas_kernels.mxfp4 import Packed

IMPLEMENTATIONS = {
    "reference": reference.expert_ffn,
    "xla": xla.expert_ffn,
    "pallas_gpu": pallas_gpu.expert_ffn,
    "pallas_tpu": pallas_tpu.expert_ffn,
}


def expert_ffn(
    x_MD: Float[Array, "M D"],
    weight_M: Float[Array, " M"],
    group_sizes_G: Int[Array, " G"],
    w_gate_GDF: Float[Array, "G D F"] | Packed,
    w_up_GDF: Float[Array, "G D F"] | Packed,
    w_down_GFD: Float[Array, "G F D"] | Packed,
    *,
    align: int,
    activation: Activation = Activation(),
    implementation: str | None = None,
) -> Float[Array, "M D"]:
    """weight (activation(x w_gate, x w_up) w_down) of every row, by the expert of its group.

    The backward pass keeps x and the two products before the activation and forms the activation again. The gradient of
    weight is <d activation, activation>, so results are not kept (SonicMoE, arXiv:2512.14080).

    Args:
      x_MD: rows, sorted by expert.
      weight_M: factor of each row's result; a router's probability.
      group_sizes_G: rows per expert, each a multiple of `align`; their sum is at most M.
      w_gate_GDF, w_up_GDF, w_down_GFD: matrices of each expert, rounded to x' dtype; or packed, without gradients.
      align: see `grouped_matmul`.
      implementation: see `pallas_kernels.dispatch`.

    Returns:
      [M, D] in x' dtype; rows past the last group are zero. Products accumulate, and the activation is formed, in at
      least float32. weight multiplies the activation, before it is rounded to x' dtype.

    Raises:
      ValueError: `align` does not divide M.
      NotImplementedError: the implementation asked for does not serve the call.
    """
    if x_MD.shape[0] % align:
        raise ValueError(f"expert_ffn: align={align} must divide the {x_MD.shape[0]} rows of x; pad x")
    args = x_MD, weight_M, group_sizes_G, w_gate_GDF, w_up_GDF, w_down_GFD
    return dispatch("expert_ffn", IMPLEMENTATIONS, implementation, *args, align=align, activation=activation)

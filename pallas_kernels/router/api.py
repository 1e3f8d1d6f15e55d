"""The public router op: which experts every token takes, with which weights, and how the balancing sees it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import dispatch
from pallas_kernels.router import reference, xla
from pallas_kernels.router.pallas_gpu import select_pallas_gpu
from pallas_kernels.router.pallas_tpu import select_pallas_tpu

IMPLEMENTATIONS = {
    "reference": reference.select,
    "xla": xla.select,
    "pallas_gpu": select_pallas_gpu,
    "pallas_tpu": select_pallas_tpu,
}


class Routing(NamedTuple):
    """Routes of M tokens to k of E experts each."""

    experts_MK: Int[Array, "M k"]  # by falling biased score, ties to the lower index, never twice the same
    weights_MK: Float[Array, "M k"]  # unbiased scores of those experts, normalised to sum to `scale`
    cutoff_M: Float[Array, " M"]  # the (k+1)-th biased score; -inf if k = E
    load_E: Int[Array, " E"]  # real tokens of every expert
    histogram: Int[Array, "E bins"] | None  # real tokens by required bias, cutoff - score; None with bins=0


def router(
    scores_ME: Float[Array, "M E"],
    bias_E: Float[Array, " E"],
    *,
    k: int,
    scale: float = 1.0,
    bins: int = 0,
    real_M: Bool[Array, " M"] | None = None,
    sigmoid: bool = False,
    implementation: str | None = None,
) -> Routing:
    """Routes every token to the k experts of its largest biased scores (Kimi K3, Eq. 11 and sec. 2.3.3).

    Selection is by s + b, ties to the lower index; the weights are scale * s_j / (sum of the chosen s + 1e-20), without
    b. `weights_MK` is differentiable in the scores; nothing is in the bias. Counts are integers, so no order
    of work changes them. bins > 0 counts the required bias of every token and expert, for `quantile_bias`.

    Args:
      scores_ME: scores in (0, 1); float32 (or float64). With `sigmoid`, logits.
      bias_E: of the same dtype; -inf bars an expert as long as k others are left.
      k: experts per token, 1 <= k <= E.
      scale: what the weights of a token sum to.
      bins: bins of the histogram over [min b - 1, max b + 1]; 0: no histogram.
      real_M: False for padding, which is routed but not counted.
      sigmoid: the scores are sigmoid(scores_ME).
      implementation: see `pallas_kernels.dispatch`.

    Raises:
      ValueError: shapes, dtypes or k that do not fit together.
      NotImplementedError: a named implementation cannot serve the call.
    """
    M, E = scores_ME.shape
    if not 1 <= k <= E:
        raise ValueError(f"router: k={k} of {E} experts; choose 1 <= k <= {E}")
    if bins < 0:
        raise ValueError(f"router: bins={bins}; pass 0 for no histogram, or a number of bins")
    if scores_ME.dtype not in (jnp.float32, jnp.float64) or bias_E.dtype != scores_ME.dtype:
        raise ValueError(
            f"router: scores are {scores_ME.dtype} and the bias is {bias_E.dtype}; near ties need float32 for both"
        )
    if bias_E.shape != (E,):
        raise ValueError(f"router: bias has shape {bias_E.shape}; scores of shape {scores_ME.shape} need {(E,)}")
    real = jnp.ones(M, bool) if real_M is None else real_M
    if M == 0:
        implementation = "xla"  # nothing to launch a kernel for
    options = {"k": k, "bins": bins, "sigmoid": sigmoid}
    found = _select(implementation, tuple(options.items()), scores_ME, jax.lax.stop_gradient(bias_E), real)
    weights = _normalised(float(scale), found.chosen_MK)
    return Routing(found.experts_MK, weights, found.cutoff_M, found.load_E, found.histogram)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalised(scale, x_MK):
    """scale x / (sum of x + 1e-20). Nothing keeps all scores of a token from sinking together, and the gradient that a
    division has by itself squares the sum, which is zero in float32 when no chosen logit is above -45."""
    return _normalised_fwd(scale, x_MK)[0]


def _normalised_fwd(scale, x_MK):
    total = x_MK.sum(-1, keepdims=True) + 1e-20
    w_MK = scale * x_MK / total
    return w_MK, (w_MK, total)


def _normalised_bwd(scale, saved, d_MK):
    w_MK, total = saved
    return ((scale * d_MK - (d_MK * w_MK).sum(-1, keepdims=True)) / total,)


_normalised.defvjp(_normalised_fwd, _normalised_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _select(implementation, options, scores_ME, bias_E, real_M):
    return dispatch("router", IMPLEMENTATIONS, implementation, scores_ME, bias_E, real_M, **dict(options))


def _select_fwd(implementation, options, scores_ME, bias_E, real_M):
    found = _select(implementation, options, scores_ME, bias_E, real_M)
    return found, (found.experts_MK, found.chosen_MK, bias_E)


def _select_bwd(implementation, options, saved, d):
    """The gradient of a chosen score goes back to its place; those of the cutoff and of integers are zero."""
    experts, chosen, bias_E = saved
    d_chosen = d.chosen_MK
    if dict(options)["sigmoid"]:
        d_chosen = d_chosen * chosen * (1 - chosen)
    rows = jnp.arange(experts.shape[0])[:, None]
    zeros = jnp.zeros((experts.shape[0], bias_E.shape[0]), chosen.dtype)
    return zeros.at[rows, experts].set(d_chosen, unique_indices=True), None, None


_select.defvjp(_select_fwd, _select_bwd)

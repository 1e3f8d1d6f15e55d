"""What a run of tokens does to the state, as a map: S_out = M S_in + N. The pieces of context parallelism.

M [K, K] is the product over tokens of (I - beta k k^T) Diag(e^g), and N [K, V] the exit state from a zero entry state.
Columns of the state never mix, so [N | M] is the exit state of values [v | 0] from the entry state [0 | I]: one pass of
the op with K more value columns. Unused outputs of that pass are removed by the compiler, which leaves the scores of k
with k, the inverse, and the serial pass.

Where a document starts inside the run, the entry state cannot reach the exit, and M is zero. |M| <= 1 for unit keys and
beta in [0, 1], so folding maps over any number of runs is stable. M and N are float32 (float64 for float64 inputs).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kda.xla import kda_xla


def affine_map(
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    g_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    *,
    segment_ids: Int[Array, "B T"] | None,
    g_min: float | None,
) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]:
    """(M, N) of the tokens of every row; arguments as `api.kda`. Not to be differentiated: see `entry_adjoint`."""
    B, _, H, K = k_BTHK.shape
    V, accumulate = v_BTHV.shape[-1], g_BTHK.dtype
    values = jnp.concatenate([v_BTHV, jnp.zeros_like(k_BTHK)], axis=-1)
    entry = jnp.concatenate([jnp.zeros((K, V), accumulate), jnp.eye(K, dtype=accumulate)], axis=-1)
    entry_BHKV = jnp.broadcast_to(entry, (B, H, K, V + K))
    beta = beta_BTH.astype(accumulate)
    _, exit_BHKV = kda_xla(
        k_BTHK, k_BTHK, values, g_BTHK, beta, scale=1.0, initial_state=entry_BHKV, segment_ids=segment_ids, g_min=g_min
    )
    return exit_BHKV[..., V:], exit_BHKV[..., :V]


def entry_adjoint(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    g_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    d_o_BTHV: Float[Array, "B T H V"],
    *,
    scale: float,
    segment_ids: Int[Array, "B T"] | None,
    g_min: float | None,
) -> Float[Array, "B H K V"]:
    """E of the transposed map dS_in = M^T dS_out + E: what the outputs' gradient leaves at the entry state.

    The reverse pass of the op with a zero gradient at its exit; the gradients of q, k, v, g and beta are not computed.
    """
    B, _, H, K = q_BTHK.shape
    accumulate = g_BTHK.dtype
    beta = beta_BTH.astype(accumulate)

    def outputs(entry_BHKV):
        return kda_xla(
            q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta,
            scale=scale, initial_state=entry_BHKV, segment_ids=segment_ids, g_min=g_min,
        )[0]  # fmt: skip

    # the outputs are affine in the entry state: where the gradient is taken does not matter
    zero = jnp.zeros((B, H, K, v_BTHV.shape[-1]), accumulate)
    return jax.vjp(outputs, zero)[1](d_o_BTHV)[0]

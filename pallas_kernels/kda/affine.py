"""What a run of tokens does to the state, as a map: S_out = M S_in + N. The pieces of context parallelism.

M [K, K] is the product over tokens of (I - beta k k^T) Diag(e^g), and N [K, V] the exit state from a zero entry state:
the exit state of values 0 from the entry state I is M. Both come from passes of the op itself, so they run wherever it
has a kernel.

Where a document starts inside the run, the entry state cannot reach the exit, and M is zero. |M| <= 1 for unit keys and
beta in [0, 1], so folding maps over any number of runs is stable. M and N are float32 (float64 for float64 inputs).

`op` below is `kda`, or `kda_gated`, of a run with all but values and entry state given: (v, entry) -> (o, exit).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def affine_map(
    op: Callable, k_BTHK: Float[Array, "B T H K"], v_BTHV: Float[Array, "B T H V"]
) -> tuple[Float[Array, "B H K K"], Float[Array, "B H K V"]]:
    """(M, N) of the tokens of every row; k gives the shapes. Not to be differentiated: see `entry_adjoint`."""
    zero = _no_state(k_BTHK, v_BTHV)
    one = jnp.broadcast_to(jnp.eye(k_BTHK.shape[-1], dtype=zero.dtype), (*zero.shape[:3], k_BTHK.shape[-1]))
    return op(jnp.zeros_like(k_BTHK), one)[1], op(v_BTHV, zero)[1]


def entry_adjoint(
    op: Callable, k_BTHK: Float[Array, "B T H K"], v_BTHV: Float[Array, "B T H V"], d_o_BTHV: Float[Array, "B T H V"]
) -> Float[Array, "B H K V"]:
    """E of the transposed map dS_in = M^T dS_out + E: what the outputs' gradient leaves at the entry state.

    The reverse pass of the op with a zero gradient at its exit; the gradients of its other inputs are not asked for.
    """
    # the outputs are affine in the entry state: where the gradient is taken does not matter
    return jax.vjp(lambda entry: op(v_BTHV, entry)[0], _no_state(k_BTHK, v_BTHV))[1](d_o_BTHV)[0]


def _no_state(k_BTHK, v_BTHV) -> Float[Array, "B H K V"]:
    B, _, H, K = k_BTHK.shape
    accumulate = jnp.promote_types(v_BTHV.dtype, jnp.float32)
    return jnp.zeros((B, H, K, v_BTHV.shape[-1]), accumulate)

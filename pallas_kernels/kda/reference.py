"""KDA token by token: the recurrence itself, differentiated by JAX. Slow, and the definition of right."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

L2_EPS = 1e-6  # added to the sum of squares of q and of k where they are normalised, as fla does

State = Float[Array, "B H K V"] | Float[Array, "B S H K V"]


def kda_reference(
    q_BTHK: Float[Array, "B T H K"],
    k_BTHK: Float[Array, "B T H K"],
    v_BTHV: Float[Array, "B T H V"],
    g_BTHK: Float[Array, "B T H K"],
    beta_BTH: Float[Array, "B T H"],
    *,
    scale: float,
    initial_state: State,
    segment_ids: Int[Array, "B T"] | None,
    g_min: float | None = None,
) -> tuple[Float[Array, "B T H V"], State]:
    """`api.kda` as a scan over time, with defaults resolved. Any gate is safe here, so g_min is not read.

    S <- Diag(e^g) S;   S <- S + beta k (v - S^T k)^T;   o = scale * S^T q          (Kimi Linear, Eq. 1)
    """
    del g_min
    B, T = q_BTHK.shape[:2]
    per_segment = initial_state.ndim == 5
    table_BSHKV = initial_state if per_segment else initial_state[:, None]
    S = table_BSHKV.shape[1]

    # Each token reads and writes one slot of the state table. Without per-segment states there is one slot, wiped
    # where the segment changes.
    ids_BT = jnp.zeros((B, T), jnp.int32) if segment_ids is None else segment_ids
    starts_BT = jnp.diff(ids_BT, axis=1, prepend=ids_BT[:, :1]) != 0
    wipe_BT = jnp.zeros_like(starts_BT) if per_segment else starts_BT
    # An id outside [0, S) has no slot: S reads as zero and drops what is written (-1 would count from the end).
    slot_BT = jnp.where((ids_BT >= 0) & (ids_BT < S), ids_BT, S) if per_segment else jnp.zeros_like(ids_BT)

    accumulate = table_BSHKV.dtype
    rows_B = jnp.arange(B)
    read = jax.vmap(lambda table_SHKV, slot: table_SHKV.at[slot].get(mode="fill", fill_value=0))

    def step(table_BSHKV, token):
        q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, slot_B, wipe_B = token
        state_BHKV = read(table_BSHKV, slot_B)
        state_BHKV = jnp.where(wipe_B[:, None, None, None], 0, state_BHKV) * jnp.exp(g_BHK)[..., None]
        predicted_BHV = jnp.einsum("bhkv,bhk->bhv", state_BHKV, k_BHK, precision="highest")
        update_BHV = beta_BH[..., None] * (v_BHV - predicted_BHV)
        state_BHKV = state_BHKV + k_BHK[..., None] * update_BHV[..., None, :]
        o_BHV = scale * jnp.einsum("bhkv,bhk->bhv", state_BHKV, q_BHK, precision="highest")
        o_BHV = jnp.where((slot_B < S)[:, None, None], o_BHV, 0)
        return table_BSHKV.at[rows_B, slot_B].set(state_BHKV, mode="drop"), o_BHV

    tokens = [x.astype(accumulate) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)] + [slot_BT, wipe_BT]
    table_BSHKV, o_TBHV = jax.lax.scan(step, table_BSHKV, [jnp.moveaxis(x, 1, 0) for x in tokens])
    o_BTHV = jnp.moveaxis(o_TBHV, 0, 1).astype(v_BTHV.dtype)
    return o_BTHV, table_BSHKV if per_segment else table_BSHKV[:, 0]

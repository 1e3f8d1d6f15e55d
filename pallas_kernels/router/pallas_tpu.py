"""Routing on TPUs: two Pallas kernels, without the scatters and sorts a TPU is slow at.

    select     k + 1 times the largest of what is left of every row
    histogram  per expert a product of one-hot matrices: a bin is (high, low) with 128 low digits, so that the counts of
               all bins are onehot(high) onehot(low)^T over the tokens, exact in float32
"""


import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from pallas_kernels.dispatch import target
from pallas_kernels.router.bias import bin_range
from pallas_kernels.router.config import TPUConfig, tpu_config
from pallas_kernels.router.reference import Selection

LANES = 128
SUBLANES = 8
VMEM = 32 * 2**20  # bytes; what every generation has

f32 = jnp.float32


def select_pallas_tpu(
    scores_ME: Float[Array, "M E"],
    bias_E: Float[Array, " E"],
    real_M: Bool[Array, " M"],
    *,
    k: int,
    bins: int,
    sigmoid: bool,
    interpret: bool = False,
) -> Selection:
    """`reference.select` on a TPU. `interpret` runs it anywhere.

    Raises:
      NotImplementedError: other devices; scores that are not float32; k = E.
    """
    platform, kind = target()
    M, E = scores_ME.shape
    if scores_ME.dtype != f32:
        raise NotImplementedError(f"scores are {scores_ME.dtype}; float32 is supported")
    if k == E:
        raise NotImplementedError(f"k={k} of E={E}; k < E is supported")
    if platform != "tpu" and not interpret:
        raise NotImplementedError("a TPU is needed")
    config = tpu_config(kind)
    experts, chosen, cutoff, load = _select(scores_ME, bias_E, real_M, k, sigmoid, config, interpret)
    if not bins:
        return Selection(experts, chosen, cutoff, load, None)
    low, width = bin_range(bias_E, bins)
    edges = jnp.concatenate([low, 1 / width])
    counts = _histogram(scores_ME, cutoff, real_M, edges, bins, sigmoid, config, interpret)
    return Selection(experts, chosen, cutoff, load, counts)


def _column(x_M: Array, rows: int) -> Array:
    """[M] as a padded column of float32; the padding is zero."""
    return jnp.pad(x_M.astype(f32), (0, -x_M.shape[0] % rows))[:, None]


def _select(scores_ME, bias_E, real_M, k, sigmoid, config: TPUConfig, interpret):
    M, E = scores_ME.shape
    rows = min(config.select, -(-M // SUBLANES) * SUBLANES)
    scores = jnp.pad(scores_ME, ((0, -M % rows), (0, 0)))
    real = _column(real_M, rows)

    def kernel(scores_ref, bias_ref, real_ref, experts_ref, chosen_ref, cutoff_ref, load_ref):
        s = jax.nn.sigmoid(scores_ref[...]) if sigmoid else scores_ref[...]
        x = s + bias_ref[...]
        expert = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1).astype(f32)
        rank = jax.lax.broadcasted_iota(jnp.int32, (rows, k), 1)

        def take(r, carry):
            experts, chosen, left = carry
            best = jnp.where(left > 0, x, -jnp.inf).max(1, keepdims=True)
            first = jnp.where((left > 0) & (x == best), expert, float(E)).min(1, keepdims=True)
            here = expert == first
            score = jnp.where(here, s, 0.0).sum(1, keepdims=True)
            experts, chosen = (jnp.where(rank == r, new, old) for new, old in ((first, experts), (score, chosen)))
            return experts, chosen, jnp.where(here, 0.0, left)

        # -inf is a score like any other, so what is taken is marked apart
        start = jnp.zeros((rows, k), f32), jnp.zeros((rows, k), f32), jnp.ones(x.shape, f32)
        experts, chosen, left = jax.lax.fori_loop(0, k, take, start)
        experts_ref[...] = experts.astype(jnp.int32)
        chosen_ref[...] = chosen
        cutoff_ref[...] = jnp.where(left > 0, x, -jnp.inf).max(1, keepdims=True)

        @pl.when(pl.program_id(0) == 0)
        def _():
            load_ref[...] = jnp.zeros_like(load_ref)

        load_ref[...] += ((1 - left) * real_ref[...]).sum(0, keepdims=True).astype(jnp.int32)

    block = lambda n: pl.BlockSpec((rows, n), lambda i: (i, 0))
    whole = pl.BlockSpec((1, E), lambda i: (0, 0))
    shape = lambda n, dtype: jax.ShapeDtypeStruct((len(scores), n), dtype)
    experts, chosen, cutoff, load = pl.pallas_call(
        kernel,
        grid=(len(scores) // rows,),
        in_specs=[block(E), whole, block(1)],
        out_specs=[block(k), block(k), block(1), whole],
        out_shape=[shape(k, jnp.int32), shape(k, f32), shape(1, f32), jax.ShapeDtypeStruct((1, E), jnp.int32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM),
        interpret=interpret,
    )(scores, bias_E[None], real)
    return experts[:M], chosen[:M], cutoff[:M, 0], load[0]


def _histogram(scores_ME, cutoff_M, real_M, edges, bins, sigmoid, config: TPUConfig, interpret):
    M, E = scores_ME.shape
    rows = min(config.histogram, -(-M // LANES) * LANES)
    high = -(-bins // (LANES * SUBLANES)) * SUBLANES
    scores = jnp.pad(scores_ME, ((0, -M % rows), (0, -E % LANES)))
    cutoff, real = _column(cutoff_M, rows), _column(real_M, rows)

    def kernel(edges_ref, scores_ref, cutoff_ref, real_ref, counts_ref, bins_ref):
        @pl.when(pl.program_id(1) == 0)
        def _():
            counts_ref[...] = jnp.zeros_like(counts_ref)

        s = jax.nn.sigmoid(scores_ref[...]) if sigmoid else scores_ref[...]
        place = jnp.clip(jnp.floor((cutoff_ref[...] - s - edges_ref[0]) * edges_ref[1]), 0, bins - 1)
        bins_ref[...] = jnp.where(real_ref[...] > 0, place, -LANES).T  # padding has no digit
        digit = lambda n: jax.lax.broadcasted_iota(jnp.int32, (n, rows), 0).astype(f32)

        def expert(e, _):
            place = bins_ref[pl.ds(e, 1), :]
            top = jnp.floor(place * (1 / LANES))
            one_hot = lambda x, n: (digit(n) == x).astype(jnp.bfloat16)
            counts = jax.lax.dot_general(one_hot(top, high), one_hot(place - LANES * top, LANES),
                                         (((1,), (1,)), ((), ())), preferred_element_type=f32)
            counts_ref[e] += counts.astype(jnp.int32)
            return 0

        jax.lax.fori_loop(0, LANES, expert, 0)

    column = pl.BlockSpec((rows, 1), lambda e, i: (i, 0))
    counts = pl.pallas_call(
        kernel,
        grid=(scores.shape[1] // LANES, len(scores) // rows),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((rows, LANES), lambda e, i: (i, e)),
            column,
            column,
        ],
        out_specs=pl.BlockSpec((LANES, high, LANES), lambda e, i: (e, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((scores.shape[1], high, LANES), jnp.int32),
        scratch_shapes=[pltpu.VMEM((LANES, rows), f32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM),
        interpret=interpret,
    )(edges, scores, cutoff, real)
    return counts[:E].reshape(E, -1)[:, :bins]

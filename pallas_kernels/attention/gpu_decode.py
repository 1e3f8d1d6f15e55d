"""One query per sequence over cached latents on Hopper GPUs: Pallas-Triton kernels that read every latent once.

    attend      a program per sequence and run of keys, for all heads at once: they share keys and values. The one whose
                run holds the new token's place norms its latent, writes it and attends to it apart
    merge       the runs of a sequence, weighed by their softmax sums

Runs are cut by capacity, not by length, so that no sequence's sums depend on what other sequences hold.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import few_rows
from pallas_kernels.dispatch import is_hopper

PROGRAMS = 264  # two for every multiprocessor
BLOCK = 32  # keys that are read at a time
MOST, MOST_BYTES = 128, 96 << 10  # keys of a run that is read at once
SOME = 16  # runs that are merged at a time

f32 = jnp.float32


def latent_decode(
    q_BHK, kv_BX, norm_R, norm_eps, latents_BCX, length_B, active_B, k_up_HRN, v_up_HVR, gate_BHV, scale,
    *, warps=4, interpret=False,
):
    """Writes a token of every sequence, and is `cached.cached_attention` of its query, in absorbed form.

    Args:
      q_BHK: queries, K = N + P.
      kv_BX: the tokens' latents before their norm, and key parts; X = R + P.
      norm_R, norm_eps: of the norm.
      latents_BCX: of the tokens before; updated in place where donated.
      length_B: how many those are.
      active_B: sequences that have a token; the cache of others keeps every bit, and their outputs mean nothing.
      k_up_HRN, v_up_HVR, gate_BHV: what expands latents, and logits of the output gate (or None).

    Returns:
      [B, H, V] in q's dtype, and the latents.

    Raises:
      NotImplementedError: anything but bfloat16, R and P that are powers of two from 16, on a Hopper GPU.
    """
    (B, H, _), (_, C, X), (_, R, N) = q_BHK.shape, latents_BCX.shape, k_up_HRN.shape
    if q_BHK.dtype != jnp.bfloat16 or latents_BCX.dtype != jnp.bfloat16:
        raise NotImplementedError(f"queries are {q_BHK.dtype}, latents {latents_BCX.dtype}; bfloat16 is needed")
    if any(size < 16 or size & (size - 1) for size in (R, X - R)) or C % BLOCK or not (interpret or is_hopper()):
        raise NotImplementedError(f"R={R}, P={X - R} on this device; powers of two, on compute capability 9.0, are")
    how = {"interpret": interpret}
    params = lambda warps, stages=1: plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    keys = pl.cdiv(C, pl.cdiv(PROGRAMS, B))  # of a run, before rounding
    whole = max(BLOCK, pl.next_power_of_2(keys))
    block = whole if keys <= MOST and 2 * whole * X <= MOST_BYTES else BLOCK
    blocks = pl.cdiv(keys, block)  # of a run
    runs = pl.cdiv(C, blocks * block)
    shape = jax.ShapeDtypeStruct
    latent_BHR = few_rows.heads(q_BHK, k_up_HRN)
    latents_BCX, partial, top, total = pl.pallas_call(
        functools.partial(_attend, C, H, R, N, X - R, block, blocks, scale, norm_eps),
        grid=(runs, B),
        out_shape=[
            shape(latents_BCX.shape, latents_BCX.dtype),
            shape((B, runs, H, R), f32), shape((B, runs, H), f32), shape((B, runs, H), f32),
        ],
        input_output_aliases={0: 0},
        compiler_params=params(warps, 2 if blocks == 1 else 3),
        name="latent_decode_attend",
        **how,
    )(latents_BCX, latent_BHR, q_BHK, kv_BX, norm_R.astype(f32), length_B, active_B)  # fmt: skip
    columns = min(R, 64)
    out_BHR = pl.pallas_call(
        functools.partial(_merge, runs, columns),
        grid=(R // columns, H, B),
        out_shape=shape((B, H, R), q_BHK.dtype),
        compiler_params=params(2),
        name="latent_decode_merge",
        **how,
    )(partial, top, total)
    return few_rows.heads(out_BHR, v_up_HVR, gate_BHV), latents_BCX


def _dot(a, b, contract):
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=f32)


def _attend(
    C, H, R, N, P, block, blocks, scale, eps,
    _, latent_ref, q_ref, kv_ref, norm_ref, length_ref, active_ref, cache_ref, partial_ref, top_ref, total_ref,
):  # fmt: skip
    run, b = pl.program_id(0), pl.program_id(1)
    tile = max(16, pl.next_power_of_2(H))
    h, r, rope = jnp.arange(tile), jnp.arange(R), jnp.arange(P)
    mask = (h < H)[:, None]
    q = plgpu.load(latent_ref.at[b, h[:, None], r[None]], mask=mask, other=0.0)
    q_rope = plgpu.load(q_ref.at[b, h[:, None], N + rope[None]], mask=mask, other=0.0)
    n, active, first = length_ref[b], active_ref[b], run * blocks * block
    # of the new token, on the way while old keys are visited
    c, dtype = plgpu.load(kv_ref.at[b, r]).astype(f32), cache_ref.dtype
    norm, key = plgpu.load(norm_ref.at[r]), plgpu.load(kv_ref.at[b, R + rope])

    def visit(i, carry):
        top, total, out = carry
        key = first + i * block + jnp.arange(block)
        there = key < n
        read = lambda columns: plgpu.load(cache_ref.at[b, key[:, None], columns[None]], mask=there[:, None], other=0.0)
        latent = read(r)
        logits = (_dot(q, latent, (1, 1)) + _dot(q_rope, read(R + rope), (1, 1))) * scale
        logits = jnp.where(there[None], logits, -jnp.inf)
        new = jnp.maximum(top, jnp.max(logits, axis=1))  # the first key of a block that is visited is there
        keep, p = jnp.exp(top - new), jnp.exp(logits - new[:, None])
        out = out * keep[:, None] + _dot(p.astype(latent.dtype), latent, (1, 0))
        return new, total * keep + jnp.sum(p, axis=1), out

    visits = jnp.clip((n - first + block - 1) // block, 0, blocks)
    empty = jnp.full(tile, -jnp.inf, f32), jnp.zeros(tile, f32), jnp.zeros((tile, R), f32)
    top, total, out = jax.lax.fori_loop(0, visits, visit, empty)

    # the new token, whose place no other program reads; without one an empty sequence still has finite outputs
    mine = (n < C) & (n >= first) & (n < first + blocks * block)
    c = (c * jax.lax.rsqrt(jnp.sum(c * c) / R + eps)).astype(dtype).astype(f32)
    c = (c * norm.astype(dtype).astype(f32)).astype(dtype)

    @pl.when(mine & (active != 0))
    def _():
        plgpu.store(cache_ref.at[b, n, r], c)
        plgpu.store(cache_ref.at[b, n, R + rope], key)

    product = lambda q, c: jnp.sum(q.astype(f32) * c.astype(f32)[None], axis=1)
    logit = jnp.where(mine, (product(q, c) + product(q_rope, key)) * scale, -jnp.inf)
    new = jnp.maximum(top, logit)
    keep, p = (jnp.where(x == -jnp.inf, 0.0, jnp.exp(x - new)) for x in (top, logit))
    out, total, top = out * keep[:, None] + p[:, None] * c.astype(f32)[None], total * keep + p, new
    plgpu.store(partial_ref.at[b, run, h[:, None], r[None]], out, mask=mask)
    plgpu.store(top_ref.at[b, run, h], top, mask=h < H)
    plgpu.store(total_ref.at[b, run, h], total, mask=h < H)


def _merge(runs, columns, partial_ref, top_ref, total_ref, out_ref):
    h, b = pl.program_id(1), pl.program_id(2)
    own = pl.program_id(0) * columns + jnp.arange(columns)

    def some(i, carry):
        top, total, out = carry
        run = i * SOME + jnp.arange(SOME)
        there = run < runs
        tops = plgpu.load(top_ref.at[b, run, h], mask=there, other=-jnp.inf)
        totals = plgpu.load(total_ref.at[b, run, h], mask=there, other=0.0)
        parts = plgpu.load(partial_ref.at[b, run[:, None], h, own[None]], mask=there[:, None], other=0.0)
        new = jnp.maximum(top, jnp.max(tops))  # the first run holds key 0
        keep, weight = jnp.exp(top - new), jnp.exp(tops - new)
        total = total * keep + jnp.sum(weight * totals)
        return new, total, out * keep + jnp.sum(weight[:, None] * parts, axis=0)

    empty = jnp.float32(-jnp.inf), jnp.float32(0.0), jnp.zeros(columns, f32)
    _, total, out = jax.lax.fori_loop(0, pl.cdiv(runs, SOME), some, empty)
    plgpu.store(out_ref.at[b, h, own], (out / total).astype(out_ref.dtype))

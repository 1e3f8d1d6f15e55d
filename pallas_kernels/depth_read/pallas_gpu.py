"""The depth read on GPUs: one Pallas-Triton kernel, a program per row that holds every sum of the row in registers."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.dispatch import is_hopper

MOST_SUMS = 16
WIDEST = 8192

f32 = jnp.float32


def depth_read(query_D, sealed, live_MD, new_MD, norm_D, eps, *, interpret=False):
    """`api.depth_read`.

    Raises:
      NotImplementedError: sums that are not bfloat16, more than 16 or wider than 8192, or no Hopper GPU.
    """
    D, dtype = live_MD.shape[-1], live_MD.dtype
    if dtype != jnp.bfloat16 or len(sealed) >= MOST_SUMS or D > WIDEST:
        raise NotImplementedError(
            f"{len(sealed) + 1} {dtype} sums of {D}; at most {MOST_SUMS} bfloat16 ones of {WIDEST} are supported"
        )
    if not interpret and not is_hopper():
        raise NotImplementedError("a GPU of compute capability 9.0 (H100, H200) is needed")
    flat = lambda x: x.reshape(-1, D)
    inputs = {"live": flat(live_MD)}
    if norm_D is not None:
        inputs["norm"] = norm_D.astype(f32)
    if new_MD is not None:
        inputs["new"] = flat(new_MD)
    if query_D is not None:
        inputs["query"] = query_D.astype(f32)
        inputs |= dict(enumerate(map(flat, sealed)))
    names = list(inputs)
    M = inputs["live"].shape[0]
    shape = jax.ShapeDtypeStruct((M, D), dtype)
    x, live = pl.pallas_call(
        lambda *refs: _kernel(D, eps, dict(zip(names, refs)), *refs[len(names) :]),
        out_shape=[shape, shape],
        grid=(M,),
        compiler_params=plgpu.CompilerParams(num_warps=4 if D <= 2048 else 8, num_stages=1),
        interpret=interpret,
        name="depth_read",
    )(*inputs.values())
    return x.reshape(live_MD.shape), live.reshape(live_MD.shape)


def _kernel(D, eps, inputs, x_ref, live_ref):
    m, d = pl.program_id(0), jnp.arange(pl.next_power_of_2(D))
    load = lambda ref: plgpu.load(ref, mask=d < D, other=0.0).astype(f32)
    rate = lambda c: jax.lax.rsqrt(jnp.sum(c * c) / D + eps)
    rounded = lambda c: c.astype(x_ref.dtype).astype(f32)
    # everything is asked for before anything is waited for: no load passes a store or a barrier
    read = {name: load(ref.at[d] if name in ("norm", "query") else ref.at[m, d]) for name, ref in inputs.items()}
    live = rounded(read["live"] + read["new"]) if "new" in read else read["live"]
    h = live
    if "query" in read:
        sums = [read[i] for i in read if isinstance(i, int)] + [live]
        scores = [rate(c) * jnp.sum(c * read["query"]) for c in sums]
        top = functools.reduce(jnp.maximum, scores)
        weights = [jnp.exp(s - top) for s in scores]
        h = rounded(sum(p * c for p, c in zip(weights, sums)) / sum(weights))
    x = rounded(h * rate(h)) * rounded(read["norm"]) if "norm" in read else h
    plgpu.store(live_ref.at[m, d], live.astype(live_ref.dtype), mask=d < D)
    plgpu.store(x_ref.at[m, d], x.astype(x_ref.dtype), mask=d < D)

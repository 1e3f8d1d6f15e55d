"""The decoding step on Hopper GPUs: one Mosaic-GPU kernel that reads and writes every state once, in place.

One warpgroup per sequence and head, one thread per value column. A thread keeps its column of the state in registers,
sums it down against keys and queries, and writes it back: no sum crosses threads but those of the norms. XLA needs the
update before it can write the state, and reads the state a second time.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import is_hopper
from pallas_kernels.kda.reference import L2_EPS

D = 128  # threads of a warpgroup, and channels of a head
CHANNELS = plgpu.Layout.WG_STRIDED((D,), vec_size=1)

f32 = jnp.float32


def kda_decode_pallas_gpu(
    qkv,
    decay,
    beta,
    gate,
    taps,
    state,
    *,
    conv,
    a_log,
    dt_bias,
    out_norm,
    g_min,
    norm_eps,
    active=None,
    interpret: Any = None,
):
    """`api.kda_decode`. With `interpret` (`plgpu.InterpretGPUParams`) on any platform, for tests.

    Raises:
      NotImplementedError: anything but bfloat16 or float32 heads of 128, with a convolution and a float32 state, on a
        Hopper GPU.
    """
    B, H, K, _ = state.shape
    if K != D:
        raise NotImplementedError(f"K={K}; heads of {D} are supported")
    if qkv.dtype not in (jnp.bfloat16, f32) or state.dtype != f32:
        raise NotImplementedError(
            f"qkv is {qkv.dtype}, state {state.dtype}; bfloat16 or float32, and float32, are supported"
        )
    if taps.shape[1] == 0:
        raise NotImplementedError("no past convolution inputs; a convolution of at least 2 taps is supported")
    if not interpret and not is_hopper():
        raise NotImplementedError("a GPU of compute capability 9.0 (H100, H200) is needed")

    inputs = {
        "qkv": qkv,
        "decay": decay,
        "beta": beta,
        "taps": taps,
        "state": state,
        "conv": jnp.moveaxis(conv.astype(f32), -1, 0),  # [C, 3, H, K]: a tap's channels side by side
        "a_log": a_log.astype(f32),
        "dt_bias": dt_bias.astype(f32),
        "out_norm": out_norm.astype(f32),
    }
    if gate is not None:
        inputs["gate"] = gate
    if active is not None:
        inputs["active"] = active.astype(jnp.int32)
    names = list(inputs)
    step = plgpu.kernel(
        lambda *refs: _kernel(g_min, norm_eps, dict(zip(names, refs)), *refs[len(names) :]),
        out_type=jax.ShapeDtypeStruct((B, H, K), qkv.dtype),
        grid=(B, H),
        grid_names=("b", "h"),
        scratch_types=(plgpu.SMEM((4, D), f32),),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    taps_ref, state_ref = inputs["taps"], inputs["state"] = jax.new_ref(taps), jax.new_ref(state)
    o = step(*inputs.values())
    return o, jax.freeze(taps_ref), jax.freeze(state_ref)


def _kernel(g_min, norm_eps, inputs, o_ref, shared):
    b, h = jax.lax.axis_index("b"), jax.lax.axis_index("h")
    load = lambda ref: plgpu.load(ref, layout=CHANNELS)
    wide = lambda ref: load(ref).astype(f32)
    sigmoid = lambda x: 1.0 / (1.0 + jnp.exp(-x))

    unless_idle = lambda new, old: jnp.where(inputs["active"][b] != 0, new, old) if "active" in inputs else new
    column = [load(inputs["state"].at[b, h, i]) for i in range(D)]  # in flight while the vectors are made
    qkv = [_convolve(b, h, i, inputs, load, unless_idle) for i in range(3)]
    q, k, v = (x * sigmoid(x) for x in qkv)
    q, k = (x * jax.lax.rsqrt(jnp.sum(x * x) + L2_EPS) for x in (q, k))
    z, rate = wide(inputs["decay"].at[b, h]) + load(inputs["dt_bias"].at[h]), jnp.exp(inputs["a_log"][h])
    if g_min is None:
        g = -rate * (jnp.maximum(z, 0.0) + jnp.log(1.0 + jnp.exp(-jnp.abs(z))))
    else:
        g = g_min * sigmoid(rate * z)
    factor = jnp.exp(unless_idle(g, jnp.zeros_like(g)))
    # a thread needs all channels of these four
    for i, x in enumerate((factor, k, factor * k, factor * q)):
        shared[i] = x
    plgpu.commit_smem()

    known, seen = jnp.zeros_like(v), jnp.zeros_like(v)
    for i in range(D):
        known += shared[2, i] * column[i]
        seen += shared[3, i] * column[i]
    update = unless_idle(sigmoid(inputs["beta"][b, h].astype(f32)), 0.0) * (v - known)
    for i in range(D):
        inputs["state"][b, h, i] = shared[0, i] * column[i] + shared[1, i] * update

    o = D**-0.5 * (seen + jnp.sum(k * q) * update)
    o = o * jax.lax.rsqrt(jnp.sum(o * o) / D + norm_eps) * load(inputs["out_norm"])
    if "gate" in inputs:
        o = o * sigmoid(wide(inputs["gate"].at[b, h]))
    o_ref[b, h] = o.astype(o_ref.dtype)


def _convolve(b, h, i, inputs, load, unless_idle):
    """Convolution i at this token. Moves its past inputs up by one."""
    taps, conv = inputs["taps"], inputs["conv"]
    window = [load(taps.at[b, c, i, h]) for c in range(taps.shape[1])] + [load(inputs["qkv"].at[b, i, h])]
    for c in range(taps.shape[1]):
        taps[b, c, i, h] = unless_idle(window[c + 1], window[c])
    return sum(x.astype(f32) * load(conv.at[c, i, h]) for c, x in enumerate(window))

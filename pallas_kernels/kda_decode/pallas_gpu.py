"""The decoding step on Hopper GPUs: one Pallas-Triton kernel that reads and writes every state once, in place.

A program per sequence and head, whose state it holds in registers: both sums over keys are taken before the update is
known (`step.advance`), where XLA would read the state a second time. It is a Triton kernel because XLA captures those
in CUDA graphs together with the kernels around them; it does not capture Mosaic-GPU kernels.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.dispatch import is_hopper
from pallas_kernels.kda_decode.step import advance, decay_logits, finish, prepare

WIDTHS = (32, 64, 128)
RUN = 64  # inputs of the decay's projection that are multiplied at a time

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
    decay_up=None,
    beta_in=None,
    interpret=False,
):
    """`api.kda_decode`. With `interpret` on any platform, for tests.

    Raises:
      NotImplementedError: anything but bfloat16 or float32 heads of 32, 64 or 128, with a convolution and a float32
        state, on a Hopper GPU.
    """
    B, H, K, _ = state.shape
    if K not in WIDTHS:
        raise NotImplementedError(f"K={K}; heads of 32, 64 or 128 are supported")
    if qkv.dtype not in (jnp.bfloat16, f32) or state.dtype != f32:
        raise NotImplementedError(
            f"qkv is {qkv.dtype}, state {state.dtype}; bfloat16 or float32, and float32, are supported"
        )
    if taps.shape[1] == 0:
        raise NotImplementedError("no past convolution inputs; a convolution of at least 2 taps is supported")
    if not interpret and not is_hopper():
        raise NotImplementedError("a GPU of compute capability 9.0 (H100, H200) is needed")

    if decay_up is not None and ((R := decay_up.shape[1]) > K or R & (R - 1)):  # too wide, or not a power of two
        decay, decay_up = decay_logits(decay, decay_up, H, K), None
    inputs = {
        "taps": taps,
        "state": state,
        "qkv": qkv,
        "decay": decay,
        "beta": beta,
        "conv": jnp.moveaxis(conv.astype(f32), -1, 0),  # [C, 3, H, K]: a tap's channels side by side
        "a_log": a_log.astype(f32),
        "dt_bias": dt_bias.astype(f32),
        "out_norm": out_norm.astype(f32),
    }
    if gate is not None:
        inputs["gate"] = gate
    if decay_up is not None:
        inputs["decay_up"] = decay_up
    if beta_in is not None:
        inputs["beta_in"] = beta_in
    if active is not None:
        inputs["active"] = active.astype(jnp.int32)
    names = list(inputs)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    return tuple(pl.pallas_call(
        lambda *refs: _kernel(g_min, norm_eps, dict(zip(names, refs)), *refs[len(names) :]),
        out_shape=[jax.ShapeDtypeStruct((B, H, K), qkv.dtype), shape(taps), shape(state)],
        grid=(H, B),
        input_output_aliases={0: 1, 1: 2},
        # a thread per channel: none loads past inputs that another one has moved on already
        compiler_params=plgpu.CompilerParams(num_warps=K // 32, num_stages=1),
        interpret=interpret,
        name="kda_decode",
    )(*inputs.values()))


def _kernel(g_min, norm_eps, inputs, o_ref, taps_ref, state_ref):
    h, b = pl.program_id(0), pl.program_id(1)
    K = state_ref.shape[-1]
    channels = jnp.arange(K)
    wide = lambda name, *at: plgpu.load(inputs[name].at[*at, channels]).astype(f32)
    on = None if "active" not in inputs else inputs["active"][b] != 0
    unless_idle = lambda new, old: new if on is None else jnp.where(on, new, old)

    # past inputs, oldest first, then this token's
    C = taps_ref.shape[1] + 1
    window = [[wide("taps", b, c, i, h) if c < C - 1 else wide("qkv", b, i, h) for i in range(3)] for c in range(C)]
    # read now, since no load passes a store
    if "beta_in" in inputs:
        d = jnp.arange(pl.next_power_of_2(D := inputs["beta_in"].shape[1]))
        x, w = (plgpu.load(inputs[name].at[i, d], mask=d < D, other=0.0) for name, i in (("beta", b), ("beta_in", h)))
    gate, out_norm = wide("gate", b, h) if "gate" in inputs else None, wide("out_norm")
    if "decay_up" in inputs:  # all of it asked for before the state is: its registers are free again when that comes
        # in runs narrower than the state: of its shape, both would get the layout that suits numbers of two bytes, and
        # the state would go through shared memory to get its own again
        R = inputs["decay_up"].shape[1]
        run, z = min(RUN, R), 0.0
        for start in range(0, R, run):
            r = start + jnp.arange(run)
            up = plgpu.load(inputs["decay_up"].at[h * K + channels[:, None], r[None]]).astype(f32)
            z += jnp.sum(up * plgpu.load(inputs["decay"].at[b, r]).astype(f32)[None], axis=1)
    else:
        z = wide("decay", b, h)
    state = plgpu.load(inputs["state"].at[b, h, channels[:, None], channels[None]])  # in flight during what follows
    conv = {(c, i): wide("conv", c, i, h) for c in range(C) for i in range(3)}
    z, a_log = z + wide("dt_bias", h), inputs["a_log"][h]
    q, k, v, factor = prepare(window, conv, z, a_log, g_min)
    beta = jnp.sum(x.astype(f32) * w.astype(f32)) if "beta_in" in inputs else inputs["beta"][b, h].astype(f32)
    beta = 1.0 / (1.0 + jnp.exp(-beta))
    o, state = advance(state, q, k, v, unless_idle(factor, jnp.ones_like(factor)), unless_idle(beta, 0.0))
    plgpu.store(state_ref.at[b, h, channels[:, None], channels[None]], state)
    for c in range(C - 1):
        for i in range(3):
            new = unless_idle(window[c + 1][i], window[c][i]).astype(taps_ref.dtype)
            plgpu.store(taps_ref.at[b, c, i, h, channels], new)
    plgpu.store(o_ref.at[b, h, channels], finish(o, gate, out_norm, norm_eps).astype(o_ref.dtype))

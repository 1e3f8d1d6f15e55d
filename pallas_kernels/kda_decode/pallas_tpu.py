"""The decoding step on TPUs: one Pallas Mosaic kernel that reads and writes every state once, in place."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import target
from pallas_kernels.kda_decode.step import advance, beta_logits, decay_logits, finish, prepare

WIDTHS = (64, 128)
HEADS = 16  # of a program: a whole tile of bfloat16 rows
MOST_HEADS = 64  # whose states, in and out and double-buffered, fit into VMEM
VMEM_BYTES = 32 << 20

f32 = jnp.float32


def kda_decode_pallas_tpu(
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
    interpret: Any = False,
):
    """`api.kda_decode`. With `interpret` (True or `pltpu.InterpretParams`) on any platform, for tests.

    Raises:
      NotImplementedError: anything but bfloat16 or float32 heads of 64 or 128, a float32 state, on a TPU.
    """
    B, H, K, _ = state.shape
    if K not in WIDTHS:
        raise NotImplementedError(f"K={K}; heads of 64 or 128 are supported")
    if qkv.dtype not in (jnp.bfloat16, f32) or state.dtype != f32:
        raise NotImplementedError(
            f"qkv is {qkv.dtype}, state {state.dtype}; bfloat16 or float32, and float32, are supported"
        )
    heads = HEADS if H % HEADS == 0 else H
    if heads > MOST_HEADS:
        raise NotImplementedError(f"H={H}; a multiple of {HEADS}, or at most {MOST_HEADS}, is supported")
    if not interpret and target()[0] != "tpu":
        raise NotImplementedError(f"the platform is {target()[0]}; a TPU is needed")

    # heads first: the parameters of some heads stay in VMEM for all sequences
    per_row = lambda *lead, width=K: pl.BlockSpec((1, *lead, heads, width), lambda h, b: (b, *[0] * len(lead), h, 0))
    weight = lambda *lead, width=K: pl.BlockSpec((*lead, heads, width), lambda h, b: (*[0] * len(lead), h, 0))
    S = taps.shape[1]
    if conv is None or S == 0:
        taps_in, taps_spec = None, None
    else:
        taps_in, taps_spec = taps, per_row(S, 3)
    specs = {
        "qkv": per_row(3),
        "decay": per_row(),
        "beta": per_row(width=1),
        "active": None if active is None else pl.BlockSpec((1, 1, 1), lambda h, b: (b, 0, 0)),
        "gate": None if gate is None else per_row(),
        "taps": taps_spec,
        "state": pl.BlockSpec((1, heads, K, K), lambda h, b: (b, h, 0, 0)),
        "conv": None if conv is None else weight(S + 1, 3),
        "a_log": weight(width=1),
        "dt_bias": weight(),
        "out_norm": pl.BlockSpec((1, K), lambda h, b: (0, 0)),
    }
    inputs = {
        "qkv": qkv,
        "decay": decay_logits(decay, decay_up, H, K).astype(f32),
        "beta": beta_logits(beta, beta_in, H).astype(f32)[..., None],
        "active": None if active is None else active.astype(f32)[:, None, None],
        "gate": gate,
        "taps": taps_in,
        "state": state,
        "conv": None if conv is None else jnp.moveaxis(conv.astype(f32), -1, 0),
        "a_log": a_log.astype(f32)[:, None],
        "dt_bias": dt_bias.astype(f32),
        "out_norm": out_norm.astype(f32)[None],
    }
    results = (jax.ShapeDtypeStruct((B, H, K), qkv.dtype), taps_in, state)
    where = [name for name in sorted(inputs) if inputs[name] is not None].index  # dicts flatten in order of their keys
    aliases = {where("state"): 1 if taps_in is None else 2} | ({} if taps_in is None else {where("taps"): 1})
    o, taps_out, state = pl.pallas_call(
        functools.partial(_kernel, g_min, norm_eps),
        grid=(H // heads, B),
        in_specs=[specs],
        out_specs=[per_row(), taps_spec, specs["state"]],
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), results),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        interpret=interpret,
        name="kda_decode",
    )(inputs)
    return o, taps if taps_out is None else taps_out, state


def _kernel(g_min, norm_eps, inputs, o_ref, taps_ref, state_ref):
    read = lambda name: None if inputs[name] is None else inputs[name][...].astype(f32)
    qkv, taps = inputs["qkv"][0], None if inputs["taps"] is None else inputs["taps"][0]
    window = [] if taps is None else [taps[c].astype(f32) for c in range(taps.shape[0])]
    window.append(qkv.astype(f32))
    on = None if inputs["active"] is None else inputs["active"][0] > 0
    unless_idle = lambda new, old: new if on is None else jnp.where(on, new, old)
    if taps is not None:
        for c in range(taps.shape[0]):
            taps_ref[0, c] = unless_idle(window[c + 1], window[c]).astype(taps_ref.dtype)
    q, k, v, factor = prepare(window, read("conv"), read("decay")[0] + read("dt_bias"), read("a_log"), g_min)
    beta = unless_idle(jax.nn.sigmoid(read("beta")[0]), 0.0)
    o, state_ref[0] = advance(inputs["state"][0], q, k, v, unless_idle(factor, 1.0), beta)
    gate = read("gate")
    o_ref[0] = finish(o, None if gate is None else gate[0], read("out_norm"), norm_eps).astype(o_ref.dtype)

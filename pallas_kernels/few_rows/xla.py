"""The ops for few rows as XLA products."""

import itertools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import target
from pallas_kernels.rounding import rounded, scaled, widened
from pallas_kernels.router import router


def linear(x_MI, w_OI, sizes, dtypes, norm_I, norm_eps, align):
    """`api.linear`."""
    if norm_I is not None:
        x = widened(x_MI)
        x_MI = scaled(x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + norm_eps), norm_I, x_MI.dtype)
    # one product per run of results of one dtype
    out, at = [], 0
    for dtype, run in itertools.groupby(zip(sizes, dtypes), key=lambda part: part[1]):
        run = [size for size, _ in run]
        starts = list(itertools.accumulate([size + -size % align for size in run], initial=0))
        w = w_OI[at : at + starts[-1]]
        y = jnp.einsum("mi,oi->mo", x_MI, w, preferred_element_type=dtype, precision=jax.lax.Precision.HIGHEST)
        out += [y[:, start : start + size] for start, size in zip(starts, run)]
        at += starts[-1]
    return tuple(out)


def heads(x_MHI, w_HOI, gate_MHO):
    """`api.heads`."""
    wide = jnp.promote_types(x_MHI.dtype, jnp.float32)
    x, w = x_MHI[..., : w_HOI.shape[-1]], w_HOI
    if target()[0] == "cpu":  # XLA:CPU has no bfloat16 product of this form with a float32 result
        x, w = x.astype(wide), w.astype(wide)
    y = jnp.einsum("mhi,hoi->mho", x, w, preferred_element_type=wide, precision=jax.lax.Precision.HIGHEST)
    y = y if gate_MHO is None else y * jax.nn.sigmoid(gate_MHO.astype(wide))
    return y.astype(x_MHI.dtype)


def route(logits_MX, bias_E, k, scale):
    """`api.route`."""
    M, E = logits_MX.shape[0], bias_E.shape[0]
    found = router(jax.nn.sigmoid(logits_MX.reshape(M, -1, E).sum(1)), bias_E, k=k, scale=scale, implementation="xla")
    taken_KEM = found.experts_MK.T[:, None] == jnp.arange(E)[:, None]
    return (found.weights_MK.T[:, None] * taken_KEM).sum(0), slots(taken_KEM.any(0))


def slots(taken_EM):
    """`api.Routes.slots_EM` of the experts that rows take, by index."""
    return jnp.where(taken_EM, jnp.cumsum(taken_EM.astype(jnp.int32), axis=0) - 1, -1)


def experts(z_ML, p_EM, slots_EM, k, w_gate_ELF, w_up_ELF, w_down_EFL, activation):
    """`api.experts`: every expert for every row."""
    wide = jnp.promote_types(z_ML.dtype, jnp.float32)
    gate, up = (jnp.einsum("ml,elf->emf", z_ML, w).astype(wide) for w in (w_gate_ELF, w_up_ELF))
    hidden = (p_EM[..., None] * activation(gate, up)).astype(z_ML.dtype)
    return jnp.einsum("emf,efl->ml", hidden, w_down_EFL, preferred_element_type=wide)[None]


def join(parts_GML, norm_L, norm_eps, gate_MS, up_MS, activation):
    """`api.join`."""
    u = rounded(parts_GML.sum(0), gate_MS.dtype)
    if norm_L is not None:
        y = widened(u)
        u = scaled(y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + norm_eps), norm_L, u.dtype)
    hidden = rounded(activation(widened(gate_MS), widened(up_MS)), u.dtype)
    return jnp.concatenate([u, hidden], axis=-1)

"""The ops for few rows on GPUs: Pallas-Triton kernels that read every weight once.

    linear      a program per 16 or 32 columns, which reads all of x; no sum is split, so none is added up afterwards
    route       a warp per row
    experts     a program per expert and run of hidden channels, which makes their activations and multiplies them back;
                of the products it writes only those of rows that take the expert, each to a place of the row's own
    join        a program per row, which adds up its experts

So no row's sums depend on what other rows take.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.dispatch import is_hopper

MOST_ROWS = 64  # with more, products with every expert cost more than reading them
WIDEST_SUM = 1024  # that a program adds up in registers

# columns, block, stages and warps of `linear` for I inputs and O columns, where they beat the usual ones; on an H200
LINEAR = {
    (1024, 1024): (16, 256, 4, 2),
    (1536, 1024): (16, 256, 6, 2),
    (1024, 1728): (16, 256, 4, 2),
}

bf16, f32 = jnp.bfloat16, jnp.float32


def _check(interpret, x, *weights):
    if x.dtype != bf16 or any(w.dtype != bf16 for w in weights):
        raise NotImplementedError(f"rows are {x.dtype}, weights {[str(w.dtype) for w in weights]}; bfloat16 is needed")
    if x.shape[0] > MOST_ROWS:
        raise NotImplementedError(f"{x.shape[0]} rows; at most {MOST_ROWS} are supported")
    if not interpret and not is_hopper():
        raise NotImplementedError("a GPU of compute capability 9.0 (H100, H200) is needed")


def _tile(M: int) -> int:
    """Rows that products of M rows are made with."""
    return max(16, pl.next_power_of_2(M))


def _rows(ref, rows, columns, M):
    """Some columns of all rows of a tile; zeros below the last."""
    return plgpu.load(ref.at[rows[:, None], columns[None]], mask=(rows < M)[:, None], other=0.0)


def _dot(a, b, contract=(1, 0)):
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=f32)


# --- linear


def linear(
    x_MI, w_OI, sizes, dtypes, norm_I, norm_eps, align,
    *, columns=0, block=0, stages=0, warps=0, interpret=False,
):  # fmt: skip
    """`api.linear`.

    Raises:
      NotImplementedError: anything but bfloat16, inputs of a multiple of 64, at most 64 rows, on a Hopper GPU.
    """
    _check(interpret, x_MI, w_OI)
    M, I = x_MI.shape
    O = w_OI.shape[0]
    tuned = LINEAR.get((I, O), (32 if O > 16 * 132 else 16, 128, 5, 4))
    columns, block, stages, warps = (given or best for given, best in zip((columns, block, stages, warps), tuned))
    block = min(block, I & -I)
    if block < 64:
        raise NotImplementedError(f"I={I}; a multiple of 64 is supported")
    body = functools.partial(_linear, M, _tile(M), I, block, columns, sizes, norm_eps, align)
    args = (x_MI, w_OI) if norm_I is None else (x_MI, w_OI, norm_I.astype(f32))
    return tuple(pl.pallas_call(
        lambda *refs: body(*refs[: len(args)], *[None] * (3 - len(args)), outs=refs[len(args) :]),
        grid=(O // columns,),
        out_shape=[jax.ShapeDtypeStruct((M, size), dtype) for size, dtype in zip(sizes, dtypes)],
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        name="few_rows_linear",
        interpret=interpret,
    )(*args))


def _linear(M, tile, I, block, columns, sizes, norm_eps, align, x_ref, w_ref, norm_ref, outs):
    n, rows = pl.program_id(0), jnp.arange(tile)
    own = pl.ds(n * columns, columns)
    if norm_ref is not None:

        def squares(i, total):
            x = _rows(x_ref, rows, i * block + jnp.arange(block), M).astype(f32)
            return total + jnp.sum(x * x, axis=1)

        rate = jax.lax.rsqrt(jax.lax.fori_loop(0, I // block, squares, jnp.zeros(tile, f32)) / I + norm_eps)

    def step(i, acc):
        k = i * block + jnp.arange(block)
        x = _rows(x_ref, rows, k, M)
        if norm_ref is not None:
            x = (x.astype(f32) * rate[:, None]).astype(bf16)
            x = (x.astype(f32) * plgpu.load(norm_ref.at[k]).astype(bf16).astype(f32)).astype(bf16)
        return acc + _dot(x, plgpu.load(w_ref.at[own, pl.ds(i * block, block)]), (1, 1))

    acc = jax.lax.fori_loop(0, I // block, step, jnp.zeros((tile, columns), f32))
    start = 0
    for out, size in zip(outs, sizes):
        at = n * columns - start + jnp.arange(columns)

        @pl.when((n * columns >= start) & (n * columns < start + size))
        def _(out=out, size=size, at=at):
            mask = (rows < M)[:, None] & (at < size)[None]
            plgpu.store(out.at[rows[:, None], at[None]], acc.astype(out.dtype), mask=mask)

        start += size + -size % align


# --- heads


def heads(x_MHI, w_HOI, gate_MHO, *, columns=32, warps=4, stages=4, interpret=False):
    """`api.heads`.

    Raises:
      NotImplementedError: anything but bfloat16, sizes that are multiples of 64, at most 64 rows, on a Hopper GPU.
    """
    _check(interpret, x_MHI, w_HOI)
    M, (H, O, I) = x_MHI.shape[0], w_HOI.shape
    if I % 64 or O % 64:
        raise NotImplementedError(f"I={I}, O={O}; multiples of 64 are supported")
    args = (x_MHI, w_HOI) if gate_MHO is None else (x_MHI, w_HOI, gate_MHO)
    body = functools.partial(_heads, M, _tile(M), I, columns)
    return pl.pallas_call(
        lambda *refs: body(*refs[: len(args)], *[None] * (3 - len(args)), refs[-1]),
        grid=(O // columns, H),
        out_shape=jax.ShapeDtypeStruct((M, H, O), x_MHI.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        name="few_rows_heads",
        interpret=interpret,
    )(*args)


def _heads(M, tile, I, columns, x_ref, w_ref, gate_ref, out_ref):
    h, rows, block = pl.program_id(1), jnp.arange(tile), 64
    at = pl.program_id(0) * columns + jnp.arange(columns)
    mask, where = (rows < M)[:, None], (rows[:, None], h, at[None])
    gate = None if gate_ref is None else plgpu.load(gate_ref.at[where], mask=mask, other=0.0)  # before it is needed

    def step(i, acc):
        k = i * block + jnp.arange(block)
        x = plgpu.load(x_ref.at[rows[:, None], h, k[None]], mask=mask, other=0.0)
        return acc + _dot(x, plgpu.load(w_ref.at[h, at[:, None], k[None]]), (1, 1))

    y = jax.lax.fori_loop(0, I // block, step, jnp.zeros((tile, columns), f32))
    if gate is not None:
        y = y * _sigmoid(gate.astype(f32))
    plgpu.store(out_ref.at[where], y.astype(out_ref.dtype), mask=mask)


# --- route


def route(logits_MX, bias_E, k, scale, *, interpret=False):
    """`api.route`.

    Raises:
      NotImplementedError: anything but float32, at most 64 rows, on a Hopper GPU.
    """
    M, E = logits_MX.shape[0], bias_E.shape[0]
    if logits_MX.dtype != f32:
        raise NotImplementedError(f"logits are {logits_MX.dtype}; float32 is supported")
    if M > MOST_ROWS or not (interpret or is_hopper()):
        raise NotImplementedError(f"at most {MOST_ROWS} rows, on a GPU of compute capability 9.0, are supported")
    return pl.pallas_call(
        functools.partial(_route, E, logits_MX.shape[1] // E, k, scale),
        grid=(M,),
        out_shape=[jax.ShapeDtypeStruct((E, M), f32), jax.ShapeDtypeStruct((E, M), jnp.int32)],
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        name="few_rows_route",
        interpret=interpret,
    )(logits_MX, bias_E)


def _route(E, parts, k, scale, logits_ref, bias_ref, p_ref, slots_ref):
    m, e = pl.program_id(0), jnp.arange(pl.next_power_of_2(E))
    load = lambda ref: plgpu.load(ref, mask=e < E, other=0.0)
    score = _sigmoid(sum(load(logits_ref.at[m, part * E + e]) for part in range(parts)))
    # integers in the order of what selects, since a warp finds the largest of those in one instruction
    bits, least = jax.lax.bitcast_convert_type(score + load(bias_ref.at[e]), jnp.int32), jnp.iinfo(jnp.int32).min
    left = jnp.where(e < E, jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits), least)
    slots = jnp.full(e.shape, -1, jnp.int32)
    for slot in range(k):
        first = jnp.min(jnp.where((left == jnp.max(left)) & (slots < 0), e, E))  # ties to the lower index
        slots = jnp.where(e == first, slot, slots)
        left = jnp.where(e == first, least, left)
    chosen = jnp.where(slots >= 0, score, 0.0)
    plgpu.store(p_ref.at[e, m], scale * chosen / (jnp.sum(chosen) + 1e-20), mask=e < E)
    plgpu.store(slots_ref.at[e, m], slots, mask=e < E)


# --- experts


def experts(
    z_ML, p_EM, slots_EM, k, w_gate_ELF, w_up_ELF, w_down_EFL, activation,
    *, channels=128, block=64, back=128, warps=8, stages=3, interpret=False,
):  # fmt: skip
    """`api.experts`.

    Raises:
      NotImplementedError: anything but bfloat16, widths that are multiples of 64, at most 64 rows, on a Hopper GPU.
    """
    _check(interpret, z_ML, w_gate_ELF, w_up_ELF, w_down_EFL)
    (M, L), (E, _, F) = z_ML.shape, w_gate_ELF.shape
    if L % 64 or F % 64:
        raise NotImplementedError(f"L={L}, F={F}; multiples of 64 are supported")
    channels, back = min(channels, F & -F), min(back, L & -L)
    runs = F // channels
    return pl.pallas_call(
        functools.partial(_experts, M, _tile(M), L, block, back, channels, runs, activation),
        grid=(runs, E),
        out_shape=jax.ShapeDtypeStruct((k * runs, M, L), f32),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        name="few_rows_experts",
        interpret=interpret,
    )(z_ML, p_EM, slots_EM, w_gate_ELF, w_up_ELF, w_down_EFL)


def _tanh(x):
    """To 1e-6 everywhere. The exponentials alone cancel near zero, where most channels are: an error of
    1e-7 is 1e-5 of what is left, and training, whose tanh is exact, rounds another number to bfloat16."""
    y = x * x
    near = x * (1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return jnp.where(jnp.abs(x) < 0.25, near, 2.0 / (1.0 + jnp.exp(-2.0 * x)) - 1.0)


def _sigmoid(x):
    return 1.0 / (1.0 + jnp.exp(-x))


def _experts(
    M, tile, L, block, back, channels, runs, activation, z_ref, p_ref, slots_ref, gate_ref, up_ref, down_ref, parts_ref
):  # fmt: skip
    run, e, rows = pl.program_id(0), pl.program_id(1), jnp.arange(tile)
    own = pl.ds(run * channels, channels)
    p = plgpu.load(p_ref.at[e, rows], mask=rows < M, other=0.0)
    slot = plgpu.load(slots_ref.at[e, rows], mask=rows < M, other=-1)

    @pl.when(jnp.max(slot) >= 0)
    def _():
        def step(i, carry):
            k = pl.ds(i * block, block)
            z = _rows(z_ref, rows, i * block + jnp.arange(block), M)
            return tuple(acc + _dot(z, plgpu.load(w.at[e, k, own])) for acc, w in zip(carry, (gate_ref, up_ref)))

        zero = jnp.zeros((tile, channels), f32)
        gate, up = jax.lax.fori_loop(0, L // block, step, (zero, zero))
        # products are rounded as they are where others make them
        hidden = activation(*(x.astype(bf16).astype(f32) for x in (gate, up)), tanh=_tanh, sigmoid=_sigmoid)
        weighed = (p[:, None] * hidden).astype(bf16)

        def step_back(i, none):
            y = _dot(weighed, plgpu.load(down_ref.at[e, own, pl.ds(i * back, back)]))
            to = parts_ref.at[(slot * runs + run)[:, None], rows[:, None], (i * back + jnp.arange(back))[None]]
            # the weights of other experts would push them out of the cache before they are joined
            plgpu.store(to, y, mask=(slot >= 0)[:, None], eviction_policy="evict_last")
            return none

        jax.lax.fori_loop(0, L // back, step_back, None)


# --- join


def join(parts_GML, norm_L, norm_eps, gate_MS, up_MS, activation, *, warps=8, interpret=False):
    """`api.join`.

    Raises:
      NotImplementedError: anything but bfloat16 gates and sums of at most 1,024, at most 64 rows, on a Hopper GPU.
    """
    (G, M, L), S = parts_GML.shape, gate_MS.shape[1]
    _check(interpret, gate_MS, up_MS)
    if parts_GML.dtype != f32 or L > WIDEST_SUM or not S:
        raise NotImplementedError(
            f"sums are {parts_GML.dtype}, {L} wide, beside {S}; float32 of at most {WIDEST_SUM} and some are supported"
        )
    args = (parts_GML, gate_MS, up_MS) if norm_L is None else (parts_GML, gate_MS, up_MS, norm_L.astype(f32))
    return pl.pallas_call(
        lambda *refs: _join(G, L, S, norm_eps, activation, *refs[:3], None if norm_L is None else refs[3], refs[-1]),
        grid=(M,),
        out_shape=jax.ShapeDtypeStruct((M, L + S), bf16),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        name="few_rows_join",
        interpret=interpret,
    )(*args)


def _join(G, L, S, eps, activation, parts_ref, gate_ref, up_ref, norm_ref, out_ref):
    m = pl.program_id(0)
    g, l, s = (jnp.arange(pl.next_power_of_2(n)) for n in (G, L, S))
    rounded = lambda x: x.astype(bf16).astype(f32)
    parts = plgpu.load(parts_ref.at[g[:, None], m, l[None]], mask=(g < G)[:, None] & (l < L)[None], other=0.0)
    gate, up = (plgpu.load(ref.at[m, s], mask=s < S, other=0.0).astype(f32) for ref in (gate_ref, up_ref))
    norm = None if norm_ref is None else plgpu.load(norm_ref.at[l], mask=l < L, other=0.0)  # before it is needed
    u = rounded(jnp.sum(parts, axis=0))
    if norm is not None:
        u = rounded(u * jax.lax.rsqrt(jnp.sum(u * u) / L + eps)) * rounded(norm)
    plgpu.store(out_ref.at[m, l], u.astype(bf16), mask=l < L)
    hidden = activation(gate, up, tanh=_tanh, sigmoid=_sigmoid)
    plgpu.store(out_ref.at[m, L + s], hidden.astype(bf16), mask=s < S)

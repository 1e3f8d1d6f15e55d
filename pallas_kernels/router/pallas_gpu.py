"""Routing on Hopper GPUs: two Pallas Mosaic-GPU kernels whose bodies are warp programs.

    select     a warp per token     the largest k + 1 biased scores, and how often each expert was chosen
    histogram  a block per 16 experts and half the tokens     counts in shared memory, where an increment is cheap

The second reads the scores again: a bin is known only once the whole row has given its cutoff, and a histogram of all
experts (3.6 MB at 896 x 1000) fits no shared memory. Nothing is added up in an order that could change: counts are
integers, and a block's sums are its own.
"""


import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.dispatch import is_hopper, target
from pallas_kernels.router.bias import bin_range
from pallas_kernels.router.config import GPUConfig, gpu_config
from pallas_kernels.router.gpu_select import from_key, to_key, top
from pallas_kernels.router.reference import Selection

MOST_EXPERTS = 1024  # whose keys the 32 lanes of a warp hold, 32 registers each
MOST_CHOSEN = 31  # k, and the cutoff's one more lane
SHARED = 224 * 1024  # bytes of shared memory that a block may ask for
WARPS = 4  # of a warpgroup

u32, f32 = jnp.uint32, jnp.float32


def select_pallas_gpu(
    scores_ME: Float[Array, "M E"],
    bias_E: Float[Array, " E"],
    real_M: Bool[Array, " M"],
    *,
    k: int,
    bins: int,
    sigmoid: bool,
    config: GPUConfig | None = None,
) -> Selection:
    """`reference.select` on a Hopper GPU.

    Raises:
      NotImplementedError: other devices; scores that are not float32; more than 1024 experts, k above 31 or k = E;
        more bins than shared memory holds.
    """
    kind = target()[1]
    M, E = scores_ME.shape
    config = config or gpu_config(kind)
    if scores_ME.dtype != f32:
        raise NotImplementedError(f"scores are {scores_ME.dtype}; float32 is supported")
    if E > MOST_EXPERTS or k > min(MOST_CHOSEN, E - 1):
        raise NotImplementedError(
            f"k={k} of E={E}; at most {MOST_CHOSEN} of {MOST_EXPERTS} are supported, and k < E"
        )
    if config.experts * bins * 4 > SHARED:
        raise NotImplementedError(f"bins={bins}; at most {SHARED // (4 * config.experts)} are supported")
    if not is_hopper():
        raise NotImplementedError("a GPU of compute capability 9.0 (H100, H200) is needed")
    experts, chosen, cutoff, counted, loads = select(scores_ME, bias_E, real_M.astype(u32), k, sigmoid, config)
    load = loads.sum(0, dtype=jnp.int32)
    if not bins:
        return Selection(experts, chosen, cutoff, load, None)
    low, width = bin_range(bias_E, bins)
    edges = jnp.concatenate([low, 1 / width])
    counts = histogram(scores_ME, counted, edges, bins, sigmoid, config)
    return Selection(experts, chosen, cutoff, load, counts)


def select(
    scores_ME: Float[Array, "M E"],
    bias_E: Float[Array, " E"],
    real_M: Array,
    k: int,
    sigmoid: bool,
    config: GPUConfig,
) -> tuple[Int[Array, "M k"], Float[Array, "M k"], Float[Array, " M"], Float[Array, " M"], Array]:
    """(experts, their scores, the cutoff, the cutoff or NaN for padding) of every token, and the real choices of each
    block's tokens, [blocks, E]."""
    M, E = scores_ME.shape
    warps = WARPS * config.select_warpgroups
    blocks = min(config.blocks, pl.cdiv(M, warps))

    def program(_, scores, bias, real, experts, chosen, cutoff, counted, loads, load_s, bias_s, scratch_s):
        from pallas_kernels.router import gpu_lanes as gpu

        W = gpu.Warp()
        warp = W.thread // 32
        load_s, bias_s = gpu.base(load_s), gpu.base(bias_s)
        W.scratch = gpu.address(gpu.base(scratch_s), warp * 64)
        for first in range(0, E, 32 * warps):
            expert = W.thread + first
            with gpu.when(expert < E):
                W.shared_store(load_s, expert, W.u32(0))
                W.shared_store(bias_s, expert, W.bits(gpu.load(bias, expert)))
        gpu.barrier()

        activate = (lambda x: 1.0 / (W.exp(x * -1.0) + 1.0)) if sigmoid else (lambda x: x)

        def token(row):
            read = lambda expert: activate(gpu.load(scores, row, expert))
            keys = []
            for first in range(0, E, 32):
                expert = W.lane + first
                inside = expert < E if first + 32 > E else None
                if inside is not None:
                    expert = W.min(expert, W.u32(E - 1))  # no load leaves the row
                # the bias is read again for every token: in registers it would cost a third of the warps
                key = to_key(W, read(expert) + W.floating(W.shared_load(bias_s, expert)))
                keys.append(key if inside is None else W.select(inside, key, 0))
            key, expert = top(W, keys, k + 1)
            is_chosen = W.lane < k
            counts = gpu.load(real, row)
            with gpu.when(is_chosen):
                gpu.store(expert, experts, row, W.lane)
                gpu.store(read(expert), chosen, row, W.lane)
            with gpu.when(W.equal(W.lane, k)):
                alpha = from_key(W, key)
                gpu.store(alpha, cutoff, row)
                gpu.store(W.select(W.equal(counts, 0), W.f32(float("nan")), alpha), counted, row)
            W.shared_add(load_s, expert, counts, where=is_chosen)

        gpu.strided(gpu.block() * warps + warp, W.u32(M), warps * blocks, token)
        gpu.barrier()
        for first in range(0, E, 32 * warps):
            expert = W.thread + first
            with gpu.when(expert < E):
                gpu.store(W.shared_load(load_s, expert), loads, gpu.block(), expert)

    def kernel(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(program)(*refs)

    shape = jax.ShapeDtypeStruct
    return plgpu.kernel(
        kernel,
        out_type=(
            shape((M, k), jnp.int32),
            shape((M, k), f32),
            shape((M,), f32),
            shape((M,), f32),
            shape((blocks, E), jnp.int32),
        ),
        scratch_types=(plgpu.SMEM((E,), u32), plgpu.SMEM((E,), u32), plgpu.SMEM((warps * 64,), u32)),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=config.select_warpgroups,
        thread_name="warpgroup",
        compiler_params=_PARAMS,
    )(scores_ME, bias_E, real_M)


_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def histogram(
    scores_ME: Float[Array, "M E"],
    counted_M: Float[Array, " M"],
    edges: Float[Array, "2"],
    bins: int,
    sigmoid: bool,
    config: GPUConfig,
) -> Int[Array, "E bins"]:
    """Tokens by bin of cutoff - score.

    Args:
      counted_M: the cutoffs; NaN for tokens that do not count.
      edges: the lowest edge and bins per unit of bias.
    """
    M, E = scores_ME.shape
    own, parts = config.experts, config.parts
    threads = 32 * WARPS * config.warpgroups
    tokens = threads // own  # that the block works on at a time

    def program(_, scores, cutoff, edges, counts, counts_s):
        from pallas_kernels.router import gpu_lanes as gpu

        W = gpu.Warp()
        counts_s = gpu.base(counts_s)
        part, first = gpu.block() % parts, gpu.block() // parts * own
        size = W.u32(own * bins)
        gpu.strided(W.thread, size, threads, lambda i: W.shared_store(counts_s, i, W.u32(0)))
        gpu.barrier()
        low, bins_per_unit = gpu.load(edges, W.u32(0)), gpu.load(edges, W.u32(1))
        local = W.thread % own
        expert = W.min(first + local, W.u32(E - 1))
        inside = (first + local) < E
        begin = local * bins
        activate = (lambda x: 1.0 / (W.exp(x * -1.0) + 1.0)) if sigmoid else (lambda x: x)

        def some(start):
            rows = [start + tokens * i for i in range(config.unroll)]
            there = [inside & (row < M) for row in rows]
            rows = [W.min(row, W.u32(M - 1)) for row in rows]
            loaded = [(gpu.load(scores, row, expert), gpu.load(cutoff, row)) for row in rows]
            for (score, alpha), t in zip(loaded, there):
                place = W.clip(W.floor((alpha - activate(score) - low) * bins_per_unit), 0.0, bins - 1.0)
                W.shared_add(counts_s, begin + W.integer(place), W.u32(1), where=t & (alpha <= alpha))

        step = tokens * config.unroll
        gpu.strided(part * step + W.thread // own, W.u32(M), step * parts, some)
        gpu.barrier()

        def out(i):
            with gpu.when((first + i // bins) < E):
                gpu.store(W.shared_load(counts_s, i), counts, part, first + i // bins, i % bins)

        gpu.strided(W.thread, size, threads, out)

    def kernel(*refs):
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(program)(*refs)

    counts = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((parts, E, bins), jnp.int32),
        scratch_types=(plgpu.SMEM((own * bins,), u32),),
        grid=(parts * pl.cdiv(E, own),),
        grid_names=("block",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        compiler_params=_PARAMS,
    )(scores_ME, counted_M, edges)
    return counts.sum(0, dtype=jnp.int32)

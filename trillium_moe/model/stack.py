"""The layer stack: one compiled body for all layers, and block sums as the only checkpoint.

The stack is a sequence of sublayers (mixer, FFN, mixer, FFN, ...). Layers differ in kind, so instead of scanning
groups of layers, which compiles one body per group shape, every sublayer runs the same body: `lax.switch` picks its
kind and slices that kind's parameter stack by index.

Sublayers form blocks of U: 2 block_size of them (residual block), one (full: every output is a source), or
2 block_size without reads (none: the plain residual stream, cut for checkpointing only). Per block the running sum
`live` is sealed, then starts anew; sublayer s does

    h = read(sealed + [live]);  live += f(norm(h))                                            (model.md 2.5)

A sealed sum is written once and read until the end, so block n's backward needs just sealed[0..n]. The whole stack is
one `custom_vjp`, which saves (blocks + 1) x [B,T,D] and walks the blocks in reverse:

    remat block: recompute the block's running sums, then every sublayer again in its own vjp (three forwards in all);
    remat layer: running sums are saved too, (2 layers + blocks) x [B,T,D] (two forwards in all);
    remat none: no custom_vjp; autodiff saves every intermediate.

Each sublayer's vjp writes its parameter gradient into the gradient stack in place. Autodiff of a scan that closes over
the stacks would add a zero-padded cotangent of the size of the whole stack at every layer instead.

`scan_layers=False` unrolls the same sublayers under plain autodiff: the oracle of the tests, and the better choice
where a conditional costs a host synchronisation and the model is small (GPUs).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from trillium_moe.config import ModelConfig
from trillium_moe.model.attn_res import read
from trillium_moe.model.context import Context
from trillium_moe.model.norms import rms_norm
from trillium_moe.model.params import layer, put_layer, wide, wide_dtype
from trillium_moe.parallel import sharding
from trillium_moe.shapes import Array, Float, PyTree

# f(params, state, x_BTD, ctx) -> (y_BTD, aux): one sublayer of a kind, without its pre-norm
SublayerFn = Callable[[PyTree, PyTree, Array, Context], tuple[Array, dict]]


@dataclass(frozen=True)
class Schedule:
    """Kind of every sublayer, and its index in the stack of its kind."""

    kinds: tuple[str, ...]  # the kinds that occur
    kind: tuple[int, ...]  # per sublayer, index into kinds
    index: tuple[int, ...]  # per sublayer, among those of its kind
    block: int  # sublayers per block
    reads: bool  # whether sublayers attend over depth

    @classmethod
    def of(cls, config: ModelConfig) -> Schedule:
        names = [name for pair in zip(config.mixers, config.ffns) for name in pair]
        kinds = tuple(dict.fromkeys(names))
        index = tuple(names[:s].count(name) for s, name in enumerate(names))
        block = 1 if config.residual == "full" else 2 * config.block_size
        return cls(kinds, tuple(map(kinds.index, names)), index, block, config.residual != "none")

    @property
    def n_sublayers(self) -> int:
        return len(self.kind)

    @property
    def n_blocks(self) -> int:
        return -(-self.n_sublayers // self.block)

    def count(self, kind: str) -> int:
        """Layers of a kind."""
        return sum(self.kinds[k] == kind for k in self.kind)


def run_stack(
    config: ModelConfig, sublayers: dict[str, SublayerFn], params: PyTree, state: PyTree, x_BTD: Array, ctx: Context
) -> tuple[Float[Array, "B T D"], dict]:
    """Runs all layers and the final depth read.

    Args:
      sublayers: one function per kind of the schedule.
      params: {"kinds": {kind: stacked parameters}, "norm": [2L,D] pre-norm weights, "read": [2L+1,D] pseudo-queries}.
      state: {kind: stacked non-differentiable variables}.
      x_BTD: token embeddings.

    Returns:
      h_BTD before the final norm, and aux: {kind: stacked aux of its layers, "attn_res": [2L+1, blocks+1] mean depth
      attention weights, live sum last (only with residual block or full)}. No gradient flows through aux.
    """
    schedule = Schedule.of(config)
    stack = Stack(schedule, [sublayers[k] for k in schedule.kinds], config.norm_eps)
    state = {k: state[k] for k in schedule.kinds}
    if not config.scan_layers:
        h, aux = stack.unrolled(params, state, x_BTD, ctx, config.remat)
    elif config.remat == "none":
        sealed, live, aux, _ = stack.forward(params, state, x_BTD, ctx, save_sums=False)
        h, aux = stack.final(params, sealed, live, aux)
    else:
        h, aux = stack.checkpointed(params, state, x_BTD, ctx, config.remat)
    return h, jax.lax.stop_gradient(aux)


class Stack:
    """The sublayers bound to their schedule. P: params, Q: state, as in `run_stack`."""

    def __init__(self, schedule: Schedule, fns: list[SublayerFn], eps: float):
        self.schedule, self.fns, self.eps = schedule, fns, eps

    def input_of(self, norm_D, read_D, sealed, n, live, has_live):
        """Pre-normed input of a sublayer, and its depth attention weights."""
        if not self.schedule.reads:
            return rms_norm(live, norm_D, self.eps), jnp.zeros(sealed.shape[0] + 1, wide_dtype(live))
        h, mix = read(read_D, sealed, n + 1, live, has_live, self.eps)
        return rms_norm(h, norm_D, self.eps), mix

    def empty_aux(self, P, Q, x, ctx):
        """Zeros of the aux of every layer, stacked per kind."""
        aux = {}
        for name, f in zip(self.schedule.kinds, self.fns):
            first = lambda p, q, f=f: f(layer(p, 0), layer(q, 0), x, ctx)[1]
            shapes = jax.eval_shape(first, P["kinds"][name], Q[name])
            stacked = lambda a, n=self.schedule.count(name): jnp.zeros((n, *a.shape), a.dtype)
            aux[name] = jax.tree.map(stacked, shapes)
        if self.schedule.reads:
            aux["attn_res"] = jnp.zeros((self.schedule.n_sublayers + 1, self.schedule.n_blocks + 1), wide_dtype(x))
        return aux

    def final(self, P, sealed, live, aux):
        """The last depth read."""
        if not self.schedule.reads:
            return live, aux
        h, mix = read(P["read"][-1], sealed, sealed.shape[0], live, True, self.eps)
        return h, {**aux, "attn_res": aux["attn_res"].at[-1].set(mix)}

    # --- scanned

    def tables(self):
        """The schedule as arrays, padded to whole blocks."""
        pad = self.schedule.n_blocks * self.schedule.block - self.schedule.n_sublayers
        table = lambda v: jnp.asarray([*v, *[0] * pad], jnp.int32)
        return table(self.schedule.kind), table(self.schedule.index)

    def switch(self, kind, branches, *args):
        return jax.lax.switch(kind, branches, *args) if len(branches) > 1 else branches[0](*args)

    def run_block(self, P, Q, sealed, n, aux, ctx):
        """The sublayers of block n, given sealed[0..n].

        Returns the live sum at the end, aux with the block's entries written (aux None: not kept), and the live sums
        before each sublayer [U,B,T,D].
        """
        U, S = self.schedule.block, self.schedule.n_sublayers
        kinds, indices = self.tables()
        start = jax.lax.dynamic_index_in_dim(sealed, n, 0, keepdims=False)

        def sublayer(live, aux, j, s):
            x, mix = self.input_of(P["norm"][s], P["read"][s], sealed, n, live, j > 0)

            def branch(name, f, x, aux):
                y, new = f(layer(P["kinds"][name], indices[s]), layer(Q[name], indices[s]), x, ctx)
                return y, aux if aux is None else {**aux, name: put_layer(aux[name], indices[s], new)}

            branches = [functools.partial(branch, *pair) for pair in zip(self.schedule.kinds, self.fns)]
            y, aux = self.switch(kinds[s], branches, x, aux)
            if aux is not None and self.schedule.reads:
                aux = {**aux, "attn_res": aux["attn_res"].at[s].set(mix)}
            return live + y, aux

        def body(carry, j):
            live, aux = carry
            s = n * U + j
            new = jax.lax.cond(s < S, lambda c: sublayer(*c, j, s), lambda c: c, (live, aux))
            return new, live

        live = jnp.zeros_like(start) if self.schedule.reads else start
        (live, aux), sums = jax.lax.scan(body, (live, aux), jnp.arange(U))
        return live, aux, sums

    def forward(self, P, Q, x, ctx, save_sums):
        """All blocks. Returns sealed [N,B,T,D], the last live sum, aux, and the running sums [N,U,B,T,D] or None."""
        sealed = sharding.activations(jnp.zeros((self.schedule.n_blocks, *x.shape), x.dtype))

        def body(carry, n):
            sealed, live, aux = carry
            sealed = jax.lax.dynamic_update_index_in_dim(sealed, live, n, 0)
            live, aux, sums = self.run_block(P, Q, sealed, n, aux, ctx)
            return (sealed, live, aux), sums if save_sums else None

        carry = (sealed, x, self.empty_aux(P, Q, x, ctx))
        (sealed, live, aux), sums = jax.lax.scan(body, carry, jnp.arange(self.schedule.n_blocks))
        return sealed, live, aux, sums

    def checkpointed(self, P, Q, x, ctx, remat):
        """Scanned forward with the hand-written backward."""

        @jax.custom_vjp
        def run(P, Q, x, ctx):
            sealed, live, aux, _ = self.forward(P, Q, x, ctx, save_sums=False)
            return self.final(P, sealed, live, aux)

        def fwd(P, Q, x, ctx):
            sealed, live, aux, sums = self.forward(P, Q, x, ctx, save_sums=remat == "layer")
            return self.final(P, sealed, live, aux), (P, Q, ctx, sealed, live, sums)

        def bwd(saved, d_out):
            P, Q, ctx, sealed, live, sums = saved
            d_P, d_x = self.backward(P, Q, ctx, sealed, live, sums, d_out[0])
            return d_P, jax.tree.map(jnp.zeros_like, Q), d_x, jax.tree.map(_no_gradient, ctx)

        run.defvjp(fwd, bwd)
        return run(P, Q, x, ctx)

    def backward(self, P, Q, ctx, sealed, live, sums, d_h):
        """Cotangents of P and x, from the saved sums."""
        U, S = self.schedule.block, self.schedule.n_sublayers
        kinds, indices = self.tables()
        G = sharding.stored(jax.tree.map(jnp.zeros_like, P))
        # cotangents of sealed sums add up over all later sublayers: at least float32
        d_sealed, d_live = sharding.activations(jnp.zeros(sealed.shape, wide_dtype(sealed))), d_h
        if self.schedule.reads:
            final = lambda w, sealed, live: read(w, sealed, sealed.shape[0], live, True, self.eps)[0]
            d_w, d_sealed_last, d_live = jax.vjp(final, P["read"][-1], sealed, live)[1](d_h)
            G = {**G, "read": G["read"].at[-1].set(d_w)}
            d_sealed = wide(d_sealed_last)

        def sublayer_bwd(G, d_live, d_sealed, live, n, j):
            s = n * U + j

            def branch(name, f, G, d):
                p, q = layer(P["kinds"][name], indices[s]), layer(Q[name], indices[s])

                def step(p, norm_D, read_D, sealed, live):
                    x, _ = self.input_of(norm_D, read_D, sealed, n, live, j > 0)
                    return live + f(p, q, x, ctx)[0]

                _, vjp = jax.vjp(step, p, P["norm"][s], P["read"][s], sealed, live)
                d_p, d_norm, d_read, d_sealed, d_live = vjp(d)
                stacks = {**G["kinds"], name: put_layer(G["kinds"][name], indices[s], d_p)}
                G = {"kinds": stacks, "norm": G["norm"].at[s].set(d_norm), "read": G["read"].at[s].set(d_read)}
                return G, d_sealed, d_live

            branches = [functools.partial(branch, *pair) for pair in zip(self.schedule.kinds, self.fns)]
            G, d_sealed_s, d_live = self.switch(kinds[s], branches, G, d_live)
            return G, d_live, d_sealed + d_sealed_s if self.schedule.reads else d_sealed

        def block_bwd(carry, xs):
            n, sums = xs
            G, d_live, d_sealed = carry
            sums = self.run_block(P, Q, sealed, n, None, ctx)[2] if sums is None else sums

            def body(carry, xs):
                j, live = xs
                run = lambda c: sublayer_bwd(*c, live, n, j)
                return jax.lax.cond(n * U + j < S, run, lambda c: c, carry), None

            (G, d_live, d_sealed), _ = jax.lax.scan(body, (G, d_live, d_sealed), (jnp.arange(U), sums), reverse=True)
            if self.schedule.reads:
                # the block started from an empty sum; what came before it went into sealed[n]
                d_live = jax.lax.dynamic_index_in_dim(d_sealed, n, 0, keepdims=False).astype(d_live.dtype)
            return (G, d_live, d_sealed), None

        blocks = (jnp.arange(self.schedule.n_blocks), sums)
        (G, d_x, _), _ = jax.lax.scan(block_bwd, (G, d_live, d_sealed), blocks, reverse=True)
        return G, d_x

    # --- unrolled

    def unrolled(self, P, Q, x, ctx, remat):
        """The same sublayers in a Python loop under autodiff, rematerialised by `jax.checkpoint`."""
        U, S, N = self.schedule.block, self.schedule.n_sublayers, self.schedule.n_blocks
        aux = self.empty_aux(P, Q, x, ctx)

        def sublayer(s, n, P, sealed, live):
            has_live = s % U > 0
            kind, i = self.schedule.kind[s], self.schedule.index[s]
            name, f = self.schedule.kinds[kind], self.fns[kind]
            h, mix = self.input_of(P["norm"][s], P["read"][s], jnp.stack(sealed), n, live, has_live)
            y, new = f(layer(P["kinds"][name], i), layer(Q[name], i), h, ctx)
            return live + y, new, mix

        def block(n, P, sealed):
            live = jnp.zeros_like(x) if self.schedule.reads else sealed[-1]
            out = []
            for s in range(n * U, min(S, (n + 1) * U)):
                run = functools.partial(sublayer, s, n)
                live, new, mix = (jax.checkpoint(run) if remat == "layer" else run)(P, sealed, live)
                out.append((new, mix))
            return live, out

        sealed, live, s = [], x, 0
        for n in range(N):
            sealed = [*sealed, live]
            run = functools.partial(block, n)
            live, out = (jax.checkpoint(run) if remat == "block" else run)(P, sealed)
            for new, mix in out:
                name = self.schedule.kinds[self.schedule.kind[s]]
                aux[name] = put_layer(aux[name], self.schedule.index[s], new)
                if self.schedule.reads:
                    aux["attn_res"] = aux["attn_res"].at[s, : n + 1].set(mix[:-1]).at[s, -1].set(mix[-1])
                s += 1
        return self.final(P, jnp.stack(sealed), live, aux)


def _no_gradient(x):
    """Cotangent of a value the stack does not differentiate."""
    integer = not jnp.issubdtype(jnp.result_type(x), jnp.inexact)
    return jnp.zeros(jnp.shape(x), jax.dtypes.float0) if integer else jnp.zeros_like(x)

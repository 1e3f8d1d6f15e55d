"""Where decoding computes other numbers than training: every kind of layer in both forms, on the same inputs.

  python -m benchmarks.forms --scale=small [--quantise=mxfp4] [--mixers=float32]

Random weights, random rows of 64 tokens: training's form takes a row at once, decoding's token by token. Printed are
the root mean square of what they differ by, relative to the result's, and the share of elements that differ. A mixture
is then taken apart, each part given what training's takes, so that no difference is passed on. bfloat16 has 8 bits:
results that agree to 1e-5 before they are rounded differ in one element of some hundred, there by 0.2 to 0.4 %.
"""

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs import scales
from trillium_moe.config import Config, ModelConfig
from trillium_moe.infer import forward
from trillium_moe.model import attn_res, few
from trillium_moe.model.cache import make_cache
from trillium_moe.model.context import Context
from trillium_moe.model.experts import mixture
from trillium_moe.model.norms import rms_norm
from trillium_moe.model.params import layer
from trillium_moe.model.stack import Schedule
from trillium_moe.train.state import init_state, model_def

ROWS, TOKENS, SUMS = 16, 64, 3


def report(name: str, want, got) -> tuple[str, float, float]:
    """(name, relative difference, share of elements that differ)"""
    want, got = (np.asarray(jax.device_get(x), np.float64).ravel() for x in (want, got))
    return name, float(np.sqrt(((got - want) ** 2).mean() / (want**2).mean())), float((got != want).mean())


def first_of(schedule: Schedule) -> dict[str, int]:
    """kind -> the first sublayer of it"""
    return {kind: schedule.kind.index(k) for k, kind in enumerate(schedule.kinds)}


def forms(config: ModelConfig, seed: int = 0):
    """Yields `report` of every kind of layer, of the parts of a mixture, and of a depth read."""
    state = init_state(Config(model=config), jax.random.key(seed))
    weights = forward.serving_weights(config, state.params, state.router_bias)
    graphdef, cache, n = model_def(config)[0], make_cache(config, ROWS, TOKENS, ""), jnp.ones(ROWS, jnp.int32)
    normal = lambda key, *shape: jax.random.normal(jax.random.key(key), shape).astype(config.dtypes.compute)
    x = normal(seed + 1, ROWS, TOKENS, config.d_model)

    def module(kind, params, router_bias):
        stack = nnx.split(getattr(nnx.merge(graphdef, params, router_bias), kind))[1]
        return nnx.merge(forward._graphdefs(config)[kind], layer(stack, 0))

    for kind, s in first_of(Schedule.of(config)).items():

        @jax.jit
        def trained(params, router_bias, x, kind=kind):
            own = module(kind, params, router_bias)
            return (own(x) if kind == "dense" else own(x, Context(None)))[0]

        def step(variables, carry, x_BD, kind=kind):
            past, at = carry
            own = forward._module(config, kind, variables)
            if kind in ("mla", "kda"):
                y, past = own.extend(x_BD[:, None], n, past, *((None, at) if kind == "mla" else ()))
            else:
                y = own.each(x_BD[:, None]) if kind.endswith("moe") else own(x_BD[:, None])[0]
            return (past, at + 1), y[:, 0]

        @jax.jit  # the weights are arguments: what is constant XLA multiplies in another order
        def decoded(variables, x, past, step=step):
            start = past, jnp.zeros(ROWS, jnp.int32)
            return jax.lax.scan(functools.partial(step, variables), start, x.swapaxes(0, 1))[1].swapaxes(0, 1)

        past = {"mla": cache.mla, "kda": cache.kda}.get(kind, (None,))[0]
        yield report(kind, trained(state.params, state.router_bias, x), decoded(weights.layers[s], x, past))
        if kind == "moe":
            whole = jax.jit(functools.partial(module, kind))(state.params, state.router_bias)
            yield from parts(config, whole, weights.layers[s], x[:, 0])
    yield depth(config, weights, *(normal(seed + 2 + i, ROWS, TOKENS, config.d_model) for i in range(SUMS)))


def parts(config: ModelConfig, whole: nnx.Module, packed: nnx.State, x_MD):
    """Yields `report` of what is before, in and behind the experts of a mixture, for a token of every row."""
    graphdef, variables = nnx.split(whole)
    run = lambda f, *args: jax.jit(lambda v, *args: f(nnx.merge(graphdef, v), *args))(variables, *args)
    served = lambda f, *args: jax.jit(lambda v, *args: f(forward._module(config, "moe", v), *args))(packed, *args)
    want = run(lambda m, x: (m.latents(x), m.logits(x)), x_MD)
    z, logits, shared = served(lambda m, x: m._projections(x), x_MD)
    yield report("  latents", want[0], z)
    yield report("  router logits", want[1], logits.reshape(ROWS, -1, config.moe.n_experts).sum(1))
    p, chosen = jax.lax.top_k(jax.nn.sigmoid(want[1]), config.moe.k)
    chosen = chosen.astype(jnp.int32)
    u = run(lambda m, z, p, e: mixture(config, z, e, p, *m.weights()), want[0], p, chosen)
    how = few.variant(ROWS, config.moe.k, config.moe.n_experts)
    yield report(f"  routed experts ({how})", u,
                 served(lambda m, z, p, e: getattr(few, how)(config, z, p, e, m.weights()), want[0], p, chosen))
    yield report("  output", run(lambda m, x, u: m.output(x, u), x_MD, u),
                 served(lambda m, u, *shared: m._packed_output(u[None], *shared), u, *shared))


def depth(config: ModelConfig, weights: forward.Weights, *sums):
    """`report` of a depth read and the norm behind it."""
    query, norm = weights.query[0] + 0.02, weights.sublayer_norm[0]

    @jax.jit
    def trained(query, norm, *sums):
        h, _ = attn_res.read(query, jnp.stack(sums[:-1]), len(sums) - 1, sums[-1], True, config.norm_eps)
        return rms_norm(h, norm, config.norm_eps)

    got, _ = forward._read(query, sums[:-1], sums[-1], None, norm, config.norm_eps)
    return report("depth read", trained(query, norm, *sums), got)


def as_asked(config: ModelConfig, compute: str, quantise: str, mixers: str) -> ModelConfig:
    inside = lambda c: dataclasses.replace(c, compute=mixers)
    return dataclasses.replace(config, dtypes=dataclasses.replace(config.dtypes, compute=compute),
                               moe=dataclasses.replace(config.moe, quantise=quantise),
                               kda=inside(config.kda), mla=inside(config.mla))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="small", choices=("tiny", "small", "medium"))
    parser.add_argument("--compute", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--quantise", default="", choices=("", "mxfp4"))
    parser.add_argument("--mixers", default="", choices=("", "float32"), help="inside KDA and MLA")
    args = parser.parse_args()
    config = as_asked(getattr(scales, args.scale)(), args.compute, args.quantise, args.mixers)
    for name, relative, share in forms(config):
        print(f"{name:28s} {relative:.1e}  {share:7.2%} of the elements", flush=True)


if __name__ == "__main__":
    main()

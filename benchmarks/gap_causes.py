"""Why log-probabilities as sampled differ from those of training: python -m benchmarks.gap_causes --workdir=runs/a

Held-out text goes through a run's model twice: through the forward pass of training, and token by token through the
cache. Both in bfloat16, with the run's weights, for experts of three forms

    bfloat16    as they are
    weights     rounded to MXFP4
    both        rounded to MXFP4, their inputs to MXFP8: what model.moe.quantise=mxfp4 trains

and once more with the experts that training chose forced on decoding; then through the forward pass of training again,
packed behind other tokens, so that chunks begin elsewhere: as far as training is from itself. --mixers=float32 is for
model.kda.compute and model.mla.compute. The widths of experts must be multiples of 32.
"""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import few_rows
from trillium_moe.config import ModelConfig
from trillium_moe.data.pipeline import make_pipeline
from trillium_moe.infer import forward
from trillium_moe.infer.generate import LoadedModel, load_model
from trillium_moe.model import experts, few, moe
from trillium_moe.model.cache import make_cache
from trillium_moe.train.state import model_def

FORMS = ("bfloat16", "weights", "both")
BEFORE = 23  # tokens of another document: no multiple of a chunk's


def trained(
    config: ModelConfig, model: LoadedModel, tokens_BT: np.ndarray, ids_BT: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(log-probabilities of the next tokens [B, T - 1], experts [L, B, T, k])."""
    graphdef = model_def(config)[0]

    @jax.jit
    def run(params, bias, tokens_BT, ids_BT):
        logits, aux = nnx.merge(graphdef, params, bias)(tokens_BT, ids_BT)
        return jax.nn.log_softmax(logits.astype(jnp.float32)), aux["moe"]["experts"]

    logprobs, chosen = run(model.params, model.router_bias, tokens_BT, ids_BT)
    return of_next(np.asarray(logprobs), tokens_BT), np.asarray(chosen).reshape(len(chosen), *tokens_BT.shape, -1)


def repacked(config: ModelConfig, model: LoadedModel, tokens_BT: np.ndarray) -> np.ndarray:
    """Log-probabilities of `trained`, of rows that begin with tokens of another document."""
    before = tokens_BT[::-1, :BEFORE]
    ids = np.repeat([1, 2], [before.shape[1], tokens_BT.shape[1]])[None].repeat(len(tokens_BT), 0)
    rows = np.concatenate([before, tokens_BT], axis=1)
    config = dataclasses.replace(config, moe=dataclasses.replace(config.moe, record=rows.size))
    return trained(config, model, rows, ids)[0][:, before.shape[1] :]


def of_next(logprobs_BTV: np.ndarray, tokens_BT: np.ndarray) -> np.ndarray:
    return np.take_along_axis(logprobs_BTV[:, :-1], tokens_BT[:, 1:, None], axis=-1)[..., 0]


class Routing:
    """Stands in for the routers of decoding: notes what they choose, and puts `forced` [L, M, k] in its place."""

    def __init__(self):
        self.chosen, self.forced, self.force = [], None, None
        self.own, self.own_few = moe.route, few_rows.route

    def _pick(self, scores_ME, own_MK, scale):
        chosen = jnp.where(self.force, self.forced[len(self.chosen)], own_MK)
        self.chosen.append(own_MK)
        scores = jnp.take_along_axis(scores_ME, chosen, axis=-1)
        return chosen, scale * scores / (scores.sum(-1, keepdims=True) + 1e-20)

    def route(self, scores, bias, *, k, scale, implementation=None):
        found = self.own(scores, bias, k=k, scale=scale, implementation=implementation)
        chosen, weights = self._pick(scores.reshape(-1, len(bias)), found.experts_MK, scale)
        return found._replace(experts_MK=chosen, weights_MK=weights.astype(found.weights_MK.dtype))

    def few_route(self, logits, bias, *, k, scale, **rest):
        own = self.own_few(logits, bias, k=k, scale=scale, **rest)
        p_EM = own.weights_EM
        scores = jax.nn.sigmoid(logits.reshape(p_EM.shape[1], -1, len(bias)).sum(1))
        chosen, weights = self._pick(scores, jax.lax.top_k(p_EM.T, k)[1].astype(jnp.int32), scale)
        taken = chosen.T[:, None] == jnp.arange(len(bias))[:, None]
        forced = few_rows.Routes((weights.T[:, None] * taken).sum(0).astype(p_EM.dtype), few_rows.slots(taken.any(0)))
        return jax.tree.map(lambda new, old: jnp.where(self.force, new, old), forced, own)


def served(config: ModelConfig, model: LoadedModel, tokens_BT: np.ndarray, forced_LBTK: np.ndarray):
    """(log-probabilities, experts) as `trained`, token by token from the cache: routed by itself, and as forced."""
    B, T = tokens_BT.shape
    flat = forward.flat(forward.serving_weights(config, model.params, model.router_bias))
    cache, routing, n = make_cache(config, B, T, ""), Routing(), jnp.ones(B, jnp.int32)

    def step(force, weights, cache, inputs):
        tokens_B, routing.forced = inputs
        routing.chosen, routing.force = [], force
        h, cache = forward.extend(config, weights, cache, tokens_B[:, None], n)
        logprobs = jax.nn.log_softmax(forward.logits(config, weights, h)[:, 0].astype(jnp.float32))
        return cache, (logprobs, jnp.stack(routing.chosen))

    @jax.jit  # the weights are arguments: what is constant XLA multiplies in another order
    def run(force, flat, inputs):
        return jax.lax.scan(functools.partial(step, force, forward.whole(flat)), cache, inputs)[1]

    inputs = tokens_BT.T, jnp.asarray(forced_LBTK.transpose(2, 0, 1, 3))
    own = forward._ffn.__wrapped__  # every layer by itself: one program for all of them would be traced once
    with mock.patch.object(moe, "route", routing.route), mock.patch.object(few_rows, "route", routing.few_route), \
            mock.patch.object(forward, "_ffn", own):
        for force in (False, True):
            logprobs, chosen = run(jnp.asarray(force), flat, inputs)
            yield of_next(np.asarray(logprobs).transpose(1, 0, 2), tokens_BT), np.asarray(chosen).transpose(1, 2, 0, 3)


def as_form(config: ModelConfig, form: str, n: int, mixers: str = "") -> ModelConfig:
    """The config in bfloat16 with experts of a form, whose training pass notes the experts of n tokens."""
    c = dataclasses.replace(config.moe, record=n, quantise="" if form == "bfloat16" else "mxfp4")
    inside = lambda c: dataclasses.replace(c, compute=mixers or c.compute)
    config = dataclasses.replace(config, kda=inside(config.kda), mla=inside(config.mla))
    return dataclasses.replace(config, moe=c, dtypes=dataclasses.replace(config.dtypes, compute="bfloat16"))


def patched(form: str, f: Callable):
    """f(), with the inputs of experts as they are unless the form rounds them."""
    if form == "both":
        return f()
    with contextlib.ExitStack() as stack:
        for module in (few, experts, moe):
            stack.enter_context(mock.patch.object(module, "mxfp8", lambda x: x))
        return f()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workdir", required=True, help="directory of a run")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="of a row")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--mixers", default="", help="float32: between the projections of KDA and MLA")
    args = parser.parse_args()
    model = load_model(args.workdir)
    held = make_pipeline(model.config, "heldout", args.workdir, threads=0, tokenizer=model.tokenizer)
    tokens = np.concatenate([row.reshape(-1) for row in held[0]["tokens"]])[: args.rows * args.tokens]
    tokens = tokens.reshape(args.rows, args.tokens)
    for form in args.forms.split(","):
        config = as_form(model.config.model, form, tokens.size, args.mixers)
        want, theirs = patched(form, lambda c=config: trained(c, model, tokens))
        (own, chosen), (forced, _) = patched(form, lambda c=config, e=theirs: list(served(c, model, tokens, e)))
        again = np.abs(patched(form, lambda c=config: repacked(c, model, tokens)) - want).mean()
        found = report(np.abs(own - want), np.abs(forced - want), theirs, chosen)
        print(f"{form:9s} {found}; training packed otherwise {again:.4f}", flush=True)


def report(gap_BT: np.ndarray, forced_BT: np.ndarray, theirs_LBTK: np.ndarray, chosen_LBTK: np.ndarray) -> str:
    other_BT = (np.sort(theirs_LBTK, -1) != np.sort(chosen_LBTK, -1)).any((0, -1))[:, :-1]
    of = lambda where: f"{gap_BT[where].mean():.4f}" if where.any() else "-"
    tail = f"99th percentile {np.quantile(gap_BT, 0.99):.3f}, largest {gap_BT.max():.3f}"
    return (f"mean gap {gap_BT.mean():.4f}, {tail}; "
            f"{other_BT.mean():.0%} of tokens with another expert somewhere, theirs {of(other_BT)}, "
            f"the others' {of(~other_BT)}; with training's experts forced {forced_BT.mean():.4f}")


if __name__ == "__main__":
    main()

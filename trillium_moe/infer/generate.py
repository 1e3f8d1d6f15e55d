"""Text from a checkpoint, by one fixed-shape forward pass per token.

Every step runs the whole model over a window of tokens and keeps the logits of the last one: no cache, so nothing to
get wrong. Causality makes the padding on the right of the window harmless. When the window is full the oldest token
leaves it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from flax import nnx

from trillium_moe.config import Config, check, load_config
from trillium_moe.data.tokenizer import Tokenizer, make_tokenizer
from trillium_moe.shapes import Array, Float, Int, PyTree
from trillium_moe.train import checkpoint
from trillium_moe.train.state import model_def


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from the logits."""

    temperature: float = 1.0  # 0 takes the most probable token
    top_k: int = 0  # keep the k most probable tokens; 0: all
    top_p: float = 1.0  # keep the most probable tokens whose probabilities sum to p; 1: all
    seed: int = 0

    def __post_init__(self):
        check(self.temperature >= 0, "temperature", self.temperature, "must be 0 (greedy) or positive")
        check(self.top_k >= 0, "top_k", self.top_k, "must be 0 (all tokens) or positive")
        check(0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]")


@dataclass(frozen=True)
class LoadedModel:
    """A trained model: parameters without optimizer state, and the tokenizer it was trained with."""

    config: Config
    step: int  # optimizer steps done
    params: PyTree
    router_bias: PyTree
    tokenizer: Tokenizer


def load_model(workdir: epath.PathLike, step: int | None = None) -> LoadedModel:
    """The model of the newest whole checkpoint in a run directory, or that of `step`.

    Raises:
      ConfigError: if the directory holds no config.
      CheckpointError: if it holds no usable checkpoint.
    """
    config = load_config(workdir)
    _, params, router_bias = model_def(config.model)
    abstract = {"params": params, "router_bias": router_bias}
    restored = checkpoint.restore(workdir, abstract, step=step, partial=True)
    return LoadedModel(config, restored.step, **restored.state, tokenizer=make_tokenizer(config.data, workdir))


def generate(model: LoadedModel, prompt: str, n_tokens: int, sampling: Sampling = Sampling()) -> str:
    """Continues `prompt` by up to `n_tokens` tokens, ending early where the model ends the document.

    Returns:
      The continuation, without the prompt.

    Raises:
      ConfigError: for an empty prompt or `n_tokens` < 1.
    """
    ids = [int(i) for i in model.tokenizer.encode(prompt)]
    stream = generate_ids(model.config, model.params, model.router_bias, ids, n_tokens, sampling)
    out = []
    for token in stream:
        if token == model.tokenizer.eos_id:
            break
        out.append(token)
    return model.tokenizer.decode(out)


def generate_ids(
    config: Config,
    params: PyTree,
    router_bias: PyTree,
    prompt: Sequence[int],
    n_tokens: int,
    sampling: Sampling = Sampling(),
) -> Iterator[int]:
    """Yields `n_tokens` token ids after `prompt`. Token i depends on the seed and i only, not on how many follow.

    The window is data.seq_len tokens, or less if prompt and continuation fit into less.
    """
    check(len(prompt) > 0, "prompt", "", "must hold at least one token: the model predicts what follows it")
    check(n_tokens > 0, "n_tokens", n_tokens, "must be greater than 0")
    window = min(config.data.seq_len, 1 << (len(prompt) + n_tokens - 1).bit_length())  # few shapes, few compilations
    recent = list(prompt)[-window:]
    tokens_W = np.zeros(window, np.int32)
    tokens_W[: len(recent)] = recent
    key = jax.random.key(sampling.seed)
    graphdef = model_def(config.model)[0]
    tokens, length = jnp.asarray(tokens_W), jnp.int32(len(recent))
    for i in range(n_tokens):
        tokens, length, token = _step(graphdef, params, router_bias, tokens, length, jax.random.fold_in(key, i),
                                      sampling.temperature, sampling.top_k, sampling.top_p)
        yield int(token)


@functools.partial(jax.jit, static_argnums=0)
def _step(graphdef, params, router_bias, tokens_W, length, key, temperature, top_k, top_p):
    """Samples the token after the first `length` ones and puts it into the window."""
    window = tokens_W.shape[0]
    segment_ids_W = (jnp.arange(window) < length).astype(jnp.int32)
    logits_BTV, _ = nnx.merge(graphdef, params, router_bias)(tokens_W[None], segment_ids_W[None])
    token = sample(key, logits_BTV[0, length - 1], temperature, top_k, top_p)
    full = length == window
    tokens_W = jnp.where(full, jnp.roll(tokens_W, -1), tokens_W)
    at = jnp.minimum(length, window - 1)
    return tokens_W.at[at].set(token), jnp.minimum(length + 1, window), token


def sample(
    key: Array,
    logits_V: Float[Array, "V"],
    temperature: float | Float[Array, ""],
    top_k: int | Int[Array, ""],
    top_p: float | Float[Array, ""],
) -> Int[Array, ""]:
    """Draws one token id. The cuts act on the tempered distribution, top-k first; the best token always stays.

    All settings may be traced, so changing them compiles nothing.
    """
    best_first = jnp.argsort(-logits_V)
    ranked = logits_V[best_first].astype(jnp.float32)
    scaled = ranked / jnp.maximum(temperature, 1e-6)
    rank = jnp.arange(len(logits_V))
    scaled = jnp.where((rank < top_k) | (top_k == 0), scaled, -jnp.inf)
    before = jnp.cumsum(jax.nn.softmax(scaled)) - jax.nn.softmax(scaled)  # probability of all better tokens
    scaled = jnp.where((before < top_p) | (rank == 0), scaled, -jnp.inf)
    drawn = jax.random.categorical(key, scaled)
    return best_first[jnp.where(temperature == 0, 0, drawn)].astype(jnp.int32)

"""Text from a checkpoint: the model is loaded, its prompt prefilled, and tokens decoded from the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from trillium_moe.config import Config, check
from trillium_moe.config_files import load_config
from trillium_moe.data.tokenizer import Tokenizer, make_tokenizer
from trillium_moe.infer.engine import Engine, EngineConfig
from trillium_moe.infer.pictures import Pictures, show
from trillium_moe.infer.sampling import Sampling
from trillium_moe.shapes import PyTree
from trillium_moe.train import checkpoint
from trillium_moe.train.state import model_def


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


def generate(
    model: LoadedModel, prompt: str, n_tokens: int, sampling: Sampling = Sampling(), images: Sequence[Any] = ()
) -> str:
    """Continues `prompt` by up to `n_tokens` tokens, ending early where the model ends the document.

    Args:
      images: pictures that stand before the prompt (`data.images.read_image`), as in training.

    Returns:
      The continuation, without the prompt.

    Raises:
      ConfigError: for an empty prompt, `n_tokens` < 1, or a model whose router looks ahead.
    """
    return "".join(stream_text(model, prompt, n_tokens, sampling, images))


def stream_text(
    model: LoadedModel, prompt: str, n_tokens: int, sampling: Sampling = Sampling(), images: Sequence[Any] = ()
) -> Iterator[str]:
    """`generate`, piece by piece as the text comes."""
    parts = [*images, model.tokenizer.encode(prompt).tolist()]
    ids, pictures = show(model.config, model.tokenizer.specials["<|image|>"], parts)
    stops = (model.tokenizer.eos_id,)
    text = TextStream(model.tokenizer)
    tokens = generate_ids(model.config, model.params, model.router_bias, ids, n_tokens, sampling, stops, pictures)
    for token in tokens:
        if token not in stops and (piece := text.add([token])):
            yield piece
    yield text.end()


def generate_ids(
    config: Config,
    params: PyTree,
    router_bias: PyTree,
    prompt: Sequence[int],
    n_tokens: int,
    sampling: Sampling = Sampling(),
    stops: Sequence[int] = (),
    pictures: Pictures | None = None,
) -> Iterator[int]:
    """Yields up to `n_tokens` token ids after `prompt`. Token i depends on the seed and i only, not on how many follow.

    The whole prompt is read, however long; beyond data.seq_len tokens the model meets lengths it was not trained on.
    """
    check(len(prompt) > 0, "prompt", "", "must hold at least one token: the model predicts what follows it")
    check(n_tokens > 0, "n_tokens", n_tokens, "must be greater than 0")
    capacity = 1 << (len(prompt) + n_tokens - 1).bit_length()  # few shapes, few compilations
    engine = Engine(config.model, params, router_bias, EngineConfig(slots=1, capacity=capacity))
    slot = engine.open()
    engine.extend(slot, prompt, pictures)
    engine.start(slot, n_tokens, sampling, stops)
    while engine.running:
        yield from (int(t) for t in engine.decode().tokens[slot] if t >= 0)


class TextStream:
    """Text of token ids that come one by one: a character is held back until all of its bytes are there."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.held = tokenizer, []

    def add(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete."""
        self.held += ids
        text = self.tokenizer.decode(self.held)
        # U+FFFD at the end may be the beginning of a character; after 4 bytes it is not
        if text.endswith("\ufffd") and len(self.held) < 8:
            return ""
        self.held = []
        return text

    def end(self) -> str:
        """What was held back."""
        held, self.held = self.held, []
        return self.tokenizer.decode(held) if held else ""

"""What is measured once of a run's last model, on held-out text: columns that no training metric gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from etils import epath

from trillium_moe.config import Config

ROWS, TOKENS = 2, 512  # of held-out text: every expert is computed for every token


def activations(config: Config, state: Any, workdir: epath.PathLike) -> dict[str, float]:
    """Largest absolute values in the feed-forward networks: before the activation, and after it."""
    from trillium_moe.data.pipeline import make_pipeline
    from trillium_moe.infer.generate import LoadedModel
    from trillium_moe.inspect.activations import maxima

    held = make_pipeline(config, "heldout", workdir, threads=0)
    batch = {name: held[0][name][:ROWS, :TOKENS] for name in ("tokens", "segment_ids")}
    model = LoadedModel(config, int(state.step), state.params, state.router_bias, held.tokenizer)
    found = maxima(model, batch["tokens"], batch["segment_ids"])
    return {"gate_max": float(max(found.gate_L.max(), found.up_L.max())), "activation_max": float(found.after_L.max())}


PROBES: dict[str, Callable[[Config, Any, epath.PathLike], dict[str, float]]] = {"activations": activations}

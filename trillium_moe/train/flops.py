"""FLOPs of a training step from the config alone: what the model asks for, and what the program runs.

XLA's own count takes a loop body once whatever its trip count, so it cannot serve. Here a multiply-add is 2, and

    matmuls      2 x active parameters a token: without the input embedding (a look-up), with the output head
    attention    T H (qk + v) a token: causal, so half of T keys on average; documents shorter than T cost less
    KDA          6 K V a token and head: what the recurrence must do (read for the error, write, read the output)

are the forward pass; the backward is twice it. Recomputation is not the model's work and not in its MFU: `executed`
adds it, with the optimizer's Newton-Schulz iterations, which do not depend on the number of tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flax import nnx

from trillium_moe.config import Config
from trillium_moe.optim.partition import matrix_form
from trillium_moe.train.counts import count_modules, totals
from trillium_moe.train.state import model_def

FORWARDS = {"none": 1, "layer": 2, "block": 3}  # passes over the layers in one step, the recomputed ones included


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one optimizer step over all devices."""

    matmul: float  # forward
    attention: float  # forward
    kda: float  # forward
    optimizer: float
    forwards: int

    @property
    def model(self) -> float:
        """Forward and backward, nothing twice: the numerator of MFU."""
        return 3 * (self.matmul + self.attention + self.kda)

    @property
    def executed(self) -> float:
        """With recomputation and the optimizer."""
        return (self.forwards + 2) * (self.matmul + self.attention + self.kda) + self.optimizer


def step_flops(config: Config) -> StepFlops:
    """Of a run's optimizer step."""
    model, tokens, T = config.model, config.data.batch_size * config.data.seq_len, config.data.seq_len
    active = totals(count_modules(model))["active_text_without_input_embedding"]
    mla, kda = model.mla, model.kda
    attention = model.mixers.count("mla") * T * mla.n_heads * (mla.nope_dim + mla.rope_dim + mla.v_dim)
    recurrence = model.mixers.count("kda") * 6 * kda.n_heads * kda.head_dim**2
    newton = 0.0
    if config.optim.name == "muon":
        for _, variable in nnx.to_flat_state(model_def(model)[1]):
            meta = variable.get_metadata()
            if meta["muon"]:
                form = matrix_form(meta["axes"], meta["muon"], meta["n_in"], config.optim.per_head)
                sizes = [math.prod(variable.shape[i] for i in dims) for dims in (form.batch, form.inputs, form.outputs)]
                n, m = sorted(sizes[1:])
                newton += config.optim.ns_steps * sizes[0] * (4 * n * n * m + 2 * n**3)
    return StepFlops(2.0 * active * tokens, float(attention * tokens), float(recurrence * tokens), newton,
                     FORWARDS[model.remat])

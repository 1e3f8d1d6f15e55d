"""Which optimizer each parameter takes, whether it decays, and where its matrices are: read off its metadata.

Metadata is what `trillium_moe.model.params.param` attaches: `axes`, `muon`, `n_in`, `decay`.
"""

import math
from dataclasses import dataclass

import numpy as np
from flax import nnx

from trillium_moe.config import OptimConfig
from trillium_moe.model.params import metadata
from trillium_moe.shapes import Array, Shaped

BATCH_AXES = ("layers", "experts")  # leading axes of these names: every index is a matrix of its own


@dataclass(frozen=True)
class MatrixForm:
    """A parameter as a batch of matrices: the positions of its batch, input and output axes."""

    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        return self.batch + self.inputs + self.outputs

    def matrices(self, x: Shaped[Array | np.ndarray, "..."]) -> Shaped[Array | np.ndarray, "..."]:
        """[*batch, n, m] with n the product of the input sizes and m that of the output sizes."""
        batch, n, m = ([x.shape[i] for i in group] for group in (self.batch, self.inputs, self.outputs))
        return x.transpose(self.order).reshape(*batch, math.prod(n), math.prod(m))

    def restore(
        self, x_BNM: Shaped[Array | np.ndarray, "*B N M"], shape: tuple[int, ...]
    ) -> Shaped[Array | np.ndarray, "..."]:
        """The parameter of the given shape whose `matrices` are x_BNM."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return x_BNM.reshape([shape[i] for i in self.order]).transpose(inverse)


def matrix_form(axes: tuple[str, ...], muon: str, n_in: int, per_head: bool = True) -> MatrixForm:
    """Matrices of a parameter.

    q [layers, embed, heads, head_dim], n_in 1, "head": batch (layers, heads) of [embed, head_dim].
    o [layers, heads, head_dim, embed], n_in 2, "whole": batch (layers,) of [heads * head_dim, embed].
    w [layers, experts, latent, expert_mlp], n_in 1, "whole": batch (layers, experts) of [latent, expert_mlp].

    Args:
      axes: logical axis names. Leading ones named layers or experts are batch axes; n_in of the others are inputs.
      muon: "whole" or "head"; "head" makes heads a batch axis too, unless per_head is False.

    Raises:
      ValueError: if an input or an output axis is missing, so that there is no matrix.
    """
    first = next((i for i, axis in enumerate(axes) if axis not in BATCH_AXES), len(axes))
    rest = range(first, len(axes))  # the router's output axis is named experts too, but does not lead
    alone = ("heads",) if muon == "head" and per_head else ()
    batch = (*range(first), *(i for i in rest if axes[i] in alone))
    inputs, outputs = (tuple(i for i in part if i not in batch) for part in (rest[:n_in], rest[n_in:]))
    if not inputs or not outputs:
        raise ValueError(f"muon={muon!r} with axes={axes}, n_in={n_in}: a matrix needs input and output axes "
                         f"besides {(*BATCH_AXES, *alone)}; give the parameter muon='' or another n_in")
    return MatrixForm(batch, inputs, outputs)


def labels(params: nnx.State, config: OptimConfig) -> nnx.State:
    """"muon" or "adamw" for every parameter: a tree like `params` with a string in place of each variable."""
    pick = lambda _, muon: "muon" if muon and config.name == "muon" else "adamw"
    return nnx.map_state(pick, metadata(params, "muon"))


def decay_mask(params: nnx.State) -> nnx.State:
    """Whether weight decay applies: a tree like `params` with a bool in place of each variable."""
    return metadata(params, "decay")

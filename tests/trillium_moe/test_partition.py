import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from trillium_moe.config import OptimConfig
from trillium_moe.model.params import param, stack, zeros
from trillium_moe.optim.partition import decay_mask, labels, matrix_form


@st.composite
def parameters(draw):
    """Axes and their sizes with an input and an output at least, after layers and experts if these occur."""
    inner = draw(st.lists(st.sampled_from(["embed", "head_dim", "rank", "mlp"]), min_size=2, max_size=4))
    n_in = draw(st.integers(1, len(inner) - 1))
    at = draw(st.integers(0, len(inner)))
    if draw(st.booleans()):
        inner, n_in = inner[:at] + ["heads"] + inner[at:], n_in + (at <= n_in)
    axes = tuple(draw(st.sampled_from([[], ["layers"], ["experts"], ["layers", "experts"]])) + inner)
    return axes, tuple(draw(st.integers(1, 4)) for _ in axes), n_in


@settings(max_examples=100, deadline=None)
@given(parameters(), st.sampled_from(["whole", "head"]), st.booleans())
def test_restore_inverts_matrices(parameter, muon, per_head):
    axes, shape, n_in = parameter
    form = matrix_form(axes, muon, n_in, per_head)
    x = np.arange(np.prod(shape)).reshape(shape)
    matrices = form.matrices(x)
    alone = {"layers", "experts"} | ({"heads"} if muon == "head" and per_head else set())
    assert matrices.shape[:-2] == tuple(n for n, axis in zip(shape, axes) if axis in alone)
    assert (form.restore(matrices, shape) == x).all()


def test_matrices_are_input_by_output():
    x = np.arange(120).reshape(2, 5, 3, 4)
    q = matrix_form(("layers", "embed", "heads", "head_dim"), "head", 1)
    assert (q.matrices(x) == np.einsum("lehk->lhek", x)).all()
    whole = matrix_form(("layers", "embed", "heads", "head_dim"), "head", 1, per_head=False)
    assert (whole.matrices(x) == x.reshape(2, 5, 12)).all()
    o = matrix_form(("layers", "heads", "head_dim", "embed"), "whole", 2)
    assert (o.matrices(x) == x.reshape(2, 15, 4)).all()
    w1 = matrix_form(("layers", "experts", "latent", "expert_mlp"), "whole", 1)
    assert (w1.matrices(x) == x).all()


@pytest.mark.parametrize("axes, muon, n_in", [
    (("embed",), "whole", 1), (("layers", "embed", "heads"), "head", 1), (("vocab", "embed"), "whole", 0)])
def test_no_matrix_is_an_error(axes, muon, n_in):
    with pytest.raises(ValueError, match="needs input and output axes"):
        matrix_form(axes, muon, n_in)


class Toy(nnx.Module):
    def __init__(self, rngs):
        self.q = param(rngs, (6, 2, 4), ("embed", "heads", "head_dim"), "float32", zeros, muon="head")
        self.norm = param(rngs, (6,), ("embed",), "float32", zeros)
        self.table = param(rngs, (8, 6), ("vocab", "embed"), "float32", zeros, decay=True)


def test_labels_and_mask_come_from_metadata():
    params = jax.eval_shape(lambda: nnx.state(stack(Toy, 3, nnx.Rngs(params=0)), nnx.Param))
    assert nnx.to_pure_dict(labels(params, OptimConfig())) == {"q": "muon", "norm": "adamw", "table": "adamw"}
    assert set(nnx.to_pure_dict(labels(params, OptimConfig(name="adamw"))).values()) == {"adamw"}
    assert nnx.to_pure_dict(decay_mask(params)) == {"q": True, "norm": False, "table": True}

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trillium_moe.model.params import param, stack, zeros
from trillium_moe.optim.qk_clip import qk_clip

L, T, D, R, H, NOPE, ROPE, TAU = 2, 12, 10, 6, 3, 4, 2, 1.5


def mla_params(query, dtype="float32"):
    class MLA(nnx.Module):
        def __init__(self, rngs):
            axes = ("rank", "heads", "head_dim")
            setattr(self, query, param(rngs, (D, H, NOPE + ROPE), axes, dtype, zeros, muon="head"))
            self.k_up = param(rngs, (R, H, NOPE), axes, dtype, zeros, muon="head")
            self.v_up = param(rngs, (R, H, NOPE), axes, dtype, zeros, muon="head")

    abstract = jax.eval_shape(lambda: nnx.state(stack(MLA, L, nnx.Rngs(params=0))))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), x.dtype), abstract)


def max_logits(mla, query):
    """[L, H], in float64 numpy."""
    rng = np.random.default_rng(0)
    x, c, k_rope = (rng.normal(size=(L, T, n)) for n in (D, R, ROPE))
    q = np.einsum("ltd,ldhk->lthk", x, np.asarray(mla[query].get_value(), np.float64))
    k = np.einsum("ltr,lrhk->lthk", c, np.asarray(mla["k_up"].get_value(), np.float64))
    logits = np.einsum("lthk,lshk->lhts", q[..., :NOPE], k)
    logits += np.einsum("lthk,lsk->lhts", q[..., NOPE:], k_rope)
    return (logits * (NOPE + ROPE) ** -0.5).max((2, 3))


@pytest.mark.parametrize("query", ["q_up", "q"])
def test_logits_end_at_the_bound(query):
    mla = mla_params(query)
    before = max_logits(mla, query)
    over = before > TAU
    assert over.any() and not over.all()
    clipped = jax.jit(qk_clip, static_argnums=(2, 3))(mla, jnp.asarray(before, jnp.float32), TAU, NOPE)
    after = max_logits(clipped, query)
    np.testing.assert_allclose(after, np.where(over, TAU, before), rtol=1e-6)
    for name in (query, "k_up"):  # axes [L, R, H, K]: bits of the heads below the bound stay
        kept = np.broadcast_to(~over[:, None, :, None], mla[name].shape)
        old, new = np.asarray(mla[name].get_value()), np.asarray(clipped[name].get_value())
        assert (old == new)[kept].all() and (old != new)[~kept].all()
    assert (clipped["v_up"].get_value() == mla["v_up"].get_value()).all()
    assert jax.tree.structure(clipped) == jax.tree.structure(mla)


def test_bfloat16_parameters_keep_dtype_and_bits():
    mla = mla_params("q_up", "bfloat16")
    clipped = qk_clip(mla, jnp.full((L, H), -jnp.inf), TAU, NOPE)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), mla, clipped))

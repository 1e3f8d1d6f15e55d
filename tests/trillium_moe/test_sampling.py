import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trillium_moe.infer.sampling import Settings, sample

LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))  # best first: 1, 3, 2, 0
CASES = [
    ((1.0, 0, 1.0), {0, 1, 2, 3}), ((1.0, 2, 1.0), {1, 3}), ((1.0, 1, 1.0), {1}), ((1.0, 0, 0.5), {1, 3}),
    ((1.0, 0, 0.39), {1}), ((1.0, 3, 0.95), {1, 3, 2}), ((0.0, 0, 1.0), {1}), ((5.0, 9, 1.0), {0, 1, 2, 3}),
]  # fmt: skip
N = 400


def draw(settings, logits=LOGITS, seeds=None):
    """One token per row; rows take their settings from a list of (temperature, top_k, top_p)."""
    t, k, p = (np.array(x) for x in zip(*settings))
    seeds = np.arange(len(t)) if seeds is None else seeds
    logits = jnp.broadcast_to(logits, (len(t), *logits.shape[-1:]))
    values = Settings(seeds.astype(np.uint32), t.astype(np.float32), k.astype(np.int32), p.astype(np.float32))
    return jax.jit(sample)(logits, np.zeros(len(t), np.int32), values)


def test_cuts_allow_exactly_the_best():
    tokens, _ = draw([settings for settings, _ in CASES for _ in range(N)])
    for (settings, allowed), drawn in zip(CASES, np.asarray(tokens).reshape(len(CASES), N)):
        assert set(drawn.tolist()) == allowed, settings


def test_neighbours_do_not_matter():
    """What a row draws is the same alone, beside greedy rows and beside rows with cuts."""
    alone = [int(draw([settings], seeds=np.array([5]))[0][0]) for settings, _ in CASES]
    together = draw([settings for settings, _ in CASES], seeds=np.full(len(CASES), 5))[0]
    assert np.asarray(together).tolist() == alone


def test_frequencies_follow_the_distribution():
    tokens, logprobs = draw([(1.0, 0, 1.0)] * 20_000)
    frequencies = np.bincount(np.asarray(tokens), minlength=4) / len(tokens)
    np.testing.assert_allclose(frequencies, np.exp(LOGITS), atol=0.015)  # 4 sigma
    np.testing.assert_allclose(logprobs, np.asarray(LOGITS)[np.asarray(tokens)], atol=1e-6)


@pytest.mark.parametrize("settings", [(0.0, 0, 1.0), (1.0, 2, 1.0)])
def test_equal_logits_go_to_the_lower_id(settings):
    tokens, _ = draw([settings] * 50, jnp.zeros(6))
    assert set(np.asarray(tokens).tolist()) == ({0} if settings[0] == 0 else {0, 1})


def test_greedy_without_asking():
    """The program for greedy sequences alone gives what the other one gives them."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(N, 4)), jnp.float32)
    values = (0, np.uint32), (0, np.float32), (0, np.int32), (1, np.float32)
    settings = Settings(*(jnp.full(N, value, dtype) for value, dtype in values))
    asked, alone = (sample(logits, jnp.zeros(N, jnp.int32), settings, greedy) for greedy in (False, True))
    np.testing.assert_array_equal(alone[0], np.asarray(logits).argmax(-1))
    for a, b in zip(asked, alone):
        np.testing.assert_array_equal(a, b)

"""Every objective against gradients worked out by hand on two tokens; credit and packing against plain numbers."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trillium_moe.config import ConfigError
from trillium_moe.rl import batch
from trillium_moe.rl.config import OBJECTIVES, EffortConfig, ObjectiveConfig, TaskConfig
from trillium_moe.rl.credit import advantages, kl_of, rewards, shaped, tau_of
from trillium_moe.rl.objectives import TERMS, WEIGHTING, Tokens, divergence, loss
from trillium_moe.rl.trajectory import Part, Trajectory

# Two sequences of one token each, then padding. Ratios rho = (1.5, 0.5): r = (ln 1.5, ln 0.5).
RHO = (1.5, 0.5)
LN = tuple(math.log(x) for x in RHO)


def tokens(advantage, same=False, old=(0.0, 0.0), rho=RHO, weight=1.0):
    """logp - old = ln rho; with `same` both tokens are of one sequence. A third entry is padding full of rubbish."""
    array = lambda *x: jnp.array([*x, 7.0], jnp.float32)
    old = array(*old)
    logp = array(*(o + math.log(p) for o, p in zip(np.asarray(old).tolist(), rho)))
    return Tokens(logp, old, array(0.0, 0.0), array(*advantage), jnp.array([1.0, 1.0, 0.0]), array(weight, weight),
                  jnp.array([0, 0 if same else 1, 2]), 3)


def grad(x: Tokens, **kw):
    c = ObjectiveConfig(**kw)
    out = jax.grad(lambda logp: loss(x._replace(logp=logp), c)[0])(x.logp)
    assert out[2] == 0  # padding
    return np.asarray(out[:2])


def test_the_registry_is_complete():
    assert set(TERMS) == set(WEIGHTING) == set(OBJECTIVES)


@pytest.mark.parametrize("advantage", [(1.0, 1.0), (-1.0, -1.0)])
def test_k25_masks_whatever_the_sign_and_ppo_does_not(advantage):
    x, tau = tokens(advantage), 0.1
    wide = grad(x, name="k25", alpha=-1.0, beta=1.0, tau=tau)
    # d/dlogp of -rho A + tau r^2
    np.testing.assert_allclose(wide, [-p * a + 2 * tau * r for p, a, r in zip(RHO, advantage, LN)], rtol=1e-5)
    # r = (0.405, -0.693): both outside [-0.5, 0.3]; only the squared log-ratio pulls
    narrow = grad(x, name="k25", alpha=-0.5, beta=0.3, tau=tau)
    np.testing.assert_allclose(narrow, [2 * tau * r for r in LN], rtol=1e-5)
    one = grad(x, name="k25", alpha=-0.5, beta=0.5, tau=0.0)
    np.testing.assert_allclose(one, [-RHO[0] * advantage[0], 0], rtol=1e-5)
    # PPO cuts 1.5 only where the advantage is positive, and 0.5 only where it is negative
    ppo = grad(x, name="grpo", clip=0.2)
    np.testing.assert_allclose(ppo, [0, -0.5] if advantage[0] > 0 else [1.5, 0], rtol=1e-5)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_clip_higher(name):
    x = tokens((1.0, 1.0))
    np.testing.assert_allclose(grad(x, name=name, clip=0.2, clip_high=0.6), [-1.5, -0.5], rtol=1e-5)
    np.testing.assert_allclose(grad(x, name=name, clip=0.2, clip_high=0.28), [0, -0.5], rtol=1e-5)


def test_gspo_has_the_ratio_of_the_sequence():
    s = math.exp((LN[0] + LN[1]) / 2)  # 0.866: one sequence of two tokens
    x = tokens((1.0, 1.0), same=True)
    np.testing.assert_allclose(grad(x, name="gspo", clip=0.2), [-s / 2, -s / 2], rtol=1e-5)
    np.testing.assert_allclose(grad(tokens((-1.0, -1.0), same=True), name="gspo", clip=0.05), [0, 0], atol=1e-7)
    assert float(loss(x, ObjectiveConfig(name="gspo"))[0]) == pytest.approx(-s)


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    np.testing.assert_allclose(grad(tokens((2.0, 2.0)), name="cispo", clip=0.2), [-1.2 * 2, -0.8 * 2], rtol=1e-5)


def test_k15_has_the_square_of_the_sequences_log_ratio():
    tau, total = 0.3, LN[0] + LN[1]
    want = [-2.0 + tau * total] * 2  # d/dlogp of -A sum logp + tau/2 (sum r)^2
    np.testing.assert_allclose(grad(tokens((2.0, 2.0), same=True), name="k15", tau=tau), want, rtol=1e-5)


def test_reinforce_and_truncated_importance_sampling():
    x = tokens((2.0, -3.0), old=(math.log(4.0), math.log(1.5)))
    np.testing.assert_allclose(grad(x, name="reinforce"), [-2, 3], rtol=1e-5)
    # old / sampler = (4, 1.5), cut at 2
    np.testing.assert_allclose(grad(x, name="reinforce", old="trainer", tis=2.0), [-2 * 2, 3 * 1.5], rtol=1e-5)


def test_stats_are_sums_over_sampled_tokens():
    _, stats = loss(tokens((1.0, 1.0)), ObjectiveConfig(name="k25", alpha=-0.5, beta=0.5))
    assert float(stats["tokens"]) == 2 and float(stats["cut"]) == 1
    assert float(stats["log_ratio"]) == pytest.approx(LN[0] - LN[1])
    assert float(stats["log_ratio_max"]) == pytest.approx(-LN[1])
    assert float(stats["squared"]) == pytest.approx(LN[0] ** 2 + LN[1] ** 2)


def test_divergence():
    p = jnp.log(jnp.array([0.5, 0.2]))
    assert float(divergence(p, p).max()) == 0 and float(divergence(p, p + 0.5).min()) > 0
    # the mean over the policy's own samples is the divergence itself
    policy, reference = np.array([0.7, 0.2, 0.1]), np.array([0.3, 0.3, 0.4])
    estimate = policy @ np.asarray(divergence(jnp.log(jnp.asarray(policy)), jnp.log(jnp.asarray(reference))))
    assert estimate == pytest.approx(policy @ np.log(policy / reference), rel=1e-5)


# --- credit

TURNS = [[-0.1, 1.0], [-0.1, -0.1, 0.0], [0.5]]


def test_outcome_credit_by_hand():
    mean = (0.9 - 0.2 + 0.5) / 3
    got = advantages(TURNS, ObjectiveConfig())
    for a, r in zip(got, TURNS):
        np.testing.assert_allclose(a, [sum(r) - mean] * len(r))
    loo = advantages(TURNS, ObjectiveConfig(baseline="leave_one_out"))
    np.testing.assert_allclose([a[0] for a in loo], [0.9 - 0.15, -0.2 - 0.7, 0.5 - 0.35])
    std = advantages(TURNS, ObjectiveConfig(std=True))
    np.testing.assert_allclose(np.std([a[0] for a in std]), 1, rtol=1e-4)


def test_turn_credit_by_hand():
    got = advantages(TURNS, ObjectiveConfig(credit="turn", baseline="turn", gamma=0.5))
    returns = [[-0.1 + 0.5 * 1.0, 1.0], [-0.1 + 0.5 * (-0.1), -0.1, 0.0], [0.5]]
    first = (0.4 - 0.15 + 0.5) / 3
    np.testing.assert_allclose(got[0], [0.4 - first, 1.0 - 0.45])  # second turn: mean of 1.0 and -0.1
    np.testing.assert_allclose(got[1], [-0.15 - first, -0.1 - 0.45, 0.0], atol=1e-12)
    plain = advantages(TURNS, ObjectiveConfig(credit="turn", gamma=0.5))
    np.testing.assert_allclose(plain[0], np.array(returns[0]) - 0.4, atol=1e-12)


def test_shaping_telescopes():
    """With gamma = 1 it takes the first potential from every return, which is the same for all samples of a task."""
    c = ObjectiveConfig(shaping=2.0)
    for r, potential in zip(TURNS, ([0.2, 0.7], [0.2, 0.1, 0.9], [0.2])):
        assert sum(shaped(r, potential, c)) == pytest.approx(sum(r) - 2 * 0.2)


def trajectory(rewards, success=1.0, sampled=6):
    part = Part()
    part.give([1, 2, 3], 0)
    part.sample(list(range(sampled)), [-1.0] * sampled, 0, 0)
    return Trajectory(3, 1, 0, 11, parts=[part], rewards=rewards, success=success, end="answer")


def test_rewards_as_training_sees_them():
    t = trajectory([-0.1, -0.1, 1.0])
    assert rewards(t, TaskConfig()) == [-0.1, -0.1, 1.0]
    assert rewards(t, TaskConfig(sparse=True)) == [0, 0, 1.0]
    assert rewards(t, TaskConfig(delay=1)) == [0, -0.1, pytest.approx(0.9)]
    assert rewards(t, TaskConfig(), budget=6.0) == [-0.1, -0.1, 1.0]  # not above: as it was
    assert rewards(t, TaskConfig(), budget=5.0) == [0, 0, -1.0]
    flips = []
    for group in range(400):
        got = rewards(dataclasses.replace(t, group=group), TaskConfig(noise=0.2))
        assert got == rewards(dataclasses.replace(t, group=group), TaskConfig(noise=0.2))
        assert got[-1] in (0.0, 1.0)
        flips.append(got[-1] == 0)
    assert 50 < sum(flips) < 110  # 80 are expected


def test_budgets_anneal():
    c = EffortConfig(tau=(0.5, 1.5), start=2.0, anneal=10)
    assert [tau_of(c, "low", ("low", "high"), u) for u in (0, 5, 10, 99)] == [2.0, 1.25, 0.5, 0.5]
    assert tau_of(EffortConfig(), "low", ("low",), 5) == 0
    assert [kl_of(ObjectiveConfig(kl=0.2, kl_anneal=4), u) for u in (0, 1, 4, 9)] == [0.2, pytest.approx(0.15), 0, 0]
    assert kl_of(ObjectiveConfig(kl=0.2), 99) == 0.2


def test_wrong_objectives_are_named():
    for kw, message in (({"name": "grpoo"}, "did you mean 'grpo'"), ({"tis": 2.0}, "objective.old='trainer'"),
                        ({"baseline": "turn"}, "objective.credit='turn'"), ({"alpha": 0.1}, "must be below 0")):
        with pytest.raises(ConfigError, match=message):
            ObjectiveConfig(**kw)


# --- batches


def test_sequences_say_at_t_what_is_true_of_the_next_token():
    part = Part()
    part.give([10, 11], 0)
    part.sample([20, 21], [-0.5, -0.25], 4, 0)
    part.give([12], 1)
    part.sample([22], [-1.0], 5, 1)
    part.give([13], 2)
    s = batch.sequence(part, np.array([0.3, -0.6]))
    assert s["tokens"].tolist() == [10, 11, 20, 21, 12, 22] and s["targets"].tolist() == [11, 20, 21, 12, 22, 13]
    assert s["mask"].tolist() == [0, 1, 1, 0, 1, 0]
    np.testing.assert_allclose(s["advantage"], [0, 0.3, 0.3, 0, -0.6, 0], rtol=1e-6)
    np.testing.assert_allclose(s["sampler"], [0, -0.5, -0.25, 0, -1.0, 0])


@pytest.mark.parametrize("name, first", [("k25", 1 / 6), ("grpo", 1 / 4), ("dr_grpo", 1 / 20), ("gspo", 1 / 2)])
def test_weights(name, first):
    sequences = [{"mask": np.array([0, 1, 1], np.float32)}, {"mask": np.array([1, 1, 1, 1, 0], np.float32)}]
    batch.weigh(sequences, name, longest=10)
    assert sequences[0]["weight"].tolist() == pytest.approx([0, first, first])


@pytest.mark.parametrize("align", [1, 8])
def test_every_token_is_packed_once(align):
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 30, 50)
    starts = np.cumsum([0, *sizes])
    sequences = [{"tokens": np.arange(a, a + n, dtype=np.int32), "mask": np.ones(n, np.float32)}
                 for a, n in zip(starts, sizes)]
    got = list(batch.micro_batches(sequences, row=32, rows=4, align=align))
    assert all(b["tokens"].shape == (4, 32) for b in got)
    real = np.concatenate([b["tokens"][b["segment_ids"] > 0] for b in got])
    assert sorted(real.tolist()) == list(range(int(starts[-1])))
    assert sum(b["mask"].sum() for b in got) == starts[-1]  # none on padding
    for b in got:
        for row, ids in zip(b["tokens"], b["segment_ids"]):
            for i in range(1, ids.max() + 1):
                own = row[ids == i]
                assert (np.diff(own) == 1).all() and int(own[0]) in starts
                assert np.argmax(ids == i) % align == 0

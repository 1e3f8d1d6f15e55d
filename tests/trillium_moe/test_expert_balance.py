"""The plan of exactly balanced expert parallelism: whatever the routing, a rank computes as many rows as it sends."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillium_moe.parallel.balance import replicate, share_out
from trillium_moe.parallel.transport import two_hop_room

ROWS = 24
SHAPES = [(1, 4), (2, 6), (4, 4), (8, 24)]  # ranks, experts


@functools.cache
def planner(R, E):
    def plan(expert_SA):
        count_SE = jax.vmap(lambda e: jnp.zeros(E, jnp.int32).at[e].add(1))(expert_SA)
        x, donor = share_out(count_SE.sum(0).reshape(R, -1).sum(1), ROWS)
        place, again = jax.vmap(lambda e, me: replicate(count_SE, e, me))(expert_SA, jnp.arange(R))
        return x, donor, place, again

    return jax.jit(plan)


@st.composite
def routings(draw, R, E):
    """[R, ROWS] experts: each rank draws from a few favourites of its own or of all, down to a single one."""
    shared = draw(st.lists(st.integers(0, E - 1), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    out = []
    for _ in range(R):
        own = draw(st.sampled_from(["shared", "any", "one"]))
        pool = {"shared": shared, "any": range(E), "one": [draw(st.integers(0, E - 1))]}[own]
        out.append(rng.choice(np.asarray(list(pool)), ROWS))
    return np.array(out, np.int32)


@pytest.mark.parametrize("R, E", SHAPES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_routing_has_a_plan(R, E, data):
    expert = data.draw(routings(R, E))
    n, ranks = E // R, np.arange(R)
    x, donor, place, again = map(np.asarray, planner(R, E)(expert))
    load = np.bincount(expert.reshape(-1), minlength=E).reshape(R, n).sum(1)
    assert (x >= 0).all() and (x.sum(0) == ROWS).all() and (x.sum(1) == load).all()
    assert (again == donor).all()
    # a rank computes its own experts' rows and its donor's, so E / R replicas suffice
    elsewhere = x.copy()
    elsewhere[ranks, ranks] = elsewhere[donor, ranks] = 0
    assert not elsewhere.any()

    computes, slot = place // (2 * n), place % (2 * n)
    assert (np.bincount(computes.reshape(-1), minlength=R) == ROWS).all()
    home = np.where(slot < n, computes, donor[computes])
    np.testing.assert_array_equal(home * n + slot % n, expert)  # a row meets its own expert or a replica of it

    # the two dense hops: rows dealt out in order of destination find room everywhere
    passes_on = np.zeros((R, R), int)
    for row in np.sort(place, axis=1) // (2 * n):
        np.add.at(passes_on, (np.arange(ROWS) % R, row), 1)
    assert passes_on.max() <= two_hop_room(ROWS, R)


def test_equal_loads_need_no_replica():
    x, donor = share_out(jnp.full(4, 10), 10)
    np.testing.assert_array_equal(donor, range(4))
    np.testing.assert_array_equal(x, 10 * np.eye(4))


def test_chain():
    """The last rank is filled from the first, which has then given too much and is filled from the next, and so on."""
    x, donor = share_out(jnp.array([11, 11, 11, 7]), 10)
    np.testing.assert_array_equal(donor, [1, 2, 2, 0])
    np.testing.assert_array_equal(x, [[8, 0, 0, 3], [2, 9, 0, 0], [0, 1, 10, 0], [0, 0, 0, 7]])

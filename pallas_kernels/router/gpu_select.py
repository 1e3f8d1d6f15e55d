"""The largest few of a row that one warp holds in registers, as a warp program (see `gpu_lanes`).

Lane l holds n = ceil(E / 32) keys, those of experts l, l + 32, ... Keys are unsigned integers in the order of the
floats, so equal keys are equal scores and ties are settled by the expert's index.

    few   The (count)-th largest of the 32 lanes' best keys bounds the result from below. On random scores 20 to 30 keys
          reach it; they move to one lane each, and 15 exchanges sort them.
    many  Where more than 32 reach it (ties, or experts in order of score): `count` times the largest key that is left.
"""

from __future__ import annotations

NONE = 0xFFFFFFFF  # index of no expert
SIGN = 0x80000000


def to_key(W, x):
    """Unsigned integers in the order of the floats; 0 is below all of them, -inf included."""
    bits = W.bits(x)
    return bits ^ W.select(bits >= SIGN, W.u32(0xFFFFFFFF), SIGN)


def from_key(W, key):
    return W.floating(key ^ W.select(key >= SIGN, W.u32(SIGN), 0xFFFFFFFF))


def top(W, keys, count: int):
    """(key, expert) of rank r in lane r, for r < count <= 32; the rest is unspecified. At least `count` keys exist.

    Args:
      keys: keys of experts lane + 32 j; 0 where there is no such expert.
    """
    experts = [W.lane + 32 * j for j in range(len(keys))]
    bound = W.of_lane(_sorted(W, _largest(W, keys)), count - 1)
    mine = W.u32(0)
    for key in keys:
        mine = mine + W.select(key >= bound, W.u32(1), 0)
    upto = mine
    for by in (1, 2, 4, 8, 16):
        upto = upto + W.select(W.lane >= by, W.shuffle_up(upto, by), 0)
    total = W.of_lane(upto, 31)

    def few():
        place = upto - mine
        for key, expert in zip(keys, experts):
            reached = key >= bound
            W.put(place, key, expert, reached)
            place = place + W.select(reached, W.u32(1), 0)
        key, expert = W.get()
        there = W.lane < total
        return _sorted_pairs(W, W.select(there, key, 0), W.select(there, expert, NONE))

    def many():
        def take(rank, carry):
            key, expert, *left = carry
            best = W.largest(_largest(W, left))
            first = W.u32(NONE)
            for x, i in zip(left, experts):
                first = W.min(first, W.select(W.equal(x, best), i, NONE))
            first = W.smallest(first)
            left = [W.select(W.equal(i, first), W.u32(0), x) for x, i in zip(left, experts)]
            here = W.equal(W.lane, rank)
            return [W.select(here, best, key), W.select(here, first, expert), *left]

        return W.loop(count, take, [W.u32(0), W.u32(NONE), *keys])[:2]

    return W.cond(total <= 32, few, many)


def _largest(W, keys):
    best = keys[0]
    for key in keys[1:]:
        best = W.max(best, key)
    return best


def _exchanges(W):
    """Bitonic sort of 32 lanes in falling order: (distance, whether this lane keeps the larger of the two)."""
    for size in (2, 4, 8, 16, 32):
        distance = size // 2
        while distance:
            falls = W.equal(W.lane & size, 0)  # of these `size` neighbours; true for all 32
            lower = W.equal(W.lane & distance, 0)
            yield distance, falls, lower
            distance //= 2


def _sorted(W, x):
    for distance, falls, lower in _exchanges(W):
        other = W.shuffle_xor(x, distance)
        x = W.select(falls ^ lower, W.min(x, other), W.max(x, other))
    return x


def _sorted_pairs(W, key, expert):
    """By falling key, then by rising expert."""
    for distance, falls, lower in _exchanges(W):
        other_key, other = W.shuffle_xor(key, distance), W.shuffle_xor(expert, distance)
        before = (key > other_key) | (W.equal(key, other_key) & (expert < other))
        keep = before ^ falls ^ lower  # the lane keeps the first of the two where falls == lower
        key, expert = W.select(keep, key, other_key), W.select(keep, expert, other)
    return key, expert

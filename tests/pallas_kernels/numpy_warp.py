"""A warp as 32-element numpy arrays: `gpu_lanes.Warp` for algorithms that run on no GPU."""

import numpy as np


class NumpyWarp:
    """Registers are uint32, float32 or bool arrays of 32 lanes. Counts which branches ran."""

    def __init__(self):
        self.lane = np.arange(32, dtype=np.uint32)
        self.branches = {True: 0, False: 0}
        self._scratch = np.full((2, 32), 0xDEADBEEF, np.uint32)

    def u32(self, x):
        return np.full(32, x, np.uint32)

    def select(self, where, x, y):
        return np.where(where, x, np.asarray(y, x.dtype))

    def equal(self, x, y):
        return x == y

    max, min = staticmethod(np.maximum), staticmethod(np.minimum)

    def bits(self, x):
        return x.view(np.uint32)

    def floating(self, x):
        return np.ascontiguousarray(x).view(np.float32)

    def shuffle_xor(self, x, mask):
        return x[self.lane ^ mask]

    def shuffle_up(self, x, by):
        return np.where(self.lane >= by, np.roll(x, by), 0xABADCAFE).astype(x.dtype)

    def of_lane(self, x, lane):
        return np.full(32, x[lane], x.dtype)

    def largest(self, x):
        return np.full(32, x.max(), x.dtype)

    def smallest(self, x):
        return np.full(32, x.min(), x.dtype)

    def put(self, place, key, tag, where):
        assert (place[where] < 32).all()
        self._scratch[0, place[where]], self._scratch[1, place[where]] = key[where], tag[where]

    def get(self):
        return self._scratch.copy()

    def cond(self, uniform, yes, no):
        assert uniform.all() or not uniform.any()
        self.branches[bool(uniform[0])] += 1
        return yes() if uniform[0] else no()

    def loop(self, n, body, carry):
        for i in range(n):
            carry = body(np.uint32(i), carry)
        return carry

"""Programs that share a card: they compile side by side and use it one after the other."""

import contextlib
import fcntl
import os
import time


@contextlib.contextmanager
def turn(path: str):
    """Holds the lock of a file, if one is named; waits for it."""
    if not path:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wait_for(path: str):
    """Returns when the file exists, if one is named: until then the device belongs to others."""
    while path and not os.path.exists(path):
        time.sleep(0.5)

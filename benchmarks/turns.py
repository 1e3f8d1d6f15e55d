"""Programs that share a card: they compile side by side and use it one after the other."""

import contextlib
import fcntl


@contextlib.contextmanager
def turn(path: str):
    """Holds the lock of a file, if one is named; waits for it."""
    if not path:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

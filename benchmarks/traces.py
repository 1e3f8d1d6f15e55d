"""Where the time of a program on a GPU goes: its kernels by time, from the profiler's trace."""

import collections
import sys
import tempfile
from pathlib import Path


def kernel_times(once, steps: int = 1, top: int = 45) -> None:
    """Prints the kernels of `once()`, which runs `steps` steps and waits for them, by their time a step.

    The first line also says for how long no kernel ran between the first and the last: the host was late.
    """
    import jax

    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            once()
        (path,) = Path(directory).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    total, count, spans = collections.Counter(), collections.Counter(), []
    for plane in data.planes:
        if "/device:GPU" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" not in line.name:
                continue
            for event in line.events:
                total[event.name] += event.duration_ns
                count[event.name] += 1
                spans.append((event.start_ns, event.start_ns + event.duration_ns))
    busy, end = 0, 0
    for start, stop in sorted(spans):
        busy += max(0, stop - max(start, end))
        end = max(end, stop)
    idle = (end - min(spans)[0] - busy) if spans else 0
    us = lambda ns: ns / steps / 1e3
    print(f"kernels: {sum(count.values()) / steps:.0f} a step, {us(busy):.0f} us busy, {us(idle):.0f} us idle")
    for name, ns in total.most_common(top):
        print(f"{us(ns):9.1f} us {count[name] / steps:7.1f}x  {name[:100]}")
    sys.stdout.flush()

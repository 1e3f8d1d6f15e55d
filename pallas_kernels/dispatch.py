"""Which implementation of an op runs: asked for by name, or the best one that the platform and the call allow.

An op keeps a plain dict from name to callable and passes it here with the caller's arguments. An implementation that
cannot serve a call (shape, dtype, device) raises NotImplementedError before it computes anything.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax

_log = logging.getLogger(__name__)

PREFERENCE = {
    "gpu": ("pallas_gpu", "xla"),
    "tpu": ("pallas_tpu", "xla"),
    "cpu": ("xla",),
}


def target() -> tuple[str, str]:
    """Platform (cpu, gpu, tpu) and device kind that the program being traced is for.

    Those of the mesh in context, which ahead-of-time compilation sets for chips that are not there, else the default
    backend's.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and getattr(device, "platform", None):
        return {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform), device.device_kind
    return jax.default_backend(), jax.devices()[0].device_kind


def is_hopper() -> bool:
    """Whether the program being traced is for a GPU of compute capability 9.0."""
    platform, kind = target()
    return platform == "gpu" and any(name in kind for name in ("H100", "H200", "H800", "H20"))  # GH200 has H200 in it


@functools.cache  # the cache is the memory of what was already said: one line per op and choice
def _log_choice(op: str, name: str, platform: str, passed_over: str) -> None:
    _log.info("%s: implementation %r on %s%s", op, name, platform, passed_over)


def dispatch(
    op: str, implementations: Mapping[str, Callable[..., Any]], implementation: str | None, /, *args, **kwargs
) -> Any:
    """Calls one of `implementations` with the remaining arguments and returns its result.

    Args:
      op: name of the op, for messages.
      implementations: what this op offers, by name ("reference", "xla", "pallas_tpu", "pallas_gpu", "triton").
      implementation: a name, which never falls back; or None, which tries the offered ones in the order that
        `PREFERENCE` gives for the platform of `target` and takes the first that does not raise NotImplementedError.

    Raises:
      ValueError: the op offers no implementation of that name.
      NotImplementedError: the named implementation refuses the call, or (None) every candidate does.
    """
    if implementation is not None:
        if implementation not in implementations:
            offered = ", ".join(sorted(implementations))
            raise ValueError(
                f"{op}: implementation={implementation!r} does not exist; use None or one of: {offered}"
            )
        return implementations[implementation](*args, **kwargs)

    platform = target()[0]
    refusals = []
    for name in PREFERENCE.get(platform, ("xla",)):
        if name not in implementations:
            continue
        try:
            result = implementations[name](*args, **kwargs)
        except NotImplementedError as refusal:
            refusals.append(f"{name}: {refusal}")
            continue
        passed_over = f" ({'; '.join(refusals)})" if refusals else ""
        _log_choice(op, name, platform, passed_over)
        return result
    raise NotImplementedError(
        f"{op}: no implementation serves this call on {platform} ({'; '.join(refusals)})"
    )

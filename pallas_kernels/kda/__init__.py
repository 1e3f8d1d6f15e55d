"""Kimi Delta Attention: a linear-attention state with one decay per key channel and a delta-rule update."""

_HOMES = {"kda": "api", "kda_gated": "gated", "log_decay": "gated", "unit": "gated"}
__all__ = list(_HOMES)


def __getattr__(name: str):
    # Imported on use: configs ask `numerics` for its bounds, and may not import JAX (`--help` does not wait for it).
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

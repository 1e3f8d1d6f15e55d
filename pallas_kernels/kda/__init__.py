"""Kimi Delta Attention: a linear-attention state with one decay per key channel and a delta-rule update."""

__all__ = ["kda", "kda_gated"]


def __getattr__(name: str):
    # Imported on use: configs ask `numerics` for its bounds, and may not import JAX (`--help` does not wait for it).
    if name in __all__:
        from pallas_kernels.kda import api, gated

        return getattr({"kda": api, "kda_gated": gated}[name], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

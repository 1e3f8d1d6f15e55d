"""Compile time of the train step against the number of layers: python -m benchmarks.compile_time [LAYERS ...]

The layer stack is one compiled body, so 12 and 48 layers must take about the same time.
"""

from __future__ import annotations

import dataclasses
import sys
import time

import jax

from configs import scales
from trillium_moe.config import Config
from trillium_moe.train.state import init_state
from trillium_moe.train.step import make_train_step


def compile_seconds(n_layers: int) -> tuple[float, float]:
    """Seconds to lower and to compile the `tiny` train step with n_layers."""
    config = Config(model=dataclasses.replace(scales.tiny(), n_layers=n_layers))
    state = jax.eval_shape(lambda: init_state(config))
    B, T = config.data.batch_size, config.data.seq_len
    row = lambda dtype: jax.ShapeDtypeStruct((B, T), dtype)
    batch = {name: row("int32") for name in ("tokens", "targets", "segment_ids")} | {"weights": row("float32")}
    start = time.perf_counter()
    lowered = make_train_step(config).lower(state, batch)
    middle = time.perf_counter()
    lowered.compile()
    return middle - start, time.perf_counter() - middle


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    for layers in [int(a) for a in sys.argv[1:]] or [12, 48]:
        lower, compile_ = compile_seconds(layers)
        print(f"{layers:3d} layers: lower {lower:5.1f} s, compile {compile_:5.1f} s", flush=True)

"""Checks every jaxtyping signature of the project at run time, and shares compiled programs between tests."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# the same small models are compiled by many tests, some of them in processes of their own
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache" / "jax"))
# compiling takes most of the suite's time, and twice as long at the default optimisation level
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# the interpreter of GPU kernels waits inside callbacks for other warpgroups: for ever, if there are fewer threads
os.environ.setdefault("PJRT_NPROC", str(max(8, os.cpu_count() or 1)))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

from jaxtyping import install_import_hook

install_import_hook(["trillium_moe", "pallas_kernels"], "beartype.beartype")

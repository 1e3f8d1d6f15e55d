"""The environments. Importing this package registers them."""

from trillium_moe.rl.envs import calculator, fetching, games, memory, pages, programs  # noqa: F401

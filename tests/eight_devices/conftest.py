"""These tests need 8 devices: tests/trillium_moe/test_eight_devices.py runs them in a process that has them."""

import os

FLAG = "--xla_force_host_platform_device_count=8"
collect_ignore_glob = [] if FLAG in os.environ.get("XLA_FLAGS", "") else ["test_*.py"]

"""Runs tests/eight_devices in a process with 8 simulated CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(marker, *files):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    paths = [f"tests/eight_devices/{file}" for file in files]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", marker, "-p", "no:cacheprovider", *paths],
                          cwd=ROOT, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_on_eight_devices():
    run("not slow", "test_step.py", "test_muon.py", "test_context_parallel.py")


@pytest.mark.slow
def test_all_of_them_on_eight_devices():
    run("slow or not slow", "")

"""Repeats a run from its directory: --config=configs/from_run.py:runs/tiny"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # config_flags loads this file from anywhere

from trillium_moe.config_files import load_config, to_config_dict


def get_config(workdir: str):
    """The resolved config that the run wrote."""
    return to_config_dict(load_config(workdir))

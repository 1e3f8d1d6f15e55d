"""Configs as what the command line overrides (`ml_collections.ConfigDict`) and as the `config.json` of a run."""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import Any

import ml_collections
from etils import epath

from trillium_moe.config import Config, ConfigError, check


def to_config_dict(config: Any) -> ml_collections.ConfigDict:
    """A dataclass, nested ones included, as a locked ConfigDict."""
    def convert(value):
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            return ml_collections.ConfigDict({f.name: convert(getattr(value, f.name)) for f in fields})
        return value
    return convert(config).lock()


def from_config_dict(values: Any, cls: type = Config, path: str = "") -> Any:
    """Builds `cls` from a (nested) mapping. Missing keys take defaults.

    Raises:
      ConfigError: for an unknown key (with the nearest known one), a value of the wrong type, or a failed check.
    """
    values = dict(values)
    known = {f.name: f for f in dataclasses.fields(cls)}
    out = {}
    for key, value in values.items():
        name = f"{path}{key}"
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {path}{near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise ConfigError(f"config {name}={value!r}: unknown key; {hint}")
        factory = known[key].default_factory
        default = factory() if factory is not dataclasses.MISSING else known[key].default
        if dataclasses.is_dataclass(default):
            out[key] = from_config_dict(value, type(default), f"{name}.")
        else:
            out[key] = _cast(name, value, default)
    return cls(**out)


def _cast(name: str, value: Any, default: Any) -> Any:
    """`value` as the type of `default`; only lossless changes of type are made."""
    if isinstance(default, tuple) and isinstance(value, (list, tuple)):
        return tuple(value)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    same = isinstance(value, type(default)) and isinstance(value, bool) == isinstance(default, bool)
    check(same, name, value, f"must be of type {type(default).__name__}, like the default {default!r}")
    return value


def save_config(config: Any, workdir: epath.PathLike) -> None:
    """Writes `config.json` into `workdir`."""
    workdir = epath.Path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")


def load_config(workdir: epath.PathLike, cls: type = Config) -> Any:
    """Reads the config of a run, of the class that it was. Raises ConfigError if the directory holds none."""
    path = epath.Path(workdir) / "config.json"
    check(path.exists(), "workdir", str(workdir), "holds no config.json; name the directory of a run")
    return from_config_dict(json.loads(path.read_text()), cls)

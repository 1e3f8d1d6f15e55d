"""A sweep: one config, the arms that change it, and the seeds every arm runs with.

A file of configs/ablations has a `get_sweep(options)` that returns a `Sweep`. Arms are built from `over` (the values of
one key) and `named` (one set of overrides), put together by

    product(a, b)   every arm of a with every arm of b
    zipped(a, b)    the i-th of a with the i-th of b
    chain(a, b)     those of a, then those of b

The arms of a sweep share everything that they do not name, the learning rate included, unless it is `tuned`: then each
arm is run with every value, and the best one stands for it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etils import epath

from trillium_moe.config import Config, ConfigError, check, check_choice
from trillium_moe.config_files import from_config_dict

ROLES = ("arm", "tuned", "rung")


@dataclass(frozen=True)
class Part:
    """Overrides with a name. `role`: arm, a choice to compare; tuned, one to make for every arm; rung, a model size."""

    label: str
    overrides: tuple[tuple[str, Any], ...]
    role: str = "arm"


@dataclass(frozen=True)
class Arm:
    """One point of a sweep. No parts: the base config as it is."""

    parts: tuple[Part, ...] = ()

    @property
    def overrides(self) -> dict[str, Any]:
        return {key: value for part in self.parts for key, value in part.overrides}

    @property
    def name(self) -> str:
        return _label(self.parts)

    @property
    def family(self) -> str:
        """Name without what is tuned and without the rung: what the arm stands for in the table."""
        return _label(part for part in self.parts if part.role == "arm")

    @property
    def rung(self) -> str:
        return ", ".join(part.label for part in self.parts if part.role == "rung")


def _label(parts: Iterable[Part]) -> str:
    return ", ".join(part.label for part in parts if part.label) or "baseline"


def named(label: str, role: str = "arm", /, **overrides: Any) -> tuple[Arm, ...]:
    """One arm. Keys are dotted config keys: named("swiglu", **{"model.activation": "swiglu"})."""
    check_choice("role", role, ROLES)
    return (Arm((Part(label, tuple(overrides.items()), role),)),)


def over(key: str, values: Iterable[Any], role: str = "arm") -> tuple[Arm, ...]:
    """One arm for each value of a key, named `key=value` by the key's last word."""
    return tuple(itertools.chain(*(named(f"{key.rsplit('.', 1)[-1]}={_short(v)}", role, **{key: v}) for v in values)))


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace(" ", "")


def chain(*arms: tuple[Arm, ...]) -> tuple[Arm, ...]:
    return tuple(itertools.chain(*arms))


def product(*axes: tuple[Arm, ...]) -> tuple[Arm, ...]:
    return tuple(_joined(arms) for arms in itertools.product(*axes))


def zipped(*axes: tuple[Arm, ...]) -> tuple[Arm, ...]:
    """Raises ValueError if the axes differ in length."""
    return tuple(_joined(arms) for arms in zip(*axes, strict=True))


def _joined(arms: Iterable[Arm]) -> Arm:
    return Arm(tuple(part for arm in arms for part in arm.parts))


@dataclass(frozen=True)
class Run:
    """One training run of a sweep."""

    index: int  # in the order of the sweep
    arm: Arm
    seed: int
    config: Config

    @property
    def folder(self) -> str:
        """Below the sweep's directory."""
        return f"runs/{_slug(self.arm.name)}/seed{self.seed}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.=+-]+", "_", name.lower()).strip("_")


@dataclass(frozen=True)
class Sweep:
    """What is asked, and the runs that answer it.

    Attributes:
      question: one sentence, the heading of the report.
      base: the config that arms change.
      arms: what is run; their names must differ.
      baseline: name (`family`) of the arm that the others are compared with.
      seeds: of every arm, the baseline included.
      measures: extra columns, by name, from `trillium_moe.sweep.measures`.
      probes: what is measured of the last model of every run, by name, from `trillium_moe.sweep.probe`.
      published: what is known from elsewhere, with its source; printed below the table, never used.
    """

    question: str
    base: Config
    arms: tuple[Arm, ...]
    baseline: str
    seeds: tuple[int, ...] = (0, 1, 2)
    measures: tuple[str, ...] = ()
    probes: tuple[str, ...] = ()
    published: str = ""
    runs: tuple[Run, ...] = field(init=False, repr=False)

    def __post_init__(self):
        families = tuple(dict.fromkeys(arm.family for arm in self.arms))
        check_choice("sweep.baseline", self.baseline, families)
        check(len(self.seeds) > 0, "sweep.seeds", self.seeds, "must name at least one seed")
        check(len(set(self.seeds)) == len(self.seeds), "sweep.seeds", self.seeds, "must differ from one another")
        runs = [Run(i, arm, seed, override(self.base, {**arm.overrides, "seed": seed}))
                for i, (arm, seed) in enumerate(itertools.product(self.arms, self.seeds))]
        folders = [run.folder for run in runs]
        twice = sorted({run.arm.name for run in runs if folders.count(run.folder) > 1})
        check(not twice, "sweep.arms", twice, "several arms have one name; give them labels with `named`")
        object.__setattr__(self, "runs", tuple(runs))

    @property
    def groups(self) -> tuple[tuple[Run, ...], ...]:
        """Runs by arm: those of one group differ in the seed alone, so one process compiles once for all of them."""
        n = len(self.seeds)
        return tuple(self.runs[i : i + n] for i in range(0, len(self.runs), n))


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """`config` with dotted keys replaced, checked as a whole.

    Raises:
      ConfigError: for an unknown key, or values that do not fit together.
    """
    tree = dataclasses.asdict(config)
    for key, value in overrides.items():
        *path, last = key.split(".")
        node = tree
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        check(isinstance(node, dict), key, value, "no such key; see trillium_moe/config.py")
        check(not isinstance(node.get(last), dict), key, value, "is a group of keys; name one of them")
        node[last] = value
    return from_config_dict(tree)


def load_sweep(spec: str) -> Sweep:
    """The sweep of `file.py` or `file.py:options`.

    Raises:
      ConfigError: if there is no such file, or none of its functions is `get_sweep`.
    """
    name, _, options = spec.partition(":")
    path = Path(name)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.py"))) if path.parent.is_dir() else ""
        hint = f"there: {known}" if known else "sweeps are in configs/ablations"
        raise ConfigError(f"sweep {name!r}: no such file; {hint}")
    module_spec = importlib.util.spec_from_file_location(f"sweep_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    if not hasattr(module, "get_sweep"):
        raise ConfigError(f"sweep {name!r}: has no get_sweep(options); it is not a sweep")
    return module.get_sweep(options)


def check_same_sweep(spec: str, workdir: epath.PathLike) -> None:
    """Remembers in `workdir` which sweep it holds. Raises ConfigError if that is one of another file.

    Other options of the same file may add arms and seeds: each run is held to its own config.
    """
    path = epath.Path(workdir) / "sweep.txt"
    file = lambda text: Path(text.partition(":")[0]).name
    there = path.read_text().strip() if path.exists() else ""
    check(file(there) in ("", file(spec)), "sweep", spec,
          f"workdir={str(workdir)!r} holds {there}; name a new workdir")
    if there != spec:  # workers that start together find it written, and must not see it half written
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.parent / f"sweep.txt.{os.getpid()}"
        part.write_text(spec + "\n")
        part.replace(path)

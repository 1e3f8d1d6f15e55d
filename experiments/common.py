"""What the command lines share: flags, one-line errors, one JSON object.

A command is a docstring, a function that defines its flags and a function from parsed flags to a dict. Exit codes:
0 done (or stopped by a signal and saved), 2 for anything the caller can mend on the command line, 1 for a run that went
wrong. Errors are one line on stderr that starts with "error:".
"""

from __future__ import annotations

import difflib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from absl import flags, logging
from ml_collections import config_flags

from trillium_moe.config import Config, ConfigError
from trillium_moe.config_files import from_config_dict

Define = Callable[[flags.FlagValues], None]
Run = Callable[[flags.FlagValues], dict[str, Any]]

CONFIG = "configs/pretrain.py"
CONFIG_HELP = """
Config overrides: every field of trillium_moe/config.py, such as --config.train.steps=200 or
--config.model.moe.balancing=sign. The file's own options follow a colon: configs/pretrain.py:scale=tiny,stage=8k."""


class UsageError(Exception):
    """A command line that cannot be run. The message names the flag and the mend."""


def command(
    doc: str | None, define: Define, run: Run, argv: Sequence[str] | None = None, *, config: str = CONFIG,
    cls: type = Config,
) -> int:
    """Parses flags, runs, prints the result. Returns the exit code.

    Args:
      argv: arguments without the program's name; None for the process's own.
      config: the experiment file that --config names by default.
      cls: dataclass whose fields a config has.
    """
    values = flags.FlagValues()
    flags.DEFINE_bool("json", False, "print one JSON object on the last line of stdout", flag_values=values)
    define(values)
    argv = list(sys.argv[1:] if argv is None else argv)
    if {"--help", "-h", "-help"} & set(argv):
        print(_help(doc, values, config))
        return 0
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING)
    try:
        _parse(values, argv, config, cls)
        result = run(values)
    except (UsageError, ConfigError) as error:
        return _fail(error, 2)
    except Exception as error:
        # imported late: --help and wrong flags must not wait for jax
        from trillium_moe.parallel.runtime import DistributedError, leave
        from trillium_moe.train.aot import HBMOverflow
        from trillium_moe.train.checkpoint import CheckpointError, NonFiniteError
        from trillium_moe.train.ladder import GateError

        if isinstance(error, CheckpointError):
            return leave(_fail(error, 2))
        if isinstance(error, (NonFiniteError, DistributedError, HBMOverflow, GateError)):
            return leave(_fail(error, 1))
        traceback.print_exc()
        sys.stderr.flush()
        return leave(1)
    if values.json:
        print(json.dumps(result))
    return 0


def define_config(values: flags.FlagValues) -> None:
    # no default here: config_flags would apply the command line's overrides to it before they are checked
    config_flags.DEFINE_config_file("config", None, "experiment file, with options after a colon (default: the "
                                    "command's own)", flag_values=values)


def define_workdir(values: flags.FlagValues, help: str) -> None:
    flags.DEFINE_string("workdir", None, help, flag_values=values)


def define_step(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("step", None, "step of the checkpoint; by default the newest", lower_bound=0,
                         flag_values=values)


def define_distributed(values: flags.FlagValues) -> None:
    flags.DEFINE_string("coordinator", "", "host:port of process 0; not needed on a TPU pod or under SLURM",
                        flag_values=values)
    flags.DEFINE_integer("num_processes", 0, "processes of the run, with --coordinator", flag_values=values)
    flags.DEFINE_integer("process_id", -1, "which of them this is, with --coordinator", flag_values=values)
    flags.DEFINE_integer("init_timeout", 300, "seconds to wait for the other processes", lower_bound=1,
                         flag_values=values)
    flags.DEFINE_integer("heartbeat_timeout", 100, "seconds after which a silent process counts as dead, which ends "
                         "all of them", lower_bound=1, flag_values=values)


def join_processes(values: flags.FlagValues) -> None:
    """Starts `jax.distributed` where the flags or the environment ask for it."""
    from trillium_moe.parallel.runtime import initialize

    initialize(values.coordinator, values.num_processes, values.process_id, timeout=values.init_timeout,
               heartbeat_timeout=values.heartbeat_timeout)


def config_of(values: flags.FlagValues) -> Config:
    return from_config_dict(values.config)


def workdir_of(values: flags.FlagValues, *, exists: bool) -> str:
    """The --workdir. Raises UsageError if it is not given, or missing where it must exist."""
    if not values.workdir:
        raise UsageError("flag --workdir is missing; name the directory of the run, such as --workdir=/tmp/run")
    if exists and not Path(values.workdir).expanduser().is_dir() and "://" not in values.workdir:
        raise UsageError(f"flag --workdir={values.workdir}: no such directory; name one that experiments.train wrote")
    return str(Path(values.workdir).expanduser()) if "://" not in values.workdir else values.workdir


def _parse(values: flags.FlagValues, argv: list[str], config: str, cls: type) -> None:
    """Parses into `values`. Raises UsageError or ConfigError."""
    has_config = "config" in values
    if has_config:
        argv = _overrides(argv, cls)
        given = any(_value_of(item, "", "config") is not None for item in argv)
        argv = argv if given else [f"--config={config}", *argv]
        _check_file(argv)
    own, sys.argv = sys.argv, [sys.argv[0], *argv]  # config_flags looks for overrides there
    try:
        rest = values(sys.argv)[1:]
    except flags.Error as error:
        raise UsageError(_last_line(error)) from error
    finally:
        sys.argv = own
    if rest:
        raise UsageError(f"argument {rest[0]!r} is not a flag; flags are written --name=value")


def _overrides(argv: list[str], cls: type) -> list[str]:
    """Checks every --config.key=value against the config's fields. Where one is given twice the last counts."""
    known, out, at = dict(_fields(cls())), [], {}
    items = iter(argv)
    for item in items:
        if item.startswith(("--config.", "-config.")):
            if "=" not in item:
                item = f"{item}={next(items, '')}"
            key, _, value = item.lstrip("-").removeprefix("config.").partition("=")
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean --config.{near[0]}?" if near else "see trillium_moe/config.py for the keys"
                raise UsageError(f"config {key}={value!r}: unknown key; {hint}")
            _check_type(key, value, known[key])
            if key in at:
                out[at[key]] = ""
            at[key] = len(out)
        out.append(item)
    return [item for item in out if item]


def _fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and defaults of all fields, without the groups themselves."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _fields(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def _check_type(key: str, value: str, default: Any) -> None:
    """Raises UsageError unless the text is a value of the default's type."""
    if type(default) in (int, float):
        try:
            type(default)(value)
        except ValueError:
            kind = "a whole number" if isinstance(default, int) else "a number"
            raise UsageError(f"config {key}={value!r}: must be {kind}, like the default {default!r}") from None
    elif isinstance(default, bool) and value.lower() not in ("true", "false", "1", "0"):
        raise UsageError(f"config {key}={value!r}: must be true or false")


def _check_file(argv: list[str]) -> None:
    """Raises UsageError if the --config file does not exist."""
    named = [value for a, b in zip(argv, [*argv[1:], ""]) if (value := _value_of(a, b, "config")) is not None]
    path = Path(named[-1].split(":")[0])
    if not path.is_file():
        siblings = [str(p) for p in sorted(path.parent.glob("*.py"))] if path.parent.is_dir() else []
        near = difflib.get_close_matches(str(path), siblings, n=1)
        hint = f"did you mean {near[0]}?" if near else "name a file such as configs/pretrain.py"
        raise UsageError(f"flag --config={path}: no such file; {hint}")


def _value_of(item: str, following: str, name: str) -> str | None:
    if item in (f"--{name}", f"-{name}"):
        return following
    return next((item[len(p):] for p in (f"--{name}=", f"-{name}=") if item.startswith(p)), None)


def _last_line(error: Exception) -> str:
    """The message of an error that may carry a whole traceback of the config file."""
    line = [line for line in str(error).splitlines() if line.strip()][-1].strip()
    kind, colon, rest = line.partition(": ")
    return rest if colon and kind.endswith(("Error", "Exception")) and " " not in kind else line


def _fail(error: Exception, code: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return code


def _help(doc: str | None, values: flags.FlagValues, config: str) -> str:
    lines = [(doc or "").strip(), "", "Flags:"]
    for name in sorted(values):
        flag = values[name]
        default = "" if flag.default is None else f" (default: {flag.default_unparsed})"
        lines.append(f"  --{'[no]' if flag.boolean else ''}{name}: {flag.help}{default}")
    return "\n".join(lines) + (f"\n{CONFIG_HELP}" if "config" in values and config == CONFIG else "")

#!/usr/bin/env bash
# Prints the path of a CPython 3.12, 3.13 or 3.14: $PYTHON if set, else from PATH, pyenv or uv's own installs.
# Every candidate is run before it is believed: pyenv's shims exist for versions that are not selected.
set -euo pipefail

PROBE='
import ensurepip, sys, sysconfig, venv
if sys.implementation.name != "cpython" or not (3, 12) <= sys.version_info < (3, 15) or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
print(sys.executable)
'

try() {
    local found
    if found=$("$1" -I -c "$PROBE" 2>/dev/null </dev/null) && [ -n "$found" ]; then
        printf '%s\n' "$found"
        exit 0
    fi
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON"
    echo "PYTHON=$PYTHON is not a working CPython 3.12, 3.13 or 3.14 with venv and pip: name another." >&2
    exit 1
fi

versions="3.12 3.13 3.14"
for version in $versions; do
    try "python$version"
done
try python3
try python
for version in $versions; do
    for root in "${PYENV_ROOT:-$HOME/.pyenv}/versions" "$HOME/.pyenv/versions" "${XDG_DATA_HOME:-$HOME/.local/share}/uv/python"; do
        for candidate in "$root"/*"$version"*/bin/"python$version"; do
            if [ -x "$candidate" ]; then try "$candidate"; fi
        done
    done
done

echo "No CPython 3.12, 3.13 or 3.14 with venv and pip was found on PATH or under pyenv: install one (pyenv install 3.12) or name one (make setup PYTHON=/path/to/python)." >&2
exit 1

#!/usr/bin/env bash
# Makes the environment $VENV (.venv) from requirements.lock and the locks of the named extras.
#
#   tools/setup_env.sh [EXTRA ...]      with EXTRA one of requirements/*.lock
#
# $VENV/.installed holds a copy of each lock that is installed in full, so a second run only compares files.
# $VENV/.incomplete marks an environment under construction: an interrupted one is made again.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
installed=$venv/.installed

fail() {
    printf '%s\n' "$*" >&2
    exit 1
}

is_ready() {
    [ ! -e "$venv/.incomplete" ] && cmp -s requirements.lock "$installed/requirements.lock" || return 1
    local extra
    for extra in "$@"; do
        cmp -s "requirements/$extra.lock" "$installed/$extra.lock" || return 1
    done
    "$venv/bin/python" -I -c ''  2>/dev/null
}

has_suitable_python() {
    "$venv/bin/python" -I -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 15))' 2>/dev/null
}

make_venv() {
    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ ! -e "$venv/.incomplete" ]; then
        fail "$venv exists and is not a virtual environment: move it away, or name another with VENV=."
    fi
    local python
    python=$(tools/find_python.sh)
    rm -rf "$venv"
    mkdir -p "$venv"
    touch "$venv/.incomplete"
    echo "Making $venv with $("$python" -V) ($python)"
    "$python" -I -m venv "$venv"
}

install_with_uv() {
    env -u UV_CONSTRAINT -u UV_OVERRIDE -u UV_SYSTEM_PYTHON UV_PYTHON_DOWNLOADS=never \
        uv pip install --quiet --python "$venv/bin/python" --no-deps --require-hashes "$@"
}

install_with_pip() {
    # The machine's own index and certificates are used; its constraints and --user are not.
    PIP_CONSTRAINT=/dev/null PIP_USER=0 "$venv/bin/python" -I -m pip install -qq --no-compile --no-input \
        --disable-pip-version-check --no-deps --require-hashes "$@"
}

for extra in "$@"; do
    [ -f "requirements/$extra.lock" ] || fail "EXTRAS: no extra '$extra' is locked; there are: $(cd requirements && echo *.lock | sed 's/\.lock//g')."
done

is_ready "$@" && exit 0

# Two makes at once in one checkout: the second waits for the first.
if command -v flock >/dev/null; then
    exec 9<requirements.lock
    flock 9
    is_ready "$@" && exit 0
fi

# Extras that were asked for earlier stay when the lock changes.
extras=$*
for lock in "$installed"/*.lock; do
    name=$(basename "$lock" .lock)
    if [ -f "requirements/$name.lock" ]; then extras="$extras $name"; fi
done
extras=$(printf '%s\n' $extras | sort -u)

# A finished environment of another lock is made anew; one that somebody made by hand is brought to the lock.
if [ -e "$venv/.incomplete" ] || ! has_suitable_python ||
    { [ -e "$installed/requirements.lock" ] && ! cmp -s requirements.lock "$installed/requirements.lock"; }; then
    make_venv
fi
touch "$venv/.incomplete"

locks=(-r requirements.lock)
for extra in $extras; do locks+=(-r "requirements/$extra.lock"); done

if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
    echo "Installing requirements.lock${extras:+ and extras} with uv"
    if ! install_with_uv "${locks[@]}"; then
        echo "uv did not manage; installing with pip (a minute or two)"
        make_venv
        install_with_pip "${locks[@]}"
    fi
else
    echo "Installing requirements.lock${extras:+ and extras} with pip (a minute or two)"
    install_with_pip "${locks[@]}"
fi

mkdir -p "$installed"
cp requirements.lock "$installed/"
for extra in $extras; do cp "requirements/$extra.lock" "$installed/"; done
rm "$venv/.incomplete"
echo "$venv is ready"

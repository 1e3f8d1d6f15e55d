#!/usr/bin/env bash
# Writes requirements.lock (core and dev) and requirements/<extra>.lock (what that extra adds) from setup.py.
# Pins already in the files are kept while setup.py allows them; UPGRADE=1 takes the newest of everything.
# No index address goes into a lock, so each machine installs from the index that it is configured for.
set -euo pipefail
cd "$(dirname "$0")/.."

JAX=0.11.2
EXTRAS="aot gpu notebooks tpu triton vision"
ALONE="transformers" # torch pins the CUDA libraries that gpu and aot need in other versions: for an environment of its own

work=$(mktemp -d)
leftover=trillium_moe.egg-info # of reading setup.py; somebody's own stays
[ ! -e $leftover ] || leftover=
trap 'rm -rf "$work" $leftover' EXIT
python=$(tools/find_python.sh)

if command -v uv >/dev/null && uv --version >/dev/null 2>&1; then
    uv=uv
elif "${VENV:-.venv}/bin/uv" --version >/dev/null 2>&1; then
    uv=${VENV:-.venv}/bin/uv
else
    "$python" -I -m venv "$work/uv"
    PIP_CONSTRAINT=/dev/null PIP_USER=0 "$work/uv/bin/python" -I -m pip install --quiet --disable-pip-version-check uv
    uv=$work/uv/bin/uv
fi

printf 'jax==%s\njaxlib==%s\n' $JAX $JAX >"$work/jax"

compile() { # OUTPUT [OPTION ...]
    local output=$1
    shift
    "$uv" pip compile setup.py --quiet --no-header --annotation-style line --universal --python-version 3.12 \
        --python "$python" --no-python-downloads --generate-hashes --no-emit-index-url --no-emit-find-links \
        --constraint "$work/jax" ${UPGRADE:+--upgrade} --output-file "$output" "$@"
}

write() { # LOCK COMPILED FIRST_LINE
    {
        printf '# %s\n# Made by `make lock` from setup.py; not edited by hand.\n\n' "$3"
        # Who asked for a pin stays; this run's own files and the list of what another lock holds do not.
        sed -e '/^# /d' -e "s|, -c $work/[a-z]*||g" -e "s|-c $work/[a-z]*, ||g" -e "\|# via -c $work/[a-z]*$|d" "$2"
    } >"$work/out"
    if grep -nE "://|$work|^-|--(index|extra|find|trusted)|^[^#]* @ " "$work/out"; then
        echo "$1 would name an index, a host or a path of this machine." >&2
        exit 1
    fi
    mv "$work/out" "$1"
}

pins() { # LOCK: its versions alone
    sed -n 's/^\([A-Za-z0-9._-]*==[^ ;]*\)\( *;[^\\]*\)\{0,1\} *\\$/\1\2/p' "$1"
}

# One resolution of everything first, so that every extra fits every other and the base.
mkdir -p requirements
for lock in requirements.lock $(printf 'requirements/%s.lock ' $EXTRAS); do
    [ ! -e $lock ] || grep -v '^#' $lock >>"$work/all" || true
done
compile "$work/all" --extra dev $(printf -- '--extra %s ' $EXTRAS)
pins "$work/all" >"$work/pins"

upgrade=${UPGRADE:-}
unset UPGRADE
compile "$work/base" --extra dev --constraint "$work/pins"
write requirements.lock "$work/base" "Core and dev dependencies for Python 3.12 and later."

base=$(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/--no-emit-package \1/p' "$work/base")
for extra in $EXTRAS; do
    compile "$work/$extra" --extra dev --extra "$extra" --constraint "$work/pins" $base
    write "requirements/$extra.lock" "$work/$extra" "What the extra '$extra' adds to requirements.lock."
done
pins "$work/base" >"$work/base_pins"
for extra in $ALONE; do
    [ ! -e "requirements/$extra.lock" ] || grep -v '^#' "requirements/$extra.lock" >"$work/$extra"
    UPGRADE=$upgrade compile "$work/$extra" --extra dev --extra "$extra" --constraint "$work/base_pins" $base
    write "requirements/$extra.lock" "$work/$extra" "What the extra '$extra' adds to requirements.lock, in an environment of its own."
done

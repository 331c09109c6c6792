# Sourced by launch/demo.sh and tests/run.sh: an environment in .venv of the checkout, with uv in it.
# PYTHON names the interpreter; without it the first of the usual names that is new enough is taken.

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if [ ! -e .venv ]; then
    for python in ${PYTHON:-python3.11 python3.12 python3.13 python3 python}; do
        if new_enough "$python"; then break; fi
        python=
    done
    if [ -z "$python" ]; then
        echo "polopt needs Python 3.11 or newer, found ${PYTHON:-$(python3 --version 2>&1 || true)}." \
            "Name one: PYTHON=/path/to/python sh $0" >&2
        exit 2
    fi
    echo "Making .venv with $("$python" --version)." >&2
    # A half-made environment would stop the next attempt.
    "$python" -m venv .venv || { rm -rf .venv; exit 1; }
elif ! new_enough .venv/bin/python; then
    echo "polopt: .venv has no working Python 3.11 or newer. Remove .venv and start again." >&2
    exit 2
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'

# uv does not read pip's settings: tell it where pip looks for wheels.
if [ -z "${UV_FIND_LINKS:-}" ]; then
    UV_FIND_LINKS=${PIP_FIND_LINKS:-$(.venv/bin/python -m pip config get global.find-links 2>/dev/null || true)}
fi
UV_FIND_LINKS=$(echo $UV_FIND_LINKS | tr ' ' ',')
export UV_FIND_LINKS

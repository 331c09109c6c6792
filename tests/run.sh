#!/bin/sh
# Sets up tox in .venv and passes every check. Arguments go to tox, for example
# `sh tests/run.sh -e latest -- -k gae` or `sh tests/run.sh -e lint,type`.
set -eu
cd "$(dirname "$0")/.."
. launch/venv.sh

.venv/bin/uv pip install --quiet --python .venv 'tox>=4.30' 'tox-uv>=1.30'
exec .venv/bin/tox run "$@"

#!/bin/sh
# The tests against what users get: the wheel built through the sdist, installed outside the
# checkout, started outside the checkout. Options go to pytest. Run by `tox run -e wheel`.
set -eu
checkout=$(cd "$(dirname "$0")/.." && pwd)
outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT

python -m build --quiet --installer uv --outdir "$outside/dist" "$checkout"
uv venv --quiet --python "$(command -v python)" "$outside/venv"
uv pip install --quiet --python "$outside/venv" \
    --constraints "$checkout/tests/constraints/latest.txt" \
    --group "$checkout/pyproject.toml:test" \
    "polopt[torchrl,trl,verl] @ file://$(echo "$outside"/dist/*.whl)"
cd "$outside"
"$outside/venv/bin/python" -m pytest --config-file "$checkout/pyproject.toml" \
    --rootdir "$checkout" -p no:cacheprovider "$@" "$checkout/tests"

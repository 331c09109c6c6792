#!/bin/sh
# Everything that needs a GPU, in at most eight minutes: `sh tests/gpu/run.sh [FOLDER]`.
#
# Needs torch, pytest and this checkout, no network and no installation: parts whose libraries or
# GPUs are missing are skipped with the reason, models are made in place. FOLDER (else $OUT, else
# ./gpu-results) gets results.json and results.md. Exit status: pytest's, 0 where there is no GPU,
# 124 where the time was up. PYTHON chooses the interpreter.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
folder=${1:-${OUT:-gpu-results}}

if ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "tests/gpu/run.sh: $python has no torch that sees a GPU here, so nothing was run"
  exit 0
fi
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

# The checkout as the package polopt, wherever it is not installed: its folders have other names.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/polopt"
ln -s "$root"/launch/_root/* "$scratch/polopt/"
for part in losses envs ext launch; do
  ln -s "$root/$part" "$scratch/polopt/$part"
done
export PYTHONPATH="$scratch${PYTHONPATH:+:$PYTHONPATH}"
export POLOPT_GPU_RESULTS="$folder" POLOPT_CACHE="$scratch/cache"
cd "$root"
timeout --kill-after=10 470 "$python" -m pytest tests/gpu -m gpu -o minversion=0 \
  -p no:cacheprovider --timeout=240 -q

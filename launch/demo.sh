#!/bin/sh
# Sets up polopt in .venv and runs the two main jobs: CartPole with PPO, then a small language
# model with DAPO. Can be run again: what is there is used again.
set -eu
cd "$(dirname "$0")/.."
. launch/venv.sh

echo "Installing polopt with TorchRL and TRL." >&2
.venv/bin/uv pip install --quiet --python .venv --constraints tests/constraints/latest.txt \
    --editable '.[torchrl,trl]'

.venv/bin/polopt train cartpole-ppo
.venv/bin/polopt train arithmetic-dapo
echo "Done. The run folders are in runs/. Next: .venv/bin/polopt list" >&2

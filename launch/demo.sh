#!/bin/sh
# Sets up polopt in .venv and runs the two main jobs: CartPole with PPO, then a small language
# model with DAPO. Can be run again: what is there is used again.
set -eu
cd "$(dirname "$0")/.."
. launch/venv.sh

echo "Installing polopt with TorchRL and TRL." >&2
# Compiled now: some packages would print warnings about their own syntax at their first import.
.venv/bin/uv pip install --python .venv --constraints tests/constraints/latest.txt \
    --compile-bytecode --editable '.[torchrl,trl]'

.venv/bin/polopt train cartpole-ppo
.venv/bin/polopt train arithmetic-dapo
echo "Done. The run folders are in runs/. Next: .venv/bin/polopt list" >&2

"""Two steps with each of accelerate's files, on two GPUs."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

for name in ("trl", "reasoning_gym"):
    pytest.importorskip(name)

from polopt.launch.job import STRATEGIES
from polopt.launch.record import read_metrics

RECIPE = Path(__file__).parents[1] / "launch" / "ranks.yaml"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_steps_on_two_gpus(tmp_path, record, strategy):
    if strategy.startswith("zero"):
        pytest.importorskip("deepspeed")
    from transformers import AutoModelForCausalLM

    recipe = tmp_path / "ranks.yaml"
    recipe.write_text(RECIPE.read_text().replace("use: fsdp_cpu:arithmetic", "use: arithmetic"))
    words = [str(recipe), f"launch.strategy={strategy}", "--runs", str(tmp_path), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "polopt", "train", *words],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, "POLOPT_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["world_size"]) == (2, 2)
    folder = Path(summary["run"])
    lines = [m for m in read_metrics(folder / "metrics.jsonl") if "grad_norm" in m]
    assert all(0 < line["grad_norm"] < math.inf for line in lines)
    made = folder / "checkpoints" / "checkpoint-2"
    _, info = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not info["missing_keys"]
    record(f"two steps, {strategy}", seconds=summary["train_wall_seconds"])

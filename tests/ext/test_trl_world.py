"""One process, two, and two that share a model between them train alike."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
import trl_world

from polopt.launch.start import config_file

SCRIPT = Path(trl_world.__file__)


def start(folder, launcher):
    folder.mkdir()
    # The patch that lets accelerate shard on a CPU is beside the script.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(SCRIPT), str(folder)]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "world.json").read_text())


@pytest.mark.slow
def test_gradients_do_not_depend_on_processes_or_shards(tmp_path):
    one = start(tmp_path / "one", [])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    two = start(tmp_path / "two", launcher)
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(config_file("fsdp2"))]
    launcher += ["--num_machines", "1", "--num_processes", "2", "--main_process_port", "0"]
    sharded = start(tmp_path / "sharded", launcher)
    assert [one["processes"], two["processes"], sharded["processes"]] == [1, 2, 2]
    assert [one["sharded"], two["sharded"], sharded["sharded"]] == [False, False, True]
    assert one["resumed"] is two["resumed"] is sharded["resumed"] is True  # bit for bit
    # The reference, too, is sharded by layers, and not as one.
    assert {"model.layers.0", "model.layers.1"} <= set(sharded["reference_units"])
    for other in (two, sharded):
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert other["kl"] == pytest.approx(one["kl"], abs=1e-8)
    assert min(one["grad_norm"]) > 0.5  # so that all steps were clipped
    assert one["kl"][-1] > 1e-5
    for name in ("two", "sharded"):
        assert trl_world.difference(tmp_path / "one", tmp_path / name, "gradient") <= 1e-5
        assert trl_world.difference(tmp_path / "one", tmp_path / name, "weight") <= 1e-5

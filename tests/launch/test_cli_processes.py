import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polopt.launch.cli import main
from polopt.launch.record import read_run

pytest.importorskip("safetensors")
HERE = Path(__file__).parent


@pytest.mark.slow
def test_two_processes_share_one_run(here, start, only_run):
    process = start("train", "fake.yaml", "launch.processes=2", "--json")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["ranks"] == 2
    record = read_run(only_run())
    assert len(record.metrics) == 6
    assert record.summary["cpu_seconds"] == summary["cpu_seconds"] > 2 * record.metrics[-1]["cpu"]


@pytest.mark.slow
def test_two_processes_save_and_end_on_sigterm(here, start, only_run, wait_for_lines):
    line = "fake.yaml collector.total_frames=100000 collector.sleep=0.02 collector.save_every=99999"
    process = start("train", *line.split(), "launch.processes=2", "--json")
    wait_for_lines(1)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert json.loads(out)["status"] == "stopped"
    record = read_run(only_run())
    assert record.checkpoints == [record.metrics[-1]["step"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ("raise", 1, "RuntimeError: the fault that was asked for"),
        ("SIGKILL", 1, r"polopt: rank \d was ended by SIGKILL"),
        ("recipe", 2, r"^polopt: .*the refusal that was asked for$"),
    ],
)
def test_a_rank_that_dies_fails_the_run(here, start, fault, code, told):
    process = start("train", "fake.yaml", "launch.processes=2", f"task.fault={fault}", "--json")
    out, err = process.communicate(timeout=100)
    assert process.returncode == code
    assert json.loads(out)["status"] == "failed"
    assert re.search(told, err, re.MULTILINE), err
    assert "ChildFailedError" not in err
    assert ("Traceback" in err) == (fault == "raise"), err


@pytest.mark.slow
def test_under_a_launcher_it_runs_in_place(here, only_run):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    env = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}

    def launch(count, *words):
        command = [*launcher, "--nproc-per-node", str(count), "-m", "polopt", "train", "fake.yaml"]
        return subprocess.run(
            [*command, *words], capture_output=True, text=True, env=env, cwd=here, timeout=200
        )

    done = launch(2, "launch.processes=2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2
    assert len(read_run(only_run()).metrics) == 6
    done = launch(2)
    assert done.returncode != 0
    assert "'launch.processes' is 1, but the launcher started 2: add launch.processes=2" in (
        done.stderr
    )
    assert only_run()


def test_a_world_of_another_size_is_refused(here, capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "fake.yaml", "launch.processes=2"]) == 2
    assert "polopt: rank 1: 'launch.processes' is 2, but the launcher started 4" in (
        capfd.readouterr().err
    )


def test_a_launcher_without_a_store_needs_the_folder(here, capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["train", "fake.yaml", "launch.processes=2"]) == 2
    assert "set POLOPT_RUN to a new folder, the same on every rank" in capfd.readouterr().err
    monkeypatch.setenv("POLOPT_RUN", str(here))
    assert main(["train", "fake.yaml", "launch.processes=2"]) == 2
    assert "is not empty; name a new folder" in capfd.readouterr().err

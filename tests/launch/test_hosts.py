"""Ranks on two hosts, and what becomes of a run when they lose each other."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("trl")

import trl_world
from two_hosts import ADDRESSES, Hosts, skip_without_namespaces

from polopt.launch.start import config_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE = 15
"""Seconds that ranks wait for each other; half an hour by default."""

WORDS = [
    "arithmetic-dapo",
    "task.train_size=200",
    "task.evaluation_size=8",
    "model.hidden_size=32",
    "model.warmup_steps=100",
    "algorithm.max_rounds=1",
    "evaluation.every=null",
    "trainer.per_device_train_batch_size=8",
    "trainer.logging_steps=1",
    "trainer.save_steps=2",
    f"trainer.ddp_timeout={PATIENCE}",
    "--nodes=2",
    "--procs=1",
    f"--master={ADDRESSES[0]}:29500",
]


@pytest.fixture
def hosts():
    skip_without_namespaces()
    with Hosts() as made:
        yield made


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def start(hosts, cache, *words):
    """Start a run on both hosts."""
    common = ["-m", "polopt", "train", *WORDS, *words]
    return [hosts.start(r, *common, f"--node-rank={r}", POLOPT_CACHE=cache) for r in (0, 1)]


def rank_of(hosts, host):
    """Return the process of the rank on a host, which launchers started."""
    for pid in sorted(hosts.pids(hosts.names[host])):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if any(variable.startswith(b"RANK=") for variable in variables):
            return pid
    raise AssertionError("no rank runs")


def test_two_hosts_have_the_gradients_of_one_process(hosts, tmp_path):
    def world(name, count, *launcher):
        (tmp_path / name).mkdir()
        words = [*launcher, trl_world.__file__, str(tmp_path / name)]
        ranks = [
            hosts.start(r, *[w.replace("RANK", str(r)) for w in words], POLOPT_TEST_HOST=str(r))
            for r in range(count)
        ]
        said = [process.communicate(timeout=200)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0] * count, said
        return json.loads((tmp_path / name / "world.json").read_text())

    assert world("one", 1)["processes"] == 1
    for strategy in ("ddp", "fsdp2"):
        two = world(
            strategy, 2, "-m", "accelerate.commands.launch",
            "--config_file", str(config_file(strategy)), "--num_machines", "2",
            "--num_processes", "2", "--machine_rank", "RANK",
            "--main_process_ip", ADDRESSES[0], "--main_process_port", "29500",
        )  # fmt: skip
        assert (two["processes"], two["hosts"]) == (2, ["0", "1"])
        assert two["sharded"] == (strategy == "fsdp2")
        for kind in ("gradient", "weight"):
            assert trl_world.difference(tmp_path / "one", tmp_path / strategy, kind) <= 1e-5
    assert hosts.left(0, 1) == []


@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_a_lost_rank_ends_the_run_and_a_checkpoint_is_left(hosts, cache, tmp_path, fault):
    runs = tmp_path / "runs"
    ranks = start(hosts, cache, "trainer.max_steps=100000", "--runs", str(runs))
    hosts.wait(200, lambda: [*runs.glob("*/checkpoints/checkpoint-2/polopt.json")], ranks)
    if fault == "cut":
        hosts.cut()
    else:
        os.kill(rank_of(hosts, 0), signal.SIGKILL)  # the main one, which alone writes
    began = time.monotonic()
    said = [process.communicate(timeout=PATIENCE + 120)[0] for process in ranks]
    seconds = time.monotonic() - began
    print(f"{fault}: ended after {seconds:.1f} s")
    assert [process.returncode for process in ranks] == [1, 1]
    assert hosts.left(0, 1) == []
    [run] = runs.iterdir()
    whole = max(run.glob("checkpoints/checkpoint-*/polopt.json"), key=lambda p: p.stat().st_mtime)
    how = f"{whole.parent} is whole: start the command again with --resume {run}"
    for rank, text in enumerate(said):
        assert "Traceback" not in text, text
        assert how in text, text
        if fault == "kill" and rank == 0:
            assert "rank 0 was ended by SIGKILL" in text, text
        else:
            assert f"rank {rank} gets no answer from another" in text, text
    if fault == "cut":
        assert seconds >= PATIENCE
        hosts.mend()
        step = int(whole.parent.name.rpartition("-")[2]) + 2
        words = [f"trainer.max_steps={step}", "trainer.ddp_timeout=60", "--resume", str(run)]
        again = start(hosts, cache, *words)
        told = [process.communicate(timeout=200)[0] for process in again]
        assert [process.returncode for process in again] == [0, 0], told
        assert json.loads((run / "summary.json").read_text())["steps"] == step

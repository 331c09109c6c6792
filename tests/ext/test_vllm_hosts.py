"""A vLLM server on another host than its trainers: weights across, then a cut link and a kill."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from two_hosts import ADDRESSES, Hosts, skip_without_namespaces

from polopt.launch.record import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

URL = f"http://{ADDRESSES[1]}:8000"
WORDS = [
    "arithmetic-dapo",
    "task={use: 'fsdp_cpu:arithmetic', train_size: 96, evaluation_size: 8}",
    "model.heads=2",
    "model.warmup_steps=400",
    "algorithm={use: grpo, kl_coef: 0.0}",
    "evaluation.every=null",
    "trainer.per_device_train_batch_size=16",
    "trainer.learning_rate=5e-3",
    "trainer.logging_steps=1",
    "trainer.max_steps=100000",
    "trainer.save_steps=100000",
    "trainer.ddp_timeout=120",
    "trainer.use_vllm=true",
    "trainer.vllm_mode=server",
    "vllm.backend=gloo",
    "vllm.dtype=float32",
    "vllm.max_model_length=48",
    "vllm.transfer_seconds=20",
    f"vllm.trainer_host={ADDRESSES[0]}",
    "vllm.flags={kv_cache_memory_bytes: 67108864, max_num_seqs: 64}",
]


@pytest.fixture(scope="module")
def hosts():
    skip_without_namespaces()
    with Hosts() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def start(hosts, folder):
    """Start `polopt …` on a host; what it says is in the file that is returned, too."""

    variables = {
        "POLOPT_CACHE": str(folder / "cache"),
        "POLOPT_VLLM_KEY": "sesame",
        "PYTHONPATH": str(Path(__file__).parent),  # of the task
    }

    def begin(host, *words):
        told = folder / f"{len(list(folder.iterdir()))}.txt"
        with told.open("w") as output:
            process = hosts.start(host, "-m", "polopt", *words, output=output, **variables)
        return process, told

    return begin


@pytest.fixture(scope="module")
def server(hosts, start, folder):
    place = [f"vllm.host={ADDRESSES[1]}", "vllm.port=8000", "--runs", str(folder / "serve")]
    process, told = start(1, "serve", *WORDS, *place)
    try:
        hosts.wait(300, lambda: "is served at" in told.read_text(), [process])
    except AssertionError:
        pytest.fail(told.read_text()[-3000:])
    return process


def reached(runs, step):
    """Return whether the run in a folder has logged a training step."""
    found = list(Path(runs).glob("*/metrics.jsonl"))
    return any(line["step"] >= step and "reward" in line for f in found for line in read_metrics(f))


def check(runs, told):
    """Return the error of a run that vLLM's end has ended, which left a whole checkpoint."""
    [run] = Path(runs).iterdir()
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "reward" in line]
    # The weights move far in a step: stale ones would show.
    assert max(line["sampling/sampling_logp_difference/max"] for line in lines) <= 5e-4
    assert max(line["grad_norm"] for line in lines) > 0
    [checkpoint] = run.glob("checkpoints/checkpoint-*/polopt.json")
    assert int(checkpoint.parent.name.rpartition("-")[2]) == lines[-1]["step"]
    error = json.loads((run / "summary.json").read_text())["error"]
    assert "did not start the server" in error
    assert f"{checkpoint.parent} is whole: start the command again with --resume {run}" in error
    assert f"polopt: {error}" in told.read_text()
    assert "Traceback" not in told.read_text()
    return error


def test_only_the_chosen_interface_listens_on_the_servers_host(hosts, server):
    listening = hosts.run(1, "ss", "-Hltn").split("\n")
    places = {line.split()[3].rpartition(":")[0] for line in listening if line}
    assert places <= {ADDRESSES[1], "127.0.0.1"}
    assert ADDRESSES[1] in places


def test_a_cut_link_to_the_server_ends_the_run_with_a_checkpoint(hosts, server, start, folder):
    run, told = start(
        0, "train", *WORDS, f"trainer.vllm_server_base_url={URL}",
        "--runs", str(folder / "cut"),
    )  # fmt: skip
    hosts.wait(200, lambda: reached(folder / "cut", 3), [run])
    hosts.cut()
    began = time.monotonic()
    assert run.wait(150) == 1
    print(f"cut link to the server: ended after {time.monotonic() - began:.0f} s")
    hosts.mend()
    check(folder / "cut", told)
    assert hosts.left(0) == []


def test_a_killed_server_ends_both_ranks_with_a_checkpoint(hosts, server, start, folder):
    words = [*WORDS, f"trainer.vllm_server_base_url={URL}", "--runs", str(folder / "killed")]
    words += ["--nodes", "2", "--procs", "1", "--master", f"{ADDRESSES[0]}:29500"]
    words += ["launch.strategy=fsdp2"]  # each host has a half of the weights that the server gets
    ranks = [start(rank, "train", *words, "--node-rank", str(rank)) for rank in (0, 1)]
    hosts.wait(200, lambda: reached(folder / "killed", 3), [process for process, _ in ranks])
    [front] = [
        pid
        for pid in hosts.pids(hosts.names[1])
        if b"api_server" in (line := Path(f"/proc/{pid}/cmdline").read_bytes())
        and b"polopt.ext.vllm.server" not in line
    ]
    os.kill(front, signal.SIGKILL)
    began = time.monotonic()
    assert [process.wait(150) for process, _ in ranks] == [1, 1]
    print(f"killed server: ended after {time.monotonic() - began:.0f} s")
    error = check(folder / "killed", ranks[0][1])
    assert "did not answer" in error
    assert server.wait(30) == 1
    assert hosts.left(0, 1) == []

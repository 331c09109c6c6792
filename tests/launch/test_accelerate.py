"""Several processes and hosts: launch lines, what is refused, and two steps with each strategy."""

import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

for name in ("trl", "reasoning_gym"):
    pytest.importorskip(name)

from polopt.launch import world
from polopt.launch.cli import main
from polopt.launch.job import STRATEGIES, prepare
from polopt.launch.recipe import RecipeError, load
from polopt.launch.record import read_metrics
from polopt.launch.start import config_file
from polopt.launch.train import find_recipe

HERE = Path(__file__).parent
TEXT = "arithmetic-dapo"


def planned(capfd, *words):
    assert main(["train", *words, "--dry-run", "--json"]) == 0
    return json.loads(capfd.readouterr().out)["launch"].splitlines()


def refused(capfd, *words):
    """Return the one sentence that a command ends with."""
    capfd.readouterr()
    assert main(["train", *words]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    return line


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def job(*overrides):
    return prepare(load(find_recipe(TEXT), list(overrides)), name="test")


# --- launch lines ------------------------------------------------------------


def test_line_of_one_host(here, capfd):
    (line,) = planned(capfd, TEXT, "--procs", "4", "launch.strategy=fsdp2", "--runs", "it's $HOME")
    words = shlex.split(line)
    assert words[:4] == ["accelerate", "launch", "--config_file", str(config_file("fsdp2"))]
    start, command = words[4 : words.index("-m")], words[words.index("-m") :]
    assert start == ["--num_machines", "1", "--num_processes", "4", "--main_process_port", "0"]
    settings = [TEXT, "launch.strategy=fsdp2", "launch.processes=4"]
    assert command == ["-m", "polopt", "train", *settings, "--runs", "it's $HOME", "--json"]


def test_lines_of_several_hosts(here, capfd):
    words = [TEXT, "--nodes", "2", "--procs", "2"]
    lines = planned(capfd, *words)
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert f"--num_machines 2 --num_processes 4 --machine_rank {rank} " in line
        # For the shell to fill in.
        assert '--main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" -m' in line
        assert line.endswith("-m polopt train arithmetic-dapo launch.processes=4 --json")
    (line,) = planned(
        capfd, *words, "--node-rank", "1", "--master", "10.0.0.1:29500", "--wait", "9"
    )
    assert "--machine_rank 1 --rdzv_conf timeout=9" in line
    assert "--main_process_ip 10.0.0.1 --main_process_port 29500" in line


def test_other_jobs_are_started_by_torchrun(here, capfd):
    (line,) = planned(capfd, "fake.yaml", "--procs", "2")
    assert line.startswith("torchrun --nproc-per-node 2 --standalone -m polopt train fake.yaml")
    first, second = planned(
        capfd, "fake.yaml", "launch.processes=2", "--nodes", "2", "--master", "[fd00::1]:29500"
    )
    assert "--nnodes 2 --node-rank 0 " in first
    assert "--node-rank 1 " in second
    assert "--master-addr fd00::1 --master-port 29500" in second


def test_a_server_on_another_host_has_its_own_line(here, capfd):
    words = ["trainer.use_vllm=true", "trainer.vllm_mode=server"]
    words += ["trainer.vllm_server_base_url=http://10.0.0.5:8000"]
    assert main(["train", TEXT, *words, "--procs", "2", "--dry-run", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    key, *server = shlex.split(plan["server"])
    assert key == "POLOPT_VLLM_KEY=$KEY"
    command = ["polopt", "serve", TEXT, *words[:2], "vllm.host=10.0.0.5", "vllm.port=8000"]
    assert server == command
    assert plan["launch"].startswith('POLOPT_VLLM_KEY="$KEY" accelerate launch ')
    assert words[2] in shlex.split(plan["launch"])


# --- configs -----------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accelerate_reads_what_is_shipped(strategy):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    assert load_config_from_file(str(config_file(strategy)))  # refuses unknown keys
    words = f"--config_file {config_file(strategy)} --num_machines 1 --num_processes 2 x.py"
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(words.split()))
    found = {"ddp": args.multi_gpu, "fsdp2": args.use_fsdp and args.fsdp_version == 2}
    for stage in (2, 3):
        found[f"zero{stage}"] = args.use_deepspeed and args.zero_stage == stage
    assert [name for name, used in found.items() if used] == [strategy]


def test_gradients_in_shards_are_summed_at_each_micro_batch():
    """Else FSDP2 keeps those of the whole model while it accumulates."""
    sync = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    assert "accelerator_config" not in job("launch.processes=2").tree["trainer"]
    sharded = job("launch.processes=2", "launch.strategy=fsdp2")
    assert sharded.tree["trainer"]["accelerator_config"] == sync
    assert sharded.tree["launch"] == {"processes": 2, "strategy": "fsdp2"}


# --- what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--nodes 0", "--nodes must be at least 1, got 0"),
        ("--node-rank 1", "--node-rank is for several hosts: add --nodes N"),
        ("--nodes 2 --node-rank 2", "--node-rank must be below --nodes 2, got 2"),
        ("--nodes 2 --procs 1", "each needs --node-rank R and --master HOST:PORT"),
        ("--nodes 2 --master 10.0.0.1", "--master must be HOST:PORT"),
        ("--nodes 2 --master 10.0.0.1:99999", "--master must be HOST:PORT"),
        ("--procs 2 launch.processes=4", "launch.processes=4 is not --nodes 1 times --procs 2"),
        ("--nodes 2 --dry-run launch.processes=3", "3 cannot be shared equally by --nodes 2"),
        ("launch.strategy=fsdp", "must be one of ddp, fsdp2, zero2, zero3, got 'fsdp'"),
        ("launch.strategy=fsdp2", "'launch.processes' is 1: set it to the number of GPUs"),
        ("--procs 2 launch.strategy=ddp", "'launch.strategy' is for language models"),
    ],
)
def test_wrong_arguments(here, capfd, words, told):
    assert told in refused(capfd, "fake.yaml", *words.split())
    assert not (here / "runs").exists()


def test_processes_that_do_not_divide_the_batch(here, capfd):
    words = ["--procs", "3", "trainer.per_device_train_batch_size=7"]
    line = refused(capfd, TEXT, *words)
    assert "(per_device_train_batch_size 7 * steps_per_generation 1 * processes 3) is not" in line
    assert "multiple of per_device_train_batch_size 8 * processes 3" in refused(
        capfd, TEXT, "--procs", "3", "trainer.per_device_train_batch_size=8",
        "trainer.generation_batch_size=32",
    )  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is there")
def test_deepspeed_that_is_missing(here, capfd):
    line = refused(capfd, TEXT, "--procs", "2", "launch.strategy=zero3")
    assert "zero3 needs DeepSpeed, which is not installed: pip install deepspeed" in line
    assert not (here / "runs").exists()


def test_a_master_that_does_not_answer(here, capfd):
    began, port = time.monotonic(), free_port()
    line = refused(
        capfd, "fake.yaml", "--nodes", "2", "--procs", "1", "--node-rank", "1",
        "--master", f"127.0.0.1:{port}", "--wait", "1",
    )  # fmt: skip
    assert f"nothing answers at --master 127.0.0.1:{port} within 1 s" in line
    assert time.monotonic() - began < 30
    assert not (here / "runs").exists()


@pytest.mark.slow
def test_accelerate_that_starts_one_process_instead_of_two(here, start):
    """It does so with --cpu, and says nothing."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command += ["-m", "polopt", "train", "fake.yaml", "launch.processes=2"]
    env = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=here, timeout=100)
    assert done.returncode != 0
    assert "polopt: 'launch.processes' is 2, but accelerate started 1: leave" in done.stderr


def test_shards_that_accelerate_does_not_make(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(RecipeError, match=r"is fsdp2, but accelerate made a single process: it ne"):
        world.meet(job())
    one = SimpleNamespace(num_processes=2, distributed_type=None)
    assert world.obtained(one) == "ddp"


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("torch", r"differ in torch: '\S+' on rank 0 \(\S+\), '9.9' on rank 1 \(other\)"),
        ("the setting seed", r"differ in the setting seed: 0 on rank 0 \(\S+\), '9.9' on rank 1"),
    ],
)
def test_hosts_that_differ(monkeypatch, key, told):
    def gathered(mine):
        ((_, found),) = mine
        return [*mine, ("other", {**found, key: "9.9"})]

    monkeypatch.setattr(world, "gather_object", gathered)
    with pytest.raises(RecipeError, match=told):
        world.meet(job())


def test_a_run_folder_that_not_all_hosts_see(tmp_path, monkeypatch):
    alone = SimpleNamespace(wait_for_everyone=lambda: None)
    (tmp_path / "config.yaml").touch()
    world.check_folder(tmp_path, alone)
    monkeypatch.setattr(world, "gather_object", lambda mine: [*mine, "host-b"])
    with pytest.raises(RecipeError, match=r"host-b cannot see the run folder .*: give --runs a"):
        world.check_folder(tmp_path, alone)


# --- two steps with each strategy --------------------------------------------


def trained(folder):
    steps = [m for m in read_metrics(folder / "metrics.jsonl") if "grad_norm" in m]
    assert [m["step"] for m in steps] == [1, 2]
    assert all(m["grad_norm"] > 0 for m in steps)
    return steps


def read_by_transformers(folder):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.slow
def test_ddp_on_two_hosts(here, start, only_run):
    """Each host starts its own; here both are this one."""
    port, env = (
        free_port(),
        {"PYTHONPATH": str(HERE.parent / "ext"), "POLOPT_CACHE": str(here / "c")},
    )
    words = [str(HERE / "ranks.yaml"), "launch.strategy=ddp", "--nodes", "2", "--procs", "1"]
    words += ["--master", f"127.0.0.1:{port}", "--json"]
    hosts = [start("train", *words, "--node-rank", rank, **env) for rank in "01"]
    answers = [host.communicate(timeout=280) for host in hosts]
    for host, (_, err) in zip(hosts, answers, strict=True):
        assert host.returncode == 0, err[-3000:]
    summary, other = (json.loads(out) for out, _ in answers)
    assert (summary["steps"], summary["world_size"]) == (2, 2)
    assert other == {"status": "completed", "run": "the ranks of host 1"}
    trained(only_run())


@pytest.mark.slow
def test_fsdp2(here, start, only_run):
    env = {"PYTHONPATH": str(HERE.parent / "ext"), "POLOPT_CACHE": str(here / "cache")}
    words = [str(HERE / "ranks.yaml"), "launch.strategy=fsdp2", "--json"]
    process = start("train", *words, **env)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-3000:]
    assert json.loads(out)["world_size"] == 2
    folder = only_run()
    assert trained(folder)[1]["kl"] > 0  # the reference is in shards, too
    made = folder / "checkpoints" / "checkpoint-2"
    model = read_by_transformers(made)
    # What it is resumed from says the same.
    import torch

    shards = torch.load(made / "pytorch_model_fsdp.bin", weights_only=True)
    kept = model.state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in shards.items())

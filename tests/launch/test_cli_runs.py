"""`polopt train` as a command: its runs, how they end, and how they go on."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polopt.launch.cli import main
from polopt.launch.recipe import RecipeError
from polopt.launch.record import read_run
from polopt.launch.resume import changes

HERE = Path(__file__).parent
needs_safetensors = pytest.mark.skipif(
    not any((Path(p) / "safetensors").is_dir() for p in sys.path), reason="no safetensors"
)


@needs_safetensors
def test_a_run_from_end_to_end(here, start, only_run):
    process = start("train", "fake.yaml", "seed=5", "--json", "task.level=hard", "project=lab")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0
    summary = json.loads(out)
    assert "chatter of a library" in err
    assert "chatter of a child" in err
    path = only_run()
    assert re.fullmatch(r"fake-\d{8}-\d{6}", path.name)
    assert summary["status"] == "completed"
    assert summary["final_reward"] == 21.0
    assert (summary["seed"], summary["project"]) == (5, "lab")
    record = read_run(path)
    assert record.summary == {"format": 1, **summary}
    assert record.checkpoints == [4, 6]
    assert [m["reward"] for m in record.metrics] == [1, 3, 6, 10, 15, 21]
    assert record.config["task"]["level"] == "hard"
    assert record.config["collector"]["save_every"] == 2


@needs_safetensors
def test_the_config_of_a_run_is_a_recipe(here, capfd, only_run):
    assert main(["train", "fake.yaml", "seed=5"]) == 0
    first = only_run()
    assert main(["train", str(first / "config.yaml"), "--dry-run", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert plan["recipe"] == read_run(first).config


def test_a_failed_run_ends_its_summary(here, start, only_run):
    process = start("train", "fake.yaml", "task.fault=raise", "--json")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert json.loads(out)["error"] == "RuntimeError: the fault that was asked for"
    assert "Traceback" in err  # of the job: its author needs it
    assert read_run(only_run()).summary["status"] == "failed"


@needs_safetensors
@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_saves_and_ends(here, start, name, code, only_run, wait_for_lines):
    line = "fake.yaml collector.total_frames=100000 collector.sleep=0.02 collector.save_every=99999"
    process = start("train", *line.split(), "--json")
    wait_for_lines(1)
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    summary = json.loads(out)
    assert (summary["status"], summary["signal"]) == ("stopped", name)
    record = read_run(only_run())
    assert record.summary["status"] == "stopped"
    assert record.checkpoints == [record.metrics[-1]["step"]]


@needs_safetensors
def test_a_stopped_run_says_how_to_go_on(here, start, only_run, wait_for_lines):
    process = start("train", "fake.yaml", "collector={total_frames: 100000, sleep: 0.02}")
    wait_for_lines(1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    last = f"go on with polopt train --resume {only_run().relative_to(here)}"
    assert out.splitlines()[-1] == last


@needs_safetensors
def test_a_second_signal_ends_at_once(here, start, wait_for_lines):
    process = start("train", "fake.yaml", "task.fault=hang", "--json")
    wait_for_lines(5)
    process.send_signal(signal.SIGTERM)
    assert any("ending after this update" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert json.loads(out)["status"] == "stopped"


@needs_safetensors
def test_a_killed_run_resumes(here, start, capfd, only_run):
    words = ["fake.yaml", "task.fault=SIGKILL"]
    assert start("train", *words).wait(timeout=60) == -signal.SIGKILL
    path = only_run()
    record = read_run(path)
    assert record.summary is None
    assert record.checkpoints == [2, 4]
    # The fault would strike again at step 5: go on with the recipe mended.
    config = path / "config.yaml"
    config.write_text(config.read_text().replace("SIGKILL", "null"))
    assert main(["train", "--resume", str(path), "collector.total_frames=8", "--json"]) == 0
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert summary["final_reward"] == 36.0  # as an unbroken run
    record = read_run(path)
    assert [m["step"] for m in record.metrics] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [m["reward"] for m in record.metrics] == [1, 3, 6, 10, 15, 21, 28, 36]
    assert record.summary["status"] == "completed"


def test_where_servers_are_may_change_when_a_run_is_resumed():
    then = {"trainer": {"vllm_server_base_url": "http://10.0.0.1:1"}, "vllm": {"port": 1}}
    now = {
        "trainer": {"vllm_server_base_url": "http://10.0.0.2:2", "ddp_timeout": 60},
        "vllm": {"port": 2, "transfer_seconds": 5.0},
    }
    assert set(changes(now, then, Path("run"))) == {
        "trainer.vllm_server_base_url", "trainer.ddp_timeout", "vllm.port", "vllm.transfer_seconds"
    }  # fmt: skip
    with pytest.raises(RecipeError, match=r"was started with vllm\.dtype=auto, not half: "):
        changes({"vllm": {"dtype": "half"}}, {"vllm": {"dtype": "auto"}}, Path("run"))


@needs_safetensors
def test_a_resumed_run_keeps_its_recipe(here, capfd, only_run):
    assert main(["train", "fake.yaml"]) == 0
    path = str(only_run())
    capfd.readouterr()
    assert main(["train", path]) == 2
    err = capfd.readouterr().err
    assert f"{path} is a run folder: go on with it by polopt train --resume {path}, or " in err
    before = {p: p.stat().st_mtime_ns for p in here.rglob("*")}
    for words in (["seed=1"], ["fake.yaml", "task.scale=2"], ["task.level=hard"]):
        assert main(["train", *words, "--resume", path]) == 2
        err = capfd.readouterr().err
        assert re.fullmatch(r"polopt: .* was started with .*start a new run for the rest\n", err)
    assert {p: p.stat().st_mtime_ns for p in here.rglob("*")} == before
    assert main(["train", "fake.yaml", "--resume", path, "collector.total_frames=7"]) == 0
    assert read_run(only_run()).metrics[-1]["reward"] == 28.0


@needs_safetensors
def test_a_finished_run_is_left_as_it_is(here, capfd, only_run):
    assert main(["train", "fake.yaml"]) == 0
    path = str(only_run())
    summary = read_run(only_run()).summary
    capfd.readouterr()
    before = {p: p.stat().st_mtime_ns for p in here.rglob("*")}
    assert main(["train", "--resume", path]) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"finished already: {path}; give another collector.total_frames to go on")
    assert f"final_reward: {summary['final_reward']:g}" in out
    assert main(["train", "--resume", path, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["cpu_seconds"] == summary["cpu_seconds"]
    assert {p: p.stat().st_mtime_ns for p in here.rglob("*")} == before


@needs_safetensors
def test_a_full_disk_is_said(here, capfd, only_run):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, before[1]))
    try:
        code = main(["train", "fake.yaml", "collector={total_frames: 500, save_every: 1000}"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capfd.readouterr().err
    assert code == 1
    assert "cannot write the run: File too large: make room, then go on with polopt train" in err
    assert "Traceback" not in err
    assert read_run(only_run()).summary["status"] == "failed"
    assert main(["train", "--resume", str(only_run())]) == 0
    assert [m["step"] for m in read_run(only_run()).metrics] == list(range(1, 501))


@needs_safetensors
def test_a_file_in_the_place_of_the_checkpoints_is_said(here, capfd, only_run):
    assert main(["train", "fake.yaml"]) == 0
    folder = only_run() / "checkpoints"
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    capfd.readouterr()
    words = ["train", "--resume", str(only_run()), "collector.total_frames=9"]
    assert main(words) == 2
    err = capfd.readouterr().err
    assert "must be a folder of checkpoints: move the file away" in err
    assert "Traceback" not in err


@needs_safetensors
def test_runs_of_one_second_get_folders_of_their_own(here, start):
    processes = [start("train", "fake.yaml", f"seed={i}") for i in range(3)]
    for process in processes:
        assert process.wait(timeout=100) == 0
    paths = sorted((here / "runs").iterdir())
    assert sorted(read_run(p).config["seed"] for p in paths) == [0, 1, 2]


# --- odd surroundings ---


def test_closed_streams_are_no_traceback(here):
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    command = f"{sys.executable} -m polopt show fake.yaml >&- 2>err; echo $?"
    done = subprocess.run(["bash", "-c", command], cwd=here, env=env, capture_output=True)
    assert (done.stdout, (here / "err").read_text()) == (b"0\n", "")


def test_a_terminal_without_unicode(here):
    env = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "polopt", "train", "fake.yaml", "--dry-run", "name=ü"]
    for words in (command, [*command, "--json"]):
        done = subprocess.run(words, cwd=here, env=env, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["recipe"]["name"] == "ü"


def test_a_recipe_may_be_a_pipe(here):
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    command = f"{sys.executable} -m polopt train <(cat fake.yaml) --dry-run --json name=x"
    out = subprocess.check_output(["bash", "-c", command], cwd=here, env=env)
    assert json.loads(out)["recipe"]["collector"]["total_frames"] == 6


@needs_safetensors
def test_a_rank_without_a_launcher_means_nothing(here, capfd, monkeypatch, only_run):
    monkeypatch.setenv("RANK", "3")
    assert main(["train", "fake.yaml"]) == 0
    assert "completed" in capfd.readouterr().out
    assert read_run(only_run()).summary["status"] == "completed"


def test_an_answer_that_cannot_be_written(capsys, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("polopt.launch.cli._print", full)
    monkeypatch.setattr("polopt.launch.cli._drop_stdout", lambda: None)
    assert main(["list"]) == 1
    assert capsys.readouterr().err == "polopt: cannot write the answer: No space left on device\n"

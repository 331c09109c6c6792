import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch

from polopt.launch import files
from polopt.launch.recipe import load
from polopt.launch.record import read_metrics, read_run
from polopt.launch.run import Run, new_folder
from polopt.launch.signals import Signals, Terminated

# --- folders ---


def test_folders_of_one_second_are_different(tmp_path):
    paths = [new_folder(tmp_path / "a" / "b", "x") for _ in range(5)]
    assert len(set(paths)) == 5
    assert all(p.is_dir() for p in paths)


def _make(root, barrier, queue):
    barrier.wait()
    queue.put([str(new_folder(root, "x")) for _ in range(50)])


def test_processes_never_share_a_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_make, args=(tmp_path, barrier, queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    made = [path for _ in workers for path in queue.get(timeout=30)]
    for worker in workers:
        worker.join()
    assert len(made) == len(set(made)) == 200


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot make a run folder in .*file"):
        new_folder(tmp_path / "file", "x")


def test_one_process_writes(run):
    with pytest.raises(ValueError, match="another process is writing to the run"):
        Run(run.path)


def test_other_ranks_write_nothing(tmp_path, tree):
    other = Run(tmp_path, tree, main=False)
    other.log(1, {"a": 1.0})
    assert other.save(1, {"x": torch.ones(1)}, {}) == tmp_path / "checkpoints" / "step-1"
    other.progress(1, 2, "x")
    other.finish({})
    assert list(tmp_path.iterdir()) == []


# --- metrics ---


def test_what_is_logged_is_read(run):
    run.log(1, {"a": torch.tensor(0.5), "b": float("nan"), "n": 3, "inf": -math.inf, "flag": True})
    run.log(2, {"a": 0.1})
    first, second = read_run(run.path).metrics
    assert (first["step"], first["a"], first["n"], first["inf"]) == (1, 0.5, 3, -math.inf)
    assert math.isnan(first["b"])
    assert first["flag"] == 1.0
    assert second["a"] == 0.1
    assert 0 <= first["time"] <= second["time"]
    assert 0 < first["cpu"] <= second["cpu"]


def test_lines_are_strict_json(run):
    run.log(1, {"a": float("nan"), "b": float("inf")})

    def refuse(constant):
        raise AssertionError(constant)

    (line,) = (run.path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=refuse)["format"] == 1


@pytest.mark.parametrize("value", ["text", None, torch.ones(2), [1]])
def test_metrics_are_numbers(run, value):
    with pytest.raises(ValueError, match="the metric 'a' is not a number"):
        run.log(1, {"a": value})
    assert read_metrics(run.path / "metrics.jsonl") == []


def test_names_of_the_line_are_taken(run):
    with pytest.raises(ValueError, match="a metric cannot have the name 'time'"):
        run.log(1, {"time": 1.0})


def test_a_cut_off_line_is_tolerated_at_the_end_only(run):
    run.log(1, {"a": 1.0})
    run.log(2, {"a": 2.0})
    lines = run.path / "metrics.jsonl"
    whole = lines.read_bytes()
    start = whole.index(b"\n") + 1
    for cut in range(start, len(whole)):
        lines.write_bytes(whole[:cut])
        assert [m["a"] for m in read_metrics(lines)] == [1.0]
    lines.write_bytes(whole[: start - 5] + b"\n" + whole[start:])
    with pytest.raises(ValueError, match="line 1 is damaged"):
        read_metrics(lines)
    lines.write_text('{"format": 1, "step": 3, "time": 1.0}\n')
    with pytest.raises(ValueError, match="line 1 is damaged: it has no 'cpu'"):
        read_metrics(lines)


def test_a_resumed_run_appends_whole_lines_and_supersedes(run, again):
    for step in (1, 2, 3):
        run.log(step, {"a": float(step)})
        if step == 2:
            run.save(2, {}, {})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"format": 1, "step": 4, "a": 4')
    before = read_run(run.path)
    resumed = again(run)
    assert resumed.latest()[0] == 2
    resumed.log(3, {"a": 30.0})
    record = read_run(run.path)
    assert [(m["step"], m["a"]) for m in record.metrics] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert record.metrics[-1]["time"] >= before.metrics[-1]["time"]
    assert record.metrics[-1]["cpu"] >= before.metrics[-1]["cpu"]
    assert len(record.environment) == 2


def test_resumed_without_a_checkpoint_it_starts_over(run, again):
    run.log(0, {"a": 0.0})
    resumed = again(run)
    assert resumed.latest() is None
    resumed.log(0, {"a": 5.0})
    assert [m["a"] for m in read_run(run.path).metrics] == [5.0]


# --- the other files ---


def test_config_is_a_recipe(run, tree):
    assert load(run.path / "config.yaml") == tree
    text = (run.path / "config.yaml").read_text()
    assert "format: 1" in text
    assert f"torch {torch.__version__}" in text


def test_environment_names_versions_and_command(run):
    (session,) = read_run(run.path).environment
    assert session["versions"]["torch"] == torch.__version__
    assert session["command"] == sys.argv
    assert session["cpus"] == os.cpu_count()


def test_git_revision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    from polopt.launch.environment import describe

    assert describe()["git"] is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "f").write_text("1")
    subprocess.run([*git, "add", "f"], check=True)
    subprocess.run([*git, "commit", "-qm", "x"], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    assert describe()["git"] == {"revision": head, "changed": False}
    (tmp_path / "f").write_text("2")
    assert describe()["git"] == {"revision": head, "changed": True}


def test_summary_has_the_costs(run):
    assert read_run(run.path).summary is None
    run.finish({"status": "completed", "final_return": math.nan})
    summary = read_run(run.path).summary
    assert summary["status"] == "completed"
    assert math.isnan(summary["final_return"])
    assert summary["wall_seconds"] >= 0
    assert summary["cpu_seconds"] > 0


@pytest.mark.parametrize("name", ["environment.json", "summary.json", "metrics.jsonl"])
def test_a_newer_format_is_refused(run, name):
    run.log(1, {"a": 1.0})
    run.finish({})
    path = run.path / name
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match=f"{name} has format 2, .* up to 1: upgrade"):
        read_run(run.path)


def test_an_environment_without_sessions(run):
    (run.path / "environment.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="is damaged: it has no list of sessions"):
        read_run(run.path)


def test_what_is_not_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run folder: it has no config.yaml"):
        read_run(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match="was not written by polopt"):
        files.read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        files.read_json(tmp_path / "a.json")


# --- progress ---


def test_progress_has_an_estimate(run, capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr("polopt.launch.run.time.monotonic", lambda: now)
    run.progress(0, 1000, "return 1")
    now += 5.0
    run.progress(50, 1000, "never shown")
    now += 15.0
    run.progress(200, 1000, "return 2")
    now += 1.0
    run.progress(1000, 1000, "return 3")
    assert capsys.readouterr().err.splitlines() == [
        "  0 % · return 1",
        " 20 % · 1:20 left · return 2",
        "100 % · return 3",
    ]


# --- signals ---


def test_what_has_nothing_to_save_ends_at_once(tmp_path, tree):
    with Signals() as signals:
        run = Run(new_folder(tmp_path, "fake"), tree, signals=signals)
        signals.patient = True
        with pytest.raises(Terminated), run.at_once():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signals.patient


def test_a_signal_from_before_ends_it_before_it_begins(tmp_path, tree):
    with Signals() as signals:
        run = Run(new_folder(tmp_path, "fake"), tree, signals=signals)
        signals.patient = True
        os.kill(os.getpid(), signal.SIGTERM)  # noted
        with pytest.raises(Terminated), run.at_once():
            pytest.fail("it was begun")

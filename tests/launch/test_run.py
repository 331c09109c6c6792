import itertools
import json
import math
import multiprocessing
import os
import random
import struct
import subprocess
import sys
import time

import pytest
import torch

from polopt.launch import checkpoint, files, tensorboard
from polopt.launch.recipe import load
from polopt.launch.run import Run, new_folder, read_metrics, read_run

pytest.importorskip("safetensors")
TREE = {"name": "fake", "task": {"use": "fake:task", "lr": 1e-4}, "seed": 3}


@pytest.fixture
def run(tmp_path):
    return Run(new_folder(tmp_path, "fake"), TREE)


def again(run):
    """Open a run to go on with it, as after a kill: nothing was finished."""
    run._lock.close()
    run._metrics.close()
    return Run(run.path)


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


def test_other_ranks_write_nothing(tmp_path):
    other = Run(tmp_path, TREE, main=False)
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


def test_a_resumed_run_appends_whole_lines_and_supersedes(run):
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


def test_resumed_without_a_checkpoint_it_starts_over(run):
    run.log(0, {"a": 0.0})
    resumed = again(run)
    assert resumed.latest() is None
    resumed.log(0, {"a": 5.0})
    assert [m["a"] for m in read_run(run.path).metrics] == [5.0]


# --- the other files ---


def test_config_is_a_recipe(run):
    assert load(run.path / "config.yaml") == TREE
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


def test_what_is_not_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run folder: it has no config.yaml"):
        read_run(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(ValueError, match="was not written by polopt"):
        files.read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        files.read_json(tmp_path / "a.json")


# --- checkpoints ---


def test_checkpoints_come_back_as_they_were(run):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    shared = torch.arange(6.0)
    tensors = {**model.state_dict(), "view": shared[2:4], "shared": shared, "same": shared}
    tensors |= {"t": torch.ones(2, 3).T, "bf16": torch.ones(2, dtype=torch.bfloat16)}
    tensors |= {"empty": torch.empty(0, 2), "scalar": torch.tensor(True)}
    state = {
        "optimizer": optimizer.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "odd": [math.nan, math.inf, "NaN", "Infinity", None, (1, (2.5,)), True, 2**80],
        "keys": {1: "int", "1": "text", (2, 3): "tuple", "!": "mark", None: torch.ones(1)},
        "both": {1: torch.ones(1), "1": torch.zeros(1)},
        "": {"": torch.full((1,), 7.0)},
    }
    path = run.save(7, tensors, state)
    step, got, back = run.latest()
    assert step == 7
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)
    assert str(back["odd"]) == str(state["odd"])
    assert back["python"] == state["python"]
    assert torch.equal(back["torch"], state["torch"])
    assert list(back["keys"]) == list(state["keys"])
    assert (back["both"][1], back["both"]["1"], back[""][""]) == (1.0, 0.0, 7.0)
    fresh = torch.optim.AdamW(model.parameters())
    fresh.load_state_dict(back["optimizer"])
    assert str(fresh.state_dict()) == str(optimizer.state_dict())
    assert sorted(p.name for p in path.iterdir()) == ["state.json", "tensors.safetensors"]


def test_nothing_is_pickled(run):
    with pytest.raises(ValueError, match="cannot hold the object at /a/1"):
        run.save(1, {}, {"a": [0, object()]})
    with pytest.raises(ValueError, match="must not start with a slash"):
        run.save(1, {"/x": torch.ones(1)}, {})
    assert run.latest() is None
    assert list((run.path / "checkpoints").glob("*")) == []


def test_the_newest_stay(run):
    run.keep = 3
    for step in (1, 2, 10, 9, 11):
        run.save(step, {"x": torch.full((1,), float(step))}, {})
    assert read_run(run.path).checkpoints == [9, 10, 11]
    assert run.latest()[1]["x"] == 11.0


def test_a_step_can_be_saved_again(run):
    run.save(1, {}, {"v": 1})
    run.save(1, {}, {"v": 2})
    assert run.latest()[2] == {"v": 2}
    assert len(list((run.path / "checkpoints").iterdir())) == 1


def test_a_kill_between_the_renames_leaves_the_old_one(run):
    run.save(1, {}, {"v": 1})
    folder = run.path / "checkpoints"
    (folder / "step-1").rename(folder / "step-1.old")
    assert run.latest()[2] == {"v": 1}
    run.save(1, {}, {"v": 2})
    assert run.latest()[2] == {"v": 2}
    assert [p.name for p in folder.iterdir()] == ["step-1"]


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
@pytest.mark.parametrize("harm", ["cut", "gone", "noise"])
def test_a_damaged_checkpoint_is_passed_over(run, capsys, name, harm):
    run.save(1, {"x": torch.ones(100)}, {"v": 1})
    file = run.save(2, {"x": torch.ones(100)}, {"v": 2}) / name
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:20] if harm == "cut" else b"\x07" * 300)
    assert run.latest()[0] == 1
    assert "step-2" in capsys.readouterr().err


def test_a_newer_checkpoint_is_refused(run):
    run.save(1, {}, {})
    path = run.save(2, {}, {}) / "state.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="has format 2, this polopt reads up to 1: upgrade polopt"):
        run.latest()


def test_a_full_disk_leaves_the_last_one(run, monkeypatch):
    run.save(1, {"x": torch.ones(3)}, {"v": 1})

    def full(*args):
        raise OSError(28, "No space left on device")

    for name in ("save_file", "write_json", "_sync"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, name, full)
            with pytest.raises(OSError, match="No space left"):
                run.save(2, {"x": torch.zeros(3)}, {"v": 2})
        assert run.latest()[2] == {"v": 1}
        assert [p.name for p in (run.path / "checkpoints").iterdir()] == ["step-1"]


def _save_forever(folder, started):
    for step in itertools.count(1):
        x = torch.full((500_000,), float(step))
        checkpoint.write(folder, step % 3, {"x": x}, {"v": step, "y": x}, 2)
        started.set()


def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path):
    """Kills at random moments of a process that does nothing but save."""
    dice, context = random.Random(0), multiprocessing.get_context("fork")
    for turn in range(20):
        started = context.Event()
        process = context.Process(target=_save_forever, args=(tmp_path / str(turn), started))
        process.start()
        assert started.wait(60)
        time.sleep(dice.uniform(0.0, 0.1))
        process.kill()
        process.join()
        step, tensors, state = checkpoint.newest(tmp_path / str(turn))
        assert state["v"] % 3 == step
        assert torch.equal(tensors["x"], torch.full((500_000,), float(state["v"])))
        assert torch.equal(state["y"], tensors["x"])


# --- TensorBoard ---


def _records(path):
    """Read a TFRecord file, independently of the writer's bit twiddling."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert data[8:12] == tensorboard._checksum(data[:8])
        body = data[12 : 12 + length]
        assert data[12 + length : 16 + length] == tensorboard._checksum(body)
        data = data[16 + length :]
        yield body


def test_checksums_are_crc32c():
    """Known answers of RFC 3720, appendix B.4, masked as TFRecord does."""
    for data, crc in ((bytes(32), 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43)):
        masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        assert tensorboard._checksum(data) == struct.pack("<I", masked)


def test_events_are_whole_after_each_call(run):
    run.log(5, {"a": 0.5})
    (path,) = run.path.glob("events.out.tfevents.*")
    version, scalar = _records(path)
    assert version.endswith(b"brain.Event:2")
    assert b"a\x15" + struct.pack("<f", 0.5) in scalar


def test_tensorboard_reads_the_events(run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    values = {1: 0.5, 2: -1e30, 300: 1e300, 2**40: 3.0}
    for step, value in values.items():
        run.log(step, {"loss/objective": value, "ünï code": 2.0, "n": float("nan")})
    run.finish({})
    reader = accumulator.EventAccumulator(str(run.path))
    reader.Reload()
    assert set(reader.Tags()["scalars"]) == {"loss/objective", "ünï code", "n"}
    events = reader.Scalars("loss/objective")
    assert [e.step for e in events] == list(values)
    assert [e.value for e in events] == pytest.approx([0.5, -1e30, math.inf, 3.0])
    assert abs(events[0].wall_time - time.time()) < 60


def test_tensorboard_drops_what_a_resumed_run_superseded(run):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for step in (1, 2, 3):
        run.log(step, {"a": float(step)})
    run.save(2, {}, {})
    time.sleep(0.01)
    resumed = again(run)
    resumed.latest()
    resumed.log(3, {"a": 30.0})
    reader = accumulator.EventAccumulator(str(run.path))
    reader.Reload()
    assert [(e.step, e.value) for e in reader.Scalars("a")] == [(1, 1.0), (2, 2.0), (3, 30.0)]


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

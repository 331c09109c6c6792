import itertools
import math
import multiprocessing
import random
import time

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors import SafetensorError

from polopt.launch import checkpoint
from polopt.launch.recipe import RecipeError
from polopt.launch.record import read_run


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
    message = "has format 2, this polopt reads up to 1: upgrade polopt"
    with pytest.raises(RecipeError, match=message):
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


def test_what_safetensors_cannot_write_is_an_error_of_the_disk(run, monkeypatch):
    def full(*args):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match=r"cannot write the checkpoint .*step-2: No space left"):
        run.save(2, {}, {})


def _save_forever(folder, started):
    torch.set_num_threads(1)  # a fork has none of its parent's other threads, and waits for them
    for step in itertools.count(1):
        x = torch.full((500_000,), float(step))
        checkpoint.write(folder, step % 3, {"x": x}, {"v": step, "y": x}, 2)
        started.set()


def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path):
    """Kills at random moments of a process that does nothing but save."""
    dice, context = random.Random(0), multiprocessing.get_context("fork")
    for turn in range(20):
        started = context.Event()
        process = context.Process(
            target=_save_forever, args=(tmp_path / str(turn), started), daemon=True
        )
        process.start()
        assert started.wait(60)
        time.sleep(dice.uniform(0.0, 0.1))
        process.kill()
        process.join()
        step, tensors, state = checkpoint.newest(tmp_path / str(turn))
        assert state["v"] % 3 == step
        assert torch.equal(tensors["x"], torch.full((500_000,), float(state["v"])))
        assert torch.equal(state["y"], tensors["x"])

import json
import signal
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

from polopt.launch.cli import main
from polopt.launch.recipe import RecipeError
from polopt.launch.record import read_run
from polopt.launch.resume import finished

PATH = Path("runs/x")
SOLVED = {"status": "completed", "frames": 11264, "solved": True, "final_return": 500.0}
UNSOLVED = {**SOLVED, "frames": 39936, "solved": False, "final_return": 20.0}


def tree(frames=40000, bar=475.0, **collector):
    collector = {"total_frames": frames, "frames_per_batch": 1024, **collector}
    return {"collector": collector, "evaluation": {"stop_at": bar}}


def changed(**given):
    keys = {"frames": "collector.total_frames", "bar": "evaluation.stop_at"}
    return {keys[name]: {"before": 1, "now": value} for name, value in given.items()}


@pytest.mark.parametrize(
    ("summary", "now", "mend"),
    [
        (SOLVED, {}, "a higher evaluation.stop_at (null for none)"),
        (UNSOLVED, {}, "more collector.total_frames"),
        # Only whole batches are collected.
        (UNSOLVED, {"frames": 40959}, "more collector.total_frames"),
        (SOLVED, {"frames": 11264},
         "a higher evaluation.stop_at (null for none) and more collector.total_frames"),
    ],
)  # fmt: skip
def test_what_ended_a_run_is_what_lets_it_go_on(summary, now, mend):
    assert finished(tree(**now), summary, {}, PATH) == (
        f"finished already: runs/x; give {mend} to go on"
    )


@pytest.mark.parametrize(
    ("summary", "now", "message"),
    [
        (
            SOLVED,
            {"frames": 41000},
            "collector.total_frames=41000 does not let it go on: give a hi",
        ),
        (SOLVED, {"bar": 490.0}, r"evaluation.stop_at=490.0 does not let it go on: give a higher"),
        (UNSOLVED, {"bar": None}, "stop_at=null does not let it go on: give more collector.total_"),
        (UNSOLVED, {"frames": 40100}, "39936, and collector.total_frames=40100 does not"),
    ],
)
def test_a_change_that_does_not_let_a_run_go_on_is_refused(summary, now, message):
    with pytest.raises(RecipeError, match=message):
        finished(tree(**now), summary, changed(**now), PATH)


@pytest.mark.parametrize(
    ("summary", "now"),
    [
        (SOLVED, {"bar": None}),
        (SOLVED, {"bar": 501.0}),
        (UNSOLVED, {"frames": 40960}),
        ({**UNSOLVED, "status": "stopped"}, {}),
        ({}, {}),
    ],
)
def test_a_run_goes_on(summary, now):
    assert finished(tree(**now), summary, changed(**now), PATH) is None


def test_a_language_model_goes_on_with_more_steps_alone():
    done = {"status": "completed", "steps": 6}
    most = {steps: {"trainer.max_steps": {"before": 6, "now": steps}} for steps in (4, 6, 7, -1)}
    assert finished({}, done, {}, PATH) == (
        "finished already: runs/x; give another trainer.max_steps to go on"
    )
    for steps in (4, 6):
        message = f"runs/x ended at step 6, and trainer.max_steps={steps} does not let it go on: "
        with pytest.raises(RecipeError, match=message):
            finished({}, done, most[steps], PATH)
    assert finished({}, done, most[7], PATH) is None
    assert finished({}, done, most[-1], PATH) is None  # its epochs say how long


def test_a_run_keeps_what_was_changed_when_it_was_resumed(here, capfd, only_run):
    assert main(["train", "fake.yaml"]) == 0
    path = str(only_run())
    assert main(["train", "--resume", path, "collector.total_frames=8"]) == 0
    record = read_run(only_run())
    assert record.config["collector"]["total_frames"] == 8
    first, second = record.environment
    assert "changed" not in first
    assert second["changed"] == {"collector.total_frames": {"before": 6, "now": 8}}
    capfd.readouterr()
    assert main(["train", "--resume", path]) == 0
    assert capfd.readouterr().out.startswith("finished already")
    assert len(read_run(only_run()).environment) == 2


def test_a_dry_run_refuses_what_the_run_would(here, capfd, only_run, monkeypatch):
    assert main(["train", "fake.yaml"]) == 0
    words = ["train", "--resume", str(only_run()), "collector.total_frames=8", "--dry-run"]
    assert main(words) == 0

    def refuse(job):
        raise RecipeError("it is not here")

    monkeypatch.setattr("fake.FakeJob.check_inputs", refuse, raising=False)
    capfd.readouterr()
    for asked in (words, words[:-1]):
        assert main(asked) == 2
        assert capfd.readouterr().err == "polopt: it is not here\n"


def test_a_resumed_run_that_is_killed_is_not_finished(here, start, capfd, only_run):
    assert main(["train", "fake.yaml", "collector={total_frames: 4, sleep: 0.01}"]) == 0
    path = only_run()
    config = path / "config.yaml"
    config.write_text(config.read_text().replace("fault: null", "fault: SIGKILL"))
    words = ["train", "--resume", str(path), "collector.total_frames=8"]
    assert start(*words).wait(timeout=60) == -signal.SIGKILL
    assert read_run(path).summary is None
    config.write_text(config.read_text().replace("SIGKILL", "null"))
    capfd.readouterr()
    assert main(["train", "--resume", str(path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["final_reward"] == 36.0


def test_a_run_without_a_checkpoint_says_that_it_starts_over(here, start, capfd, only_run):
    words = ["fake.yaml", "task.fault=SIGKILL", "collector.save_every=9"]
    assert start("train", *words).wait(timeout=60) == -signal.SIGKILL
    path = only_run()
    config = path / "config.yaml"
    config.write_text(config.read_text().replace("SIGKILL", "null"))
    assert main(["train", "--resume", str(path)]) == 0
    assert f"polopt: {path} has no checkpoint yet, it starts over\n" in capfd.readouterr().err
    assert [m["step"] for m in read_run(path).metrics] == [1, 2, 3, 4, 5, 6]
    assert main(["train", "--resume", str(path), "collector.total_frames=10"]) == 0
    assert "starts over" in capfd.readouterr().err  # save_every is 9: none was written
    assert main(["train", "--resume", str(path), "collector.total_frames=11"]) == 0
    assert "starts over" not in capfd.readouterr().err

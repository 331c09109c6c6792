"""`polopt bench llm`: what is compared, how it is summed up, and real runs as small as they go."""

import json

import pytest

pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")

from polopt.launch.bench.llm import _at, _grid, _table, summarise
from polopt.launch.cli import main

SMALL = (
    "task.train_size=200",
    "task.evaluation_size=16",
    "model.warmup_steps=400",
    "model.label_accuracy=1.0",
    "model.hidden_size=32",
    "trainer.per_device_train_batch_size=16",
    "algorithm.refill=reward",
)


def run(trainer, seed, *points):
    curve = [{"cpu_seconds": t, "sampled": s, "greedy": 0.9, "step": 0} for t, s in points]
    return {"trainer": trainer, "seed": seed, "curve": curve, "steps": 7, "generated": 56}


def test_seconds_to_the_target_and_their_ratio():
    found = summarise(
        [
            run("polopt", 1, (0.0, 0.3), (2.0, 0.8), (4.1, 0.9)),
            run("trl", 1, (0.0, 0.3), (2.0, 0.7), (4.2, 0.6), (6.0, 0.8)),
            run("polopt", 2, (0.0, 0.3), (2.0, 0.7), (5.0, 0.85)),
            run("trl", 2, (0.0, 0.3), (2.0, 0.6), (10.0, 0.75)),
        ],
        target=0.8,
    )
    ours, theirs = found["rows"]
    assert (ours["trainer"], ours["seeds"], ours["reached"]) == ("polopt", 2, 2)
    assert (theirs["seeds"], theirs["reached"]) == (2, 1)
    assert ours["cpu_seconds"]["mean"] == 3.5
    assert theirs["cpu_seconds"]["mean"] == 8.0  # the second had ten, and missed it
    assert found["speed_ups"] == [3.0, 2.0]
    assert found["speed_up"]["mean"] == 2.5
    text = _table(found)
    assert "| polopt | 2 of 2 | 3.5 [2.0, 5.0] |" in text
    assert "| trl | 1 of 2 | ≥ 8.0 [6.0, 10.0] |" in text
    assert "same seed: 2.50 [2.00, 3.00] (3.00, 2.00)" in text


def test_curves_are_read_at_common_times():
    curve = run("trl", 0, (0.0, 0.2), (2.0, 0.6), (6.0, 0.8))["curve"]
    assert [_at(curve, x) for x in (0.0, 1.0, 3.0, 6.0)] == pytest.approx([0.2, 0.4, 0.65, 0.8])
    other = run("trl", 1, (0.0, 0.4), (4.0, 0.8))["curve"]
    points = _grid([curve, other], 2.0)
    assert [x for x, _ in points] == [0.0, 2.0, 4.0]  # as far as both go
    assert [spread["mean"] for _, spread in points] == pytest.approx([0.3, 0.6, 0.75])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cpu-seconds", "0"], "--cpu-seconds must be positive, got 0.0"),
        (["--target", "85"], r"--target must be in (0, 1], got 85.0"),
        (["--recipe", "arithmetic-dapo2"], "there is no recipe 'arithmetic-dapo2', did you mean"),
        (["--recipe", "arithmetic-grpo"], "'arithmetic-grpo' must train a language model with"),
        (["trainer.max_step=3"], "unknown key 'trainer.max_step', did you mean 'max_steps'"),
        (["--seeds", "-1"], "'seed' must be a whole number"),
    ],
)
def test_wrong_input_is_one_sentence(words, message, tmp_path, capfd):
    assert main(["bench", "llm", *words, "--runs", str(tmp_path / "runs")]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"polopt: {message}")
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_both_trainers(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("POLOPT_CACHE", str(tmp_path / "cache"))
    words = [*SMALL, "--seeds", "3", "--cpu-seconds", "1.5", "--every", "0.5"]
    assert main(["bench", "llm", *words, "--runs", str(tmp_path / "runs"), "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    (folder,) = (tmp_path / "runs").iterdir()
    assert answer["folder"] == str(folder)
    kept = json.loads((folder / "results.json").read_text())
    ours, theirs = kept["runs"]
    assert (ours["trainer"], theirs["trainer"]) == ("polopt", "trl")
    first, second = (r["curve"][0] for r in (ours, theirs))
    assert first == second  # the same model, held-out problems and draws
    for done in (ours, theirs):
        *before, last = [p["cpu_seconds"] for p in done["curve"]]
        assert before[0] == 0.0
        assert before[-1] < 1.5 <= last < 6.0
        assert done["trained"] == 16 * done["steps"] > 0
    assert theirs["generated"] == theirs["trained"]
    assert ours["generated"] > ours["trained"]  # groups without signal are replaced
    svg = (folder / "accuracy.svg").read_text()
    assert ">polopt</text>" in svg
    assert ">trl</text>" in svg
    assert "| trl |" in (folder / "table.md").read_text()

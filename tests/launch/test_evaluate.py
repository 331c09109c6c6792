"""`polopt eval`: the numbers, what it evaluates, and what it refuses."""

import itertools
import json

import pytest

pytest.importorskip("trl")
pytest.importorskip("reasoning_gym")

from polopt.ext.trl.evaluate import scores
from polopt.launch.cli import main
from polopt.launch.job import prepare
from polopt.launch.recipe import load
from polopt.launch.run import Run
from polopt.launch.train import find_recipe

SMALL = (
    "task.train_size=200",
    "task.evaluation_size=32",
    "model.warmup_steps=200",
    "model.hidden_size=32",
    "trainer.per_device_train_batch_size=16",
    "trainer.max_steps=2",
    "trainer.save_steps=1",
    "algorithm.refill=null",
)


def test_pass_at_k_is_the_mean_over_all_subsets():
    correct = [
        [True, False, False, True, False],
        [False] * 5,
        [True] * 5,
        [False, True] + 3 * [False],
    ]
    answers = [[str(i) for i in range(5)]] * 4
    found = scores(correct, answers)
    assert set(found) == {"mean@5", "pass@2", "pass@4", "pass@5", "majority@5"}
    assert found["mean@5"] == pytest.approx(8 / 20)
    for k in (2, 4, 5):
        chances = [
            sum(any(c) for c in itertools.combinations(flags, k))
            / len(list(itertools.combinations(flags, k)))
            for flags in correct
        ]
        assert found[f"pass@{k}"] == pytest.approx(sum(chances) / 4)


def test_majority_votes_over_texts_and_splits_ties():
    found = scores(
        [[True, False, True], [False, True, False], [True, False, False]],
        [["7", "8", " 7\n"], ["3", "4", "3"], ["1", "2", "3"]],
    )
    assert found["majority@3"] == pytest.approx((1 + 0 + 1 / 3) / 3)
    # Once in the wrong format, which the reward does not take.
    assert scores([[True, False, True]], [["7", "7", "8"]])["majority@3"] == 1 / 2
    assert scores([[True]], [["1"]]) == {"mean@1": 1.0, "pass@1": 1.0, "majority@1": 1.0}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("POLOPT_CACHE", str(tmp_path / "cache"))
    job = prepare(load(find_recipe("arithmetic-dapo"), SMALL), name="test")
    path = tmp_path / "run"
    path.mkdir()
    folder = Run(path, job.tree)
    folder.finish(job.train(folder))
    return path


def test_a_run_and_its_model(run, capsys):
    assert main(["eval", str(run), "--samples", "3", "--json"]) == 0
    newest = json.loads(capsys.readouterr().out)
    assert newest["model"] == str(run / "checkpoints" / "checkpoint-2")
    assert (newest["problems"], newest["samples"], newest["task"]) == (32, 3, "arithmetic")
    summary = json.loads((run / "summary.json").read_text())
    # The same greedy answers as after training.
    assert newest["greedy"] == summary["accuracy_after"]["greedy"]
    assert 0 < newest["mean@3"] <= newest["pass@2"] <= newest["pass@3"] <= 1
    assert 0 <= newest["majority@3"] <= newest["pass@3"]
    assert 0 < newest["standard_error"]["mean@3"] < 0.1
    # The same folder as a model, fewer problems, and the text.
    model = ["eval", newest["model"], "--recipe", "arithmetic-dapo", *SMALL[:2]]
    assert main([*model, "--samples", "3", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again == newest
    assert main([*model, "evaluation.problems=5", "--samples", "1"]) == 0
    shown = capsys.readouterr().out
    assert "on arithmetic: 5 held-out problems" in shown
    assert "greedy" in shown
    assert "mean@1" in shown
    assert main(["eval", str(run), "--checkpoint", "1", "--samples", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"].endswith("checkpoint-1")

    def refused(*words):
        assert main(["eval", *words]) == 2
        return capsys.readouterr().err

    assert "no checkpoint of step 7, it has 1, 2" in refused(str(run), "--checkpoint", "7")
    assert "has its own recipe" in refused(str(run), "--recipe", "arithmetic-dapo")
    assert "goes with a run" in refused("model", "--checkpoint", "1")
    assert "--samples must be at least 1" in refused(str(run), "--samples", "0")
    assert "one model at a time" in refused(str(run), "other")
    (run / "checkpoints" / "checkpoint-1" / "polopt.json").unlink()
    (run / "checkpoints" / "checkpoint-2" / "polopt.json").unlink()
    assert "has no checkpoint yet" in refused(str(run))


def test_what_is_not_there(tmp_path, capsys):
    def refused(*words):
        assert main(["eval", *words]) == 2
        return capsys.readouterr().err

    assert "name a run folder or a model first" in refused()
    assert "--recipe RECIPE" in refused(str(tmp_path))
    wrong = refused(str(tmp_path), "--recipe", "arithmetic-dapo", *SMALL[:2])
    assert f"cannot load a model from {tmp_path}" in wrong
    assert wrong.count("\n") == 1
    assert "trains no language model" in refused("model", "--recipe", "cartpole-ppo")


def test_sources_are_told_apart(run, capsys, monkeypatch):
    from dataclasses import replace

    from polopt.launch import job as module

    def with_sources(tree, name):
        job = prepare(tree, name=name)
        rows = [{**row, "data_source": "ab"[i % 2]} for i, row in enumerate(job.task.evaluation)]
        return replace(job, task=replace(job.task, evaluation=rows))

    monkeypatch.setattr(module, "prepare", with_sources)
    assert main(["eval", str(run), "--samples", "2", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    parts = content["sources"]
    assert {name: part["problems"] for name, part in parts.items()} == {"a": 16, "b": 16}
    for key in ("greedy", "mean@2", "pass@2"):
        assert (parts["a"][key] + parts["b"][key]) / 2 == pytest.approx(content[key])

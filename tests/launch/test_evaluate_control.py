"""`polopt eval` of control runs: the policy of a checkpoint plays."""

import json

import pytest

pytest.importorskip("torchrl")

from polopt.launch.cli import main
from polopt.launch.job import prepare
from polopt.launch.recipe import load
from polopt.launch.run import Run
from polopt.launch.train import find_recipe

SHORT = ("evaluation={episodes: 5, stop_at: null, every: 64}", "seed=3")
RECIPES = {
    "cartpole-ppo": (
        "collector={num_envs: 4, frames_per_batch: 64, total_frames: 128}",
        "update={epochs: 1, minibatch_size: 64}",
        "checkpoints.every=64",
    ),
    "cartpole-dapo": ("collector={num_envs: 32, total_frames: 100}",),
    "pendulum-td3": (
        "collector={num_envs: 4, frames_per_batch: 64, total_frames: 256}",
        "replay={capacity: 256, batch_size: 8, learning_starts: 64}",
        "update={steps_per_batch: 2}",
        "network.hidden=[16]",
    ),
}


def train(folder, name):
    job = prepare(load(find_recipe(name), [*SHORT, *RECIPES[name]]), name="test")
    folder.mkdir()
    run = Run(folder, job.tree)
    return run.finish(job.train(run))


@pytest.mark.parametrize("name", RECIPES)
def test_a_policy_earns_what_it_earned_at_the_end(tmp_path, name, capsys):
    summary = train(tmp_path / "run", name)
    # The states in which the episodes of the last evaluation of training began.
    seed = 3 * 1_000_003 + summary["frames"]
    assert main(["eval", str(tmp_path / "run"), "--seed", str(seed), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpoint"] == summary["frames"]
    assert found["episodes"] == len(found["returns"]) == 5
    assert found["mean"] == pytest.approx(sum(found["returns"]) / 5)
    assert found["mean"] == summary["final_return"]


def test_settings_checkpoints_and_refusals(tmp_path, capsys):
    train(tmp_path / "run", "cartpole-ppo")
    run = str(tmp_path / "run")
    assert main(["eval", run, "evaluation={episodes: 7, stop_at: 5}", "--checkpoint", "64"]) == 0
    text = capsys.readouterr().out
    assert "checkpoint 64, on CartPole-v1: 7 greedy episodes" in text
    assert "bar    5, reached" in text
    for words, message in (
        (["--checkpoint", "3"], "has no checkpoint of step 3, it has 64, 128"),
        (["--seed", "-1"], "--seed must be a whole number from 0 to 4294967295, got -1"),
        (["--checkpoint", "best"], "has no best checkpoint, it has 64, 128"),
        (["--samples", "8"], "--samples goes with a language model"),
        (["network.hidden=[32]"], "does not fit this recipe and this polopt"),
    ):
        assert main(["eval", run, *words]) == 2
        assert message in capsys.readouterr().err

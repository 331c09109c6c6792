"""The control job with a normalising flow as policy."""

import pytest
import torch

pytest.importorskip("torchrl")
pytest.importorskip("zuko")

from polopt.launch.checkpoint import newest
from polopt.launch.job import prepare
from polopt.launch.recipe import RecipeError, load
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.launch.train import find_recipe

TINY = (
    "collector.num_envs=4",
    "collector.frames_per_batch=64",
    "update.minibatch_size=32",
    "update.epochs=2",
    "evaluation.every=64",
    "evaluation.episodes=2",
    "evaluation.stop_at=null",
)


def job(*overrides, recipe="pendulum-flow-ppo"):
    return prepare({"project": "polopt", **load(find_recipe(recipe), overrides)}, name="test")


def run(folder, prepared, *, resume=False):
    folder.mkdir(exist_ok=True)
    view = Run(folder, None if resume else prepared.tree)
    summary = prepared.train(view)
    view.finish(summary)
    return summary


def test_resuming_is_exact(tmp_path):
    run(tmp_path / "whole", job(*TINY, "collector.total_frames=128"))
    run(tmp_path / "parts", job(*TINY, "collector.total_frames=64"))
    run(tmp_path / "parts", job(*TINY, "collector.total_frames=128"), resume=True)
    whole, parts = (newest(tmp_path / name / "checkpoints")[1] for name in ("whole", "parts"))
    assert any("flow" in name for name in whole)
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name


def test_discrete_actions_are_refused():
    with pytest.raises(RecipeError, match="policy 'flow' needs bounded continuous actions"):
        job("network.policy=flow", recipe="cartpole-ppo")


@pytest.mark.slow
def test_the_recipe_learns(tmp_path):
    summary = run(tmp_path / "run", job("seed=1"))
    assert summary["solved"]
    assert summary["final_return"] >= -300
    first = read_metrics(tmp_path / "run" / "metrics.jsonl")[0]
    assert first["greedy_return"] < -300  # it was learnt, not given

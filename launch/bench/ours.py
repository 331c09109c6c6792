"""Our recipes in `polopt bench control`."""

import tempfile
from pathlib import Path
from typing import Any

from polopt.launch.bench.table import Trial
from polopt.launch.job import prepare
from polopt.launch.recipe import load
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.launch.train import find_recipe

__all__ = ["ZOO", "ours", "zoo"]

ZOO = (
    "collector.use=BatchedCollector",
    "collector.num_envs=8",
    "collector.frames_per_batch=256",
    "update.epochs=20",
    "update.minibatch_size=256",
    "algorithm.lam=0.8",
    "algorithm.value_clip=null",
    "reward_scaling=null",
    "optimizer.lr={use: Linear, start: 1e-3, end: 0.0, steps: 100000}",
    "algorithm.clip={use: Linear, start: 0.2, end: 1e-6, steps: 100000}",
)
"""What rl-zoo3 gives stable-baselines3 for CartPole, as settings of our recipe."""


def ours(trial: Trial, settings: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train the recipe `<task>-<algorithm>`.

    Args:
        trial: What is trained, and where it ends.
        settings: Changes to the recipe, as on the command line.
    """
    recipe = find_recipe(f"{trial.task}-{trial.algorithm}")
    goal = (
        f"evaluation.every={trial.goal.every}",
        f"evaluation.stop_at={trial.goal.bar}",
        "evaluation.episodes=100",
    )
    tree = load(recipe, (f"seed={trial.seed}", *goal, *settings))
    tree["collector"]["total_frames"] = min(tree["collector"]["total_frames"], trial.goal.frames)
    job = prepare(tree, name=recipe.stem)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), job.tree)
        summary = run.finish(job.train(run))
        lines = read_metrics(run.path / "metrics.jsonl")
    return {
        "solved": summary["solved"],
        "frames": summary["frames"],
        "cpu_seconds": summary["train_cpu_seconds"],
        "final_return": summary["final_return"],
        "curve": [(m["step"], m["greedy_return"]) for m in lines if "greedy_return" in m],
    }


def zoo(trial: Trial) -> dict[str, Any]:
    """Train `cartpole-ppo` with the values of rl-zoo3."""
    return ours(trial, ZOO)

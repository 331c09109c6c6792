"""Trains every recipe arithmetic-* for two steps, on all ranks of torchrun."""

import math
import os
import sys
from pathlib import Path

from polopt.envs.contract import RewardError
from polopt.launch import llm_watch
from polopt.launch.job import prepare
from polopt.launch.peers import leave_group
from polopt.launch.recipe import RecipeError, load
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.launch.train import find_recipe, recipe_names

SMALL = (
    "task.train_size=200",
    "task.evaluation_size=16",
    "model.warmup_steps=200",
    "model.hidden_size=32",
    "trainer.per_device_train_batch_size=8",
    "trainer.gradient_accumulation_steps=2",
    "trainer.max_steps=2",
    "trainer.logging_steps=1",
    "trainer.save_strategy=no",
    "evaluation.every=null",
    "launch.processes=2",
)


def main(folder):
    for name in (n for n in recipe_names() if n.startswith("arithmetic-")):
        # A model of twenty steps is right so rarely that most groups carry no signal.
        more = ["algorithm.max_rounds=1"] if name == "arithmetic-dapo" else []
        tree = load(find_recipe(name), [*SMALL, *more])
        path = Path(folder) / name
        path.mkdir(exist_ok=True)
        job = prepare(tree, name=name)
        run = Run(path, job.tree, main=not int(os.environ["RANK"]))
        summary = job.train(run)
        if not int(os.environ["RANK"]):
            assert summary["steps"] == summary["world_size"] == 2, summary
            steps = [m for m in read_metrics(path / "metrics.jsonl") if "grad_norm" in m]
            assert [m["step"] for m in steps] == [1, 2], steps
            assert all(0 < m["grad_norm"] < math.inf for m in steps), (name, steps)
            print(f"{name} trained", flush=True)
    told_on_all_ranks(Path(folder) / "told")
    leave_group()


def told_on_all_ranks(path):
    """Let a reward fail on the second rank in an evaluation: both end with the same sentence."""
    path.mkdir(exist_ok=True)
    job = prepare(load(find_recipe("arithmetic-grpo"), SMALL), name="told")
    real = llm_watch.judge

    def judge(*args, **kwargs):
        if int(os.environ["RANK"]):
            raise RewardError("the reward 'mine' gave 'x' (str) to completion 0")
        return real(*args, **kwargs)

    llm_watch.judge = judge
    try:
        job.train(Run(path, job.tree, main=not int(os.environ["RANK"])))
    except RecipeError as error:
        print(f"told: {error}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

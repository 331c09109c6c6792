"""Trains every algorithm of the README's table for two steps, on all ranks of torchrun."""

import math
import os
import sys
from pathlib import Path

from polopt.launch.job import prepare
from polopt.launch.recipe import load
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.launch.train import find_recipe

ALGORITHMS = {
    "grpo": "{use: grpo}",
    "dr_grpo": "{use: dr_grpo, horizon: 4}",
    "gspo": "{use: gspo}",
    "cispo": "{use: cispo}",
    "sapo": "{use: sapo}",
    "gmpo": "{use: gmpo}",
    "rloo": "{use: rloo, kl_coef: 0.01}",
    "reinforce_pp": "{use: reinforce_pp}",
}
SMALL = (
    "task.train_size=200",
    "task.evaluation_size=16",
    "model.warmup_steps=20",
    "model.hidden_size=16",
    "trainer.per_device_train_batch_size=8",
    "trainer.gradient_accumulation_steps=2",
    "trainer.max_steps=2",
    "trainer.logging_steps=1",
    "trainer.save_strategy=no",
    "evaluation.every=null",
    "launch.processes=2",
)


def main(folder):
    for name, algorithm in ALGORITHMS.items():
        tree = load(find_recipe("arithmetic-dapo"), [*SMALL, f"algorithm={algorithm}"])
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


if __name__ == "__main__":
    main(sys.argv[1])

"""What the tests of text tasks share: the recipe arithmetic-dapo, made small, and a run of it."""

from polopt.launch.job import prepare
from polopt.launch.recipe import load
from polopt.launch.run import Run
from polopt.launch.train import find_recipe

SMALL = (
    "task.train_size=200",
    "task.evaluation_size=32",
    "model.warmup_steps=20",
    "model.hidden_size=16",
    "trainer.per_device_train_batch_size=16",
    "trainer.max_steps=4",
    "trainer.logging_steps=1",
    "evaluation.every=2",
    "algorithm.refill=reward",
)


def tree(*overrides):
    return load(find_recipe("arithmetic-dapo"), overrides)


def job(*overrides):
    return prepare(tree(*overrides), name="test")


def execute(job, path):
    path.mkdir()
    run = Run(path, job.tree)
    return run.finish(job.train(run))

"""One run of `polopt bench llm`, in a process of its own: a trainer, a seed, a budget."""

import json
import math
import sys
import tempfile
import time
import warnings
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging
from trl.trainer.grpo_trainer import GRPOTrainer

from polopt.ext.trl.evaluate import answer
from polopt.ext.trl.trainer import PolicyTrainer
from polopt.launch.job import prepare
from polopt.launch.llm import LlmJob
from polopt.launch.recipe import RecipeError, load
from polopt.launch.train import find_recipe

__all__ = ["TRAINERS", "job_of", "run"]

TRAINERS = ("polopt", "trl")

KINDS = {"greedy": 1, "sampled": 4}  # answers to each problem


def job_of(recipe: str, overrides: list[str], seed: int) -> LlmJob:
    """Return the job of a recipe whose algorithm TRL has as well.

    Raises:
        RecipeError: If the recipe is wrong, or its algorithm is not `dapo`.
    """
    fixed = [f"seed={seed}", "trainer.max_steps=1000000", "trainer.save_strategy=no"]
    job = prepare(load(find_recipe(recipe), [*overrides, *fixed]), name="bench")
    if not isinstance(job, LlmJob) or job.tree["algorithm"]["use"] != "dapo":
        raise RecipeError(f"{recipe!r} must train a language model with the algorithm dapo")
    return job


class _Clock(TrainerCallback):
    """Books the CPU seconds of training alone, evaluates, and ends at the budget.

    Attributes:
        curve: CPU seconds, optimizer steps, and accuracies by kind, at each evaluation.
    """

    def __init__(self, job: LlmJob, tokenizer: Any, *, every: float, budget: float) -> None:  # noqa: ANN401
        self._job, self._tokenizer, self._every, self._budget = job, tokenizer, every, budget
        self._rows = list(job.task.evaluation)[: job.evaluation.problems]
        self._spent = self._since = 0.0
        self._due = every
        self.curve: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ANN401
        """Evaluate the model that both trainers begin with."""
        self._look(0, more["model"])
        self._since = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ANN401
        """Evaluate when it is due; the clock stands still meanwhile."""
        self._spent += time.process_time() - self._since
        ends = self._spent >= self._budget
        if ends or self._spent >= self._due:
            self._look(state.global_step, more["model"])
            self._due = self._every * (1 + self._spent // self._every)
        control.should_training_stop |= ends
        self._since = time.process_time()

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ANN401
        """Evaluate a run that ended by itself, as one does when no group carries a signal."""
        if self.curve[-1]["step"] != state.global_step:
            self._look(state.global_step, more["model"])

    def _look(self, step: int, model: Any) -> None:  # noqa: ANN401
        point = {"cpu_seconds": self._spent, "step": step}
        for kind, draws in KINDS.items():
            answers = answer(
                model, self._tokenizer, self._job.task, self._rows * draws,
                sample=kind == "sampled", max_new_tokens=self._job.batch.max_length, seed=step,
            )  # fmt: skip
            point[kind] = answers.accuracy
        self.curve.append(point)


def run(trainer: str, job: LlmJob, *, every: float, budget: float) -> dict[str, Any]:
    """Train for a budget of CPU seconds.

    Args:
        trainer: `"polopt"`, or `"trl"` for TRL's own trainer with its DAPO loss, the same clip
            and the rest of the recipe.
        job: The recipe.
        every: CPU seconds of training between evaluations.
        budget: CPU seconds of training.

    Returns:
        `curve` (see `_Clock`), and the numbers of optimizer steps and generated answers.
    """
    source = str(job.model.make(job.task, lambda *_: None))
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
    clock = _Clock(job, tokenizer, every=every, budget=budget)
    with tempfile.TemporaryDirectory() as folder:
        config = job.config(output_dir=folder, seed=job.tree["seed"])
        shared = {
            "model": AutoModelForCausalLM.from_pretrained(source),
            "reward_funcs": list(job.task.rewards),
            "train_dataset": Dataset.from_list([dict(row) for row in job.task.train]),
            "processing_class": tokenizer,
            "callbacks": [clock],
        }
        if trainer == "polopt":
            made: GRPOTrainer = PolicyTrainer(
                args=config, algorithm=job.algorithm, correct_at=job.task.correct_at,
                **job.ours, **shared,
            )  # fmt: skip
        else:
            clip: Any = job.algorithm.objective.surrogate
            config.loss_type, config.epsilon, config.epsilon_high = "dapo", clip.low, clip.high
            made = GRPOTrainer(args=config, **shared)
        made.remove_callback(PrinterCallback)
        made.train()
    batch = job.batch.per_device * job.batch.accumulation
    steps = made.state.global_step
    cycles = math.ceil(steps * job.batch.accumulation / (job.batch.generate * job.batch.iterations))
    generated = getattr(made, "generated", cycles * job.batch.per_device * job.batch.generate)
    return {"curve": clock.curve, "steps": steps, "trained": steps * batch, "generated": generated}


if __name__ == "__main__":
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    wanted = job_of(given["recipe"], given["overrides"], given["seed"])
    result = run(given["trainer"], wanted, every=given["every"], budget=given["budget"])
    sys.stdout.write(json.dumps(result) + "\n")

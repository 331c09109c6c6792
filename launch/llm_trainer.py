"""The section `trainer` of a text task: fields of TRL's config, checked before there is a run."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polopt.envs.text import TextTask
from polopt.launch.peers import make_group
from polopt.launch.recipe import RecipeError, call, check_keys
from polopt.losses import Algorithm

if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

__all__ = ["OURS", "Batch", "check_section", "make_config"]

_OWNED = {
    "output_dir": "checkpoints go into the run folder",
    "seed": "set the recipe's 'seed'",
    "disable_tqdm": "the run shows its own progress",
    "resume_from_checkpoint": "use polopt train --resume RUN",
    "model_init_kwargs": "set them in 'model'",
    "use_cpu": "a GPU is used where there is one",
    "num_generations_eval": "evaluation is the section 'evaluation'",
    "eval_strategy": "evaluation is the section 'evaluation'",
    "hub_token": "the run folder would keep it: run hf auth login, or set HF_TOKEN",
    "eval_on_start": "the run evaluates before training, see the section 'evaluation'",
}

OURS = {"trim_padding": True, "accept_changed_data": False}
"""Fields that `PolicyTrainer` takes itself, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How TRL cuts batches, in answers.

    Attributes:
        per_device: In one micro-batch of one process.
        accumulation: Micro-batches in an optimizer step.
        generate: Micro-batches generated at a time.
        iterations: Passes over what was generated.
        group: Answers to each problem.
        max_length: Tokens in an answer, at most.
    """

    per_device: int
    accumulation: int
    generate: int
    iterations: int
    group: int
    max_length: int

    def per_generation(self, world: int) -> int:
        """Return how many answers are generated at a time on all processes."""
        return self.per_device * self.generate * world

    def check(self, world: int) -> None:
        """Refuse batches that do not hold whole groups.

        Raises:
            RecipeError: With the numbers and what to change.
        """
        if self.group < 2:
            raise RecipeError(
                f"'trainer.num_generations' must be at least 2, got {self.group}: a group of "
                "one answer has nothing to compare with"
            )
        whole = self.per_generation(world)
        if whole % self.group:
            raise RecipeError(
                f"the generation batch of {whole} answers (per_device_train_batch_size "
                f"{self.per_device} * steps_per_generation {self.generate} * processes {world}) is "
                f"not divisible by 'trainer.num_generations' {self.group}: change one of them"
            )


def check_section(
    given: Mapping[str, Any],
    world: int,
    spread: str | None,
    seed: int,
    algorithm: Algorithm,
    task: TextTask,
) -> tuple[dict[str, Any], Batch]:
    """Return the section with this job's defaults, and its batch sizes, after checking both.

    Args:
        given: The section as the recipe has it.
        world: Processes asked for.
        spread: How the model is spread over them, or none.
        seed: Of the recipe.
        algorithm: Must be one that `PolicyTrainer` trains, with these batches.
        task: Its rows and rewards must fit them too.

    Raises:
        RecipeError: With the field, its value and the mend.
    """
    import torch
    from trl.trainer.grpo_config import GRPOConfig

    from polopt.ext.trl.config import (
        check_algorithm,
        check_data,
        check_sampling,
        check_whole,
        check_windows,
        selects,
    )

    for key, reason in _OWNED.items():
        if key in given:
            raise RecipeError(f"'trainer.{key}' cannot be set here: {reason}")
    check_keys(given, (*GRPOConfig.__dataclass_fields__, *OURS), "trainer")
    defaults = {"logging_steps": 10, "report_to": "none", "save_total_limit": 2, **OURS}
    if not torch.cuda.is_available():
        defaults |= {"bf16": False, "dataloader_pin_memory": False}
    if spread == "fsdp2":
        # Else each process keeps gradients of the whole model while it accumulates.
        defaults["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    trainer = {**defaults, **given}

    for key in OURS:
        if not isinstance(trainer[key], bool):
            raise RecipeError(f"'trainer.{key}' must be true or false, got {trainer[key]!r}")

    # TRL checks batches against the processes that run now, and at first one plans for all.
    def number(key: str, default: int) -> int:
        value = trainer.get(key) if trainer.get(key) is not None else default
        if type(value) is not int or value < 1:
            raise RecipeError(f"'trainer.{key}' must be a whole number from 1, got {value!r}")
        return value

    accumulation = number("gradient_accumulation_steps", 1)
    per_device = number("per_device_train_batch_size", 8)
    generate = number("steps_per_generation", accumulation)
    if trainer.get("generation_batch_size") is not None:
        if trainer.get("steps_per_generation") is not None:
            raise RecipeError(
                "'trainer.generation_batch_size' and 'trainer.steps_per_generation' say the same "
                "thing: set one of them"
            )
        generate = number("generation_batch_size", 1) // (per_device * world)
        if generate * per_device * world != trainer["generation_batch_size"]:
            raise RecipeError(
                f"'trainer.generation_batch_size' {trainer['generation_batch_size']} must be a "
                f"multiple of per_device_train_batch_size {per_device} * processes {world}"
            )
    batch = Batch(
        per_device=per_device,
        accumulation=accumulation,
        generate=generate,
        iterations=number("num_iterations", 1),
        group=number("num_generations", 8),
        max_length=number("max_completion_length", 512),
    )
    batch.check(world)
    weights = trainer.get("reward_weights")
    fits = isinstance(weights, list) and len(weights) == len(task.rewards)
    if weights is not None and not (fits and all(map(_is_finite, weights))):
        raise RecipeError(
            f"'trainer.reward_weights' must have one finite number for each of the task's "
            f"{len(task.rewards)} rewards, got {weights}"
        )
    config = make_config({**trainer, "per_device_train_batch_size": per_device * world}, seed=seed)
    trainer.setdefault("save_strategy", "steps")
    # Only between generations a checkpoint resumes exactly.
    cycle = max(batch.generate * batch.iterations // batch.accumulation, 1)
    trainer.setdefault("save_steps", cycle * -(-100 // cycle))
    try:
        check_algorithm(algorithm)
        check_whole(algorithm, sharded=spread not in (None, "ddp"))
        check_sampling(config, algorithm, task.train, world)
        zero = str(spread).startswith("zero")
        check_windows(config, deepspeed=zero, selects=selects(algorithm))
    except ValueError as error:
        raise RecipeError(f"algorithm: {error}") from error
    try:
        check_data(config, task.train)
    except ValueError as error:  # of rows that cannot be counted, too
        raise RecipeError(f"task: {error}") from error
    return trainer, batch


def make_config(trainer: Mapping[str, Any], **owned: Any) -> "GRPOConfig":  # noqa: ANN401
    """Return TRL's config for a section `trainer`.

    Args:
        trainer: The section.
        **owned: Fields that the recipe cannot set; those that this TRL lacks are left out.

    Raises:
        RecipeError: If TRL refuses a field, or one belongs to the algorithm.
    """
    import torch
    from trl.trainer.grpo_config import GRPOConfig

    from polopt.ext.trl.config import check_config

    known = GRPOConfig.__dataclass_fields__
    values = {
        "output_dir": "unused",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        **{key: value for key, value in owned.items() if key in known},
        **{key: value for key, value in trainer.items() if key not in OURS},
    }
    with warnings.catch_warnings():  # TRL still uses names that transformers renames
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        if values["use_cpu"]:
            make_group(values.get("ddp_timeout", known["ddp_timeout"].default))
        config = call(GRPOConfig, values, "trainer")
    _check_ranges(config)
    try:
        check_config(config)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return config


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _check_ranges(config: "GRPOConfig") -> None:
    """Refuse numbers that TRL takes and then fails on, or silently trains nothing with.

    Raises:
        RecipeError: With the field, its value and what it may be.
    """
    least_zero = {"learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"}
    positive = {"temperature", "top_p", "num_train_epochs", "save_steps", "logging_steps",
                "ddp_timeout"}  # fmt: skip
    for key in (*least_zero, *positive):
        value = getattr(config, key)
        if not isinstance(value, int | float):
            continue
        if not math.isfinite(value) or value < 0 or (key in positive and value == 0):
            wanted = "positive" if key in positive else "at least 0"
            raise RecipeError(f"'trainer.{key}' must be finite and {wanted}, got {value}")
    if config.top_p > 1:
        raise RecipeError(f"'trainer.top_p' must be in (0, 1], got {config.top_p}")
    if config.max_steps < 1 and config.max_steps != -1:
        raise RecipeError(f"'trainer.max_steps' must be at least 1, got {config.max_steps}")

"""The rows and rewards of a text task in a run: checked before it, told at its start and end."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polopt.envs.dataset import DatasetTask, Rows
from polopt.envs.isolation import Isolated
from polopt.envs.prompts import lengths
from polopt.envs.text import TextTask
from polopt.launch.files import write_json
from polopt.launch.recipe import RecipeError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = [
    "check_files",
    "check_lengths",
    "check_rows",
    "close_rewards",
    "describe",
    "held_out_rows",
    "record_rows",
    "training_rows",
]


def check_rows(task: TextTask) -> dict[str, Any] | None:
    """Read and check all rows of a task that has files.

    Returns:
        Counts of what was left out, or None for a task that makes its rows.

    Raises:
        RecipeError: If the rows cannot be read, or a reward cannot work with them.
    """
    if not isinstance(task, DatasetTask):
        return None
    try:
        return task.check()
    except ValueError as error:
        raise RecipeError(f"task: {error}") from error


def check_files(task: TextTask) -> None:
    """Refuse files of rows that are not here, without reading any.

    Raises:
        RecipeError: With the first that is missing.
    """
    for rows in (task.train, task.evaluation):
        if isinstance(rows, Rows):
            try:
                rows.check_files()
            except ValueError as error:
                raise RecipeError(f"task: {error}") from error


def check_lengths(prompts: Sequence[Any], tokenizer: Any, config: Any) -> None:  # noqa: ANN401
    """Refuse prompts that are longer than what the model can read.

    Args:
        prompts: Texts, or conversations.
        tokenizer: The model's.
        config: The model's; nothing is refused where it names no limit.

    Raises:
        RecipeError: With the longest prompt, the limit, and what to set.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None:
        return
    # Yarn and the like read further than the model was pretrained for.
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    start = rope.get("original_max_position_embeddings") or limit
    limit = max(limit, int(start * (rope.get("factor") or 1)))
    found = lengths(prompts, tokenizer)
    longer = sum(length > limit for length in found)
    if longer:
        raise RecipeError(
            f"task: {longer} of {len(found)} prompts are longer than the {limit} tokens that the "
            f"model can read, the longest has {max(found)}: set task.max_prompt_length (and "
            "task.tokenizer), or take another model"
        )


def record_rows(report: Mapping[str, Any], folder: Path) -> None:
    """Write the counts into a run folder, and tell them on stderr."""
    write_json(folder / "data.json", dict(report))
    print(describe(report), file=sys.stderr)


def describe(report: Mapping[str, Any]) -> str:
    """Return the counts as a sentence."""
    train, evaluation = report["train"], report["evaluation"]
    parts = [
        f"data: {train['kept'] - train.get('held_out', 0)} of {train['rows']} rows to train on"
    ]
    if train["empty"] or train["too_long"]:
        parts.append(
            f"{100 * train['share_dropped']:.1f} % dropped ({train['too_long']} too long, "
            f"{train['empty']} without a prompt or an answer)"
        )
    if train["cut"]:
        parts.append(f"{train['cut']} prompts cut")
    parts.append(f"{evaluation['kept']} held out")
    if report["evaluated_and_trained"]:
        parts.append(f"{report['evaluated_and_trained']} of these are also trained on")
    return ", ".join(parts)


def training_rows(task: TextTask) -> "Dataset":
    """Return the rows to train on as TRL takes them."""
    from datasets import Dataset

    if isinstance(task.train, Rows):
        return task.train.dataset
    return Dataset.from_list([dict(row) for row in task.train])


def held_out_rows(task: TextTask, limit: int | None) -> list[Mapping[str, Any]]:
    """Return the rows for evaluation, at most `limit` of them.

    Raises:
        RecipeError: If they cannot be read.
    """
    try:
        return list(task.evaluation)[:limit]
    except ValueError as error:
        raise RecipeError(f"task: {error}") from error


def close_rewards(task: TextTask) -> dict[str, dict[str, int]]:
    """End the workers of a task's rewards on this rank.

    Returns:
        For each isolated reward how many samples it scored and failed to score, by cause.
    """
    found = {}
    for reward in task.rewards:
        if isinstance(reward, Isolated):
            reward.close()
            found[reward.__name__] = {"scored": reward.scored, **reward.failures}
    return found

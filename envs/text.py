"""Text tasks: problems, rewards, and what counts as a correct answer."""

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polopt.envs.contract import Reward, checked, is_async, text_of

__all__ = ["Reward", "TextTask", "arithmetic"]


@dataclass(frozen=True, kw_only=True)
class TextTask:
    """Problems in text and the functions that score answers to them.

    Attributes:
        name: Short name, for folders and logs.
        train: Rows to train on. Each has a `"prompt"`; its other entries reach the rewards.
        evaluation: Held-out rows with the same columns. No prompt of theirs is trained on.
        rewards: Functions that score completions. The first one verifies the answer.
        correct_at: An answer is correct when the first reward gives at least this much.
        extract: Takes the final answer out of a completion, None where there is none; by
            default the whole completion is the answer. Majority votes count what it returns.

    Raises:
        ValueError: If a part is empty, rows lack a prompt, or the two sets share a prompt.
    """

    name: str
    train: Sequence[Mapping[str, Any]]
    evaluation: Sequence[Mapping[str, Any]]
    rewards: Sequence[Reward]
    correct_at: float = 1.0
    extract: Callable[[str], str | None] | None = None

    def __post_init__(self) -> None:
        for part in ("train", "evaluation", "rewards"):
            if not getattr(self, part):
                raise ValueError(f"task {self.name!r}: {part} is empty")
        for part in ("train", "evaluation"):
            for i, row in enumerate(getattr(self, part)):
                if "prompt" not in row:
                    raise ValueError(
                        f"task {self.name!r}: {part}[{i}] has no 'prompt', only {sorted(row)}"
                    )
        shared = {repr(r["prompt"]) for r in self.train} & {
            repr(r["prompt"]) for r in self.evaluation
        }
        if shared:
            raise ValueError(
                f"task {self.name!r}: {len(shared)} prompts are in train and in evaluation, "
                f"for example {min(shared)}"
            )

    def correct(self, rows: Sequence[Mapping[str, Any]], completions: Sequence[str]) -> list[bool]:
        """Tell which completions answer their row correctly.

        Args:
            rows: N rows of this task.
            completions: N answers to them, as text.
        """
        if not rows:
            return []
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        prompts = columns.pop("prompt")
        reward = checked(self.rewards[0])
        scores = reward(prompts=prompts, completions=list(completions), **columns)
        if is_async(reward):
            scores = asyncio.run(scores)
        return [score is not None and score >= self.correct_at for score in scores]

    def final_answer(self, completion: str) -> str:
        """Return what a completion answers, to be compared with other completions."""
        found = None if self.extract is None else self.extract(completion)
        return (completion if found is None else found).strip()


def arithmetic(
    *,
    train_size: int = 2000,
    evaluation_size: int = 256,
    terms: tuple[int, int] = (3, 3),
    digits: tuple[int, int] = (1, 1),
    seed: int = 0,
) -> TextTask:
    """Sums and differences of small numbers, from reasoning-gym's `chain_sum`.

    A prompt is the bare expression, `"3 - 9 + 4 ="`; the reward is reasoning-gym's
    `score_answer`. Each problem occurs once. A hash of its prompt, and nothing else, says
    whether it is for training or held out, so no seed or size moves a problem across.

    Args:
        train_size: Number of training problems.
        evaluation_size: Number of held-out problems.
        terms: Fewest and most numbers in an expression.
        digits: Fewest and most digits of a number.
        seed: Seed of the draw.

    Raises:
        ValueError: If a size is not positive or there are not that many problems.
        ModuleNotFoundError: If reasoning-gym is not installed.
    """
    for name, size in (("train_size", train_size), ("evaluation_size", evaluation_size)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    problems = _reasoning_gym(
        "chain_sum",
        min_terms=terms[0],
        max_terms=terms[1],
        min_digits=digits[0],
        max_digits=digits[1],
        seed=seed,
        size=2**31,  # nothing is made before it is asked for
    )
    sizes = {False: train_size, True: evaluation_size}
    rows: dict[bool, dict[str, dict[str, str]]] = {False: {}, True: {}}
    idle = 0
    for problem in problems:
        prompt = f"{problem['metadata']['expression']} ="
        part = held_out(prompt)
        idle += 1
        if prompt not in rows[part] and len(rows[part]) < sizes[part]:
            rows[part][prompt] = {"prompt": prompt, "answer": problem["answer"]}
            idle = 0
        found = len(rows[False]) + len(rows[True])
        # So many draws without a new problem: there are hardly any others.
        if found == train_size + evaluation_size or idle > 20 * (found + 100):
            break
    for name, part in (("train_size", False), ("evaluation_size", True)):
        if len(rows[part]) < sizes[part]:
            raise ValueError(
                f"{name}={sizes[part]}, but arithmetic with terms={terms} and digits={digits} "
                f"has only {len(rows[part])} such problems: ask for fewer, or for longer ones"
            )

    def score_answer(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:  # noqa: ANN401
        return [
            problems.score_answer(text_of(completion).strip(), {"answer": expected})
            for completion, expected in zip(completions, answer, strict=True)
        ]

    return TextTask(
        name="arithmetic",
        train=list(rows[False].values()),
        evaluation=list(rows[True].values()),
        rewards=[score_answer],
    )


def held_out(prompt: str, share: float = 0.2) -> bool:
    """Tell whether a prompt belongs to the held-out problems.

    Args:
        prompt: The text.
        share: Expected share of the prompts that is held out.
    """
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _reasoning_gym(name: str, **config: Any) -> Any:  # noqa: ANN401
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this task needs reasoning-gym: pip install 'polopt[trl]'", name=error.name
        ) from None
    try:
        return reasoning_gym.create_dataset(name, **config)
    except AssertionError as error:
        raise ValueError(f"reasoning-gym refuses {name} with {config}: {error}") from None

"""Text tasks: problems, rewards, and what counts as a correct answer."""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polopt.envs.contract import Reward, checked, is_async, text_of
from polopt.envs.isolation import isolated
from polopt.envs.rewards import ReasoningGym, make_problems

__all__ = ["Reward", "TextTask", "arithmetic", "reasoning_gym"]


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
    problems = make_problems(
        "chain_sum",
        min_terms=terms[0],
        max_terms=terms[1],
        min_digits=digits[0],
        max_digits=digits[1],
        seed=seed,
        size=2**31,  # nothing is made before it is asked for
    )
    rows = (
        {"prompt": f"{problem['metadata']['expression']} =", "answer": problem["answer"]}
        for problem in problems
    )
    what = f"arithmetic with terms={terms} and digits={digits}"
    train, evaluation = _deal(rows, train_size, evaluation_size, what)

    def score_answer(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:  # noqa: ANN401
        return [
            problems.score_answer(text_of(completion).strip(), {"answer": expected})
            for completion, expected in zip(completions, answer, strict=True)
        ]

    return TextTask(
        name="arithmetic",
        train=train,
        evaluation=evaluation,
        rewards=[score_answer],
    )


def reasoning_gym(
    *,
    dataset: str,
    settings: Mapping[str, Any] | None = None,
    train_size: int = 2000,
    evaluation_size: int = 256,
    seed: int = 0,
    system_prompt: str | None = None,
    reward_timeout: float | None = 30.0,
    reward_workers: int = 2,
) -> TextTask:
    """Problems of any dataset of reasoning-gym, scored by its own verifier.

    What stands in the last `<answer>…</answer>` is scored, or without tags the whole completion.
    Problems are held out as in `arithmetic`.

    Args:
        dataset: Its name in reasoning-gym, for example `"countdown"`.
        settings: Its settings there.
        train_size: Number of training problems.
        evaluation_size: Number of held-out problems.
        seed: Seed of the draw.
        system_prompt: Makes prompts conversations that begin with this message of the system.
        reward_timeout: Seconds that a verifier may take, see `polopt.envs.isolation.isolated`;
            None: it runs in the trainer.
        reward_workers: Processes for it, per rank.

    Raises:
        ValueError: If reasoning-gym refuses, or there are not that many problems.
        ModuleNotFoundError: If reasoning-gym is not installed.
    """
    # As long as it can be: nothing is made before it is asked for.
    drawn = {"seed": seed, "size": 2**31}
    reward = ReasoningGym(dataset=dataset, settings={**(settings or {}), **drawn})
    rows = (
        {"prompt": problem["question"], "answer": problem["answer"], "index": i}
        for i, problem in enumerate(reward.problems())
    )
    train, evaluation = _deal(rows, train_size, evaluation_size, f"{dataset} with {settings}")
    if system_prompt is not None:
        first = {"role": "system", "content": system_prompt}
        for row in (*train, *evaluation):
            row["prompt"] = [first, {"role": "user", "content": row["prompt"]}]
    guarded: Reward = reward
    if reward_timeout is not None:
        guarded = isolated(reward, timeout=reward_timeout, workers=reward_workers)
    return TextTask(
        name=dataset,
        train=train,
        evaluation=evaluation,
        rewards=[guarded],
        extract=reward.extract,
    )


def _deal(
    rows: Iterable[dict[str, Any]], train_size: int, evaluation_size: int, what: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows to train on and held-out ones, each prompt once."""
    sizes = {False: train_size, True: evaluation_size}
    names = {False: "train_size", True: "evaluation_size"}
    for part, size in sizes.items():
        if size < 1:
            raise ValueError(f"{names[part]} must be at least 1, got {size}")
    kept: dict[bool, dict[str, dict[str, Any]]] = {False: {}, True: {}}
    idle = 0
    for row in rows:
        part = held_out(row["prompt"])
        idle += 1
        if row["prompt"] not in kept[part] and len(kept[part]) < sizes[part]:
            kept[part][row["prompt"]] = row
            idle = 0
        found = len(kept[False]) + len(kept[True])
        # So many draws without a new problem: there are hardly any others.
        if found == train_size + evaluation_size or idle > 20 * (found + 100):
            break
    for part, size in sizes.items():
        if len(kept[part]) < size:
            raise ValueError(
                f"{names[part]}={size}, but {what} has only {len(kept[part])} such problems: ask "
                "for fewer, or for longer ones"
            )
    return list(kept[False].values()), list(kept[True].values())


def held_out(prompt: str, share: float = 0.2) -> bool:
    """Tell whether a prompt belongs to the held-out problems.

    Args:
        prompt: The text.
        share: Expected share of the prompts that is held out.
    """
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64

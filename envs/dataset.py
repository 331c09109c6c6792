"""A text task of rows in files or on the Hugging Face hub."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polopt.envs.contract import Reward, import_reward, name_of
from polopt.envs.isolation import Isolated, isolated
from polopt.envs.prompts import Prompts, digest, hold_out, read
from polopt.envs.rewards import BySource, FromFile
from polopt.envs.rows import Source
from polopt.envs.text import TextTask

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["DatasetTask", "Rows", "dataset"]


class Rows(Sequence[Mapping[str, Any]]):
    """Rows that are read on first use.

    Before that, `len` is the number of rows in the files, 0 if they are not here, so that a
    recipe can be checked on a machine that does not have them.

    Args:
        read: Returns the dataset and counts of what was left out.
        count: Returns the number of rows in the files.
        check_files: Refuses files that are not here, see `polopt.envs.rows.Source.check_files`.
    """

    def __init__(
        self,
        read: Callable[[], tuple["Dataset", dict[str, Any]]],
        count: Callable[[], int],
        check_files: Callable[[], None],
    ) -> None:
        self.check_files = check_files
        self._read, self._count = read, count
        self._loaded: tuple[Dataset, dict[str, Any]] | None = None

    def _all(self) -> tuple["Dataset", dict[str, Any]]:
        if self._loaded is None:
            self._loaded = self._read()
        return self._loaded

    @property
    def dataset(self) -> "Dataset":
        """The rows as a `datasets.Dataset`."""
        return self._all()[0]

    @property
    def report(self) -> dict[str, Any]:
        """Counts of what was left out, see `polopt.envs.prompts.read`."""
        return self._all()[1]

    def __len__(self) -> int:
        return self._count() if self._loaded is None else len(self.dataset)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.dataset)  # type: ignore[return-value]

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
        if isinstance(index, slice):
            return list(self.dataset.select(range(*index.indices(len(self.dataset)))))
        return self.dataset[index]


@dataclass(frozen=True, kw_only=True)
class DatasetTask(TextTask):
    """A text task whose rows are read on first use; `check` reads and checks all of them."""

    def __post_init__(self) -> None:
        """Check nothing yet: the rows may be on another machine."""

    def check(self) -> dict[str, Any]:
        """Read all rows, and refuse rewards that cannot work with them.

        Returns:
            For `train` and `evaluation` the counts of `polopt.envs.prompts.read`, and
            `evaluated_and_trained`: how many held-out prompts are also trained on.

        Raises:
            ValueError: If the rows cannot be read, or a reward lacks a column.
        """
        return self._report

    @functools.cached_property
    def _report(self) -> dict[str, Any]:
        train, evaluation = self.train.dataset, self.evaluation.dataset  # type: ignore[attr-defined]
        kinds = [type(rows[0]["prompt"]) for rows in (train, evaluation)]
        if kinds[0] is not kinds[1]:
            names = ["texts" if kind is str else "conversations" for kind in kinds]
            raise ValueError(
                f"the prompts to train on are {names[0]}, and those for evaluation {names[1]}: "
                "give both in one form, for example by chat=true"
            )
        for rows in (train, evaluation):
            for reward in self.rewards:
                _check_reward(reward, rows)
        known = {digest(prompt) for prompt in train["prompt"][:]}
        shared = sum(digest(prompt) in known for prompt in evaluation["prompt"][:])
        return {
            "train": self.train.report,  # type: ignore[attr-defined]
            "evaluation": self.evaluation.report,  # type: ignore[attr-defined]
            "evaluated_and_trained": shared,
        }


def _check_reward(reward: Any, rows: "Dataset") -> None:  # noqa: ANN401
    inner = reward.reward if isinstance(reward, Isolated) else reward
    columns = [name for name in rows.column_names if name != "prompt"]
    given = dict.fromkeys(["prompts", "completions", "completion_ids", *columns])
    if not isinstance(reward, Isolated):
        given |= dict.fromkeys(["trainer_state", "log_extra", "log_metric"])
    try:
        inspect.signature(inner).bind(**given)
    except TypeError as error:
        raise ValueError(
            f"the reward {name_of(reward)!r} cannot be called: {error}; a reward gets prompts, "
            f"completions, completion_ids and the columns {', '.join(columns) or '(none)'}"
        ) from error
    if isinstance(inner, FromFile):
        inner.check()
    if not isinstance(inner, BySource):
        return
    if inner.source_key not in columns:
        raise ValueError(
            f"the rows have no column {inner.source_key!r}, by which a reward could be chosen: "
            "name the rewards, for example rewards=[{use: MathVerify}]"
        )
    inner.check({str(source) for source in rows[inner.source_key][:]})


def dataset(
    *,
    train_files: list[str] | None = None,
    eval_files: list[str] | None = None,
    name: str | None = None,
    config: str | None = None,
    train_split: str = "train",
    eval_split: str | None = None,
    held_out: float = 0.01,
    train_limit: int | None = None,
    eval_limit: int | None = None,
    prompt_key: str = "prompt",
    answer_key: str | None = None,
    source_key: str = "data_source",
    system_prompt: str | None = None,
    chat: bool = False,
    tokenizer: str | None = None,
    max_prompt_length: int | None = None,
    overlong_prompts: Literal["drop", "cut", "refuse"] = "drop",
    rewards: list[Callable[..., Any] | str] | None = None,
    reward_timeout: float | None = 30.0,
    reward_workers: int = 2,
    correct_at: float = 1.0,
) -> DatasetTask:
    """Rows of files or of the hub, as prepared for verl or for TRL.

    The column named by `prompt_key` becomes `prompt`, that named by `answer_key` becomes
    `answer`; all columns reach the rewards. Files are read when training starts.

    Args:
        train_files: Parquet, JSON or JSON-lines files; `~`, `$NAME` and `*` are expanded.
        eval_files: Likewise, for evaluation.
        name: Instead of files, a dataset on the Hugging Face hub, or a folder of one.
        config: Its configuration.
        train_split: Its split to train on.
        eval_split: Its split for evaluation.
        held_out: Share of the training prompts that is held out where no files and no split are
            named for evaluation.
        train_limit: Rows used to train, at most.
        eval_limit: Rows used for evaluation, at most.
        prompt_key: Column of the prompts: texts, or conversations.
        answer_key: Column of the right answers, `a.b` for an entry of one; by default
            `reward_model.ground_truth` where it exists, as in verl's files.
        source_key: Column that chooses the reward where none are named.
        system_prompt: Message of the system put before each prompt.
        chat: Make texts conversations of one message of the user. A system prompt does.
        tokenizer: Model whose tokenizer and chat template measure prompts.
        max_prompt_length: Longest prompt, tokens.
        overlong_prompts: What happens to longer ones.
        rewards: Rewards, or names `module:function` of some; the first one verifies the answer.
            By default the answer is verified as `source_key` asks for.
        reward_timeout: Seconds that the reward of a completion may take. Then, or when it
            raises or crashes, the sample is left out. None: rewards run in the trainer, where a
            fault ends the run.
        reward_workers: Processes for the rewards, per rank; each reward has its own.
        correct_at: An answer is correct when the first reward gives at least this much.

    Raises:
        ValueError: If settings do not go together, or a reward cannot be found.
    """
    if (name is None) == (not train_files):
        raise ValueError("give train_files, or the name of a dataset on the hub, and not both")
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out must be in (0, 1), got {held_out}")
    for key, value in (("train_limit", train_limit), ("eval_limit", eval_limit)):
        if value is not None and value < 1:
            raise ValueError(f"{key} must be at least 1, got {value}")
    how = Prompts(
        prompt_key=prompt_key,
        answer_key=answer_key,
        system_prompt=system_prompt,
        chat=chat,
        tokenizer=tokenizer,
        max_prompt_length=max_prompt_length,
        overlong_prompts=overlong_prompts,
    )
    source = Source(files=tuple(train_files or ()), name=name, config=config, split=train_split)
    other = None
    if eval_files:
        other = Source(files=tuple(eval_files))
    elif eval_split is not None:
        if name is None:
            raise ValueError("eval_split goes with the name of a dataset, not with files")
        other = Source(name=name, config=config, split=eval_split)
    train, evaluation = _parts(source, other, how, train_limit, eval_limit, held_out)
    found = [import_reward(r) if isinstance(r, str) else r for r in rewards or []]
    found = found or [BySource(source_key=source_key)]
    guarded: list[Reward] = list(found)
    if reward_timeout is not None:
        guarded = [
            reward
            if isinstance(reward, Isolated) or getattr(reward, "in_trainer", False)
            else isolated(reward, timeout=reward_timeout, workers=reward_workers)
            for reward in found
        ]
    return DatasetTask(
        name=Path(name or source.files[0]).name.split(".")[0].replace("*", ""),
        train=train,
        evaluation=evaluation,
        rewards=guarded,
        correct_at=correct_at,
        extract=getattr(found[0], "extract", None),
    )


def _parts(
    source: Source,
    other: Source | None,
    how: Prompts,
    train_limit: int | None,
    eval_limit: int | None,
    held_out: float,
) -> tuple[Rows, Rows]:
    """Return the rows to train on, and those for evaluation."""

    def at_most(limit: int | None, count: int) -> int:
        return count if limit is None else min(limit, count)

    def train_count() -> int:
        return at_most(train_limit, source.count())

    if other is not None:
        return (
            Rows(lambda: read(source, how, train_limit), train_count, source.check_files),
            Rows(
                lambda: read(other, how, eval_limit),
                lambda: at_most(eval_limit, other.count()),
                other.check_files,
            ),
        )

    @functools.cache
    def halves() -> tuple[tuple["Dataset", dict[str, Any]], ...]:
        whole, report = read(source, how, train_limit)
        train, kept = hold_out(whole, held_out)
        if eval_limit is not None:
            kept = kept.select(range(min(eval_limit, len(kept))))
        return (train, {**report, "held_out": len(whole) - len(train)}), (kept, {"kept": len(kept)})

    def held() -> int:
        return at_most(eval_limit, round(held_out * train_count()))

    return (
        Rows(lambda: halves()[0], lambda: train_count() - held(), source.check_files),
        Rows(lambda: halves()[1], held, source.check_files),
    )

"""Text tasks from the files of verl: parquet or JSON rows with a reward of their own.

A row of verl has `prompt` (a list of messages), `data_source`, `reward_model.ground_truth` and
`extra_info`. Files are read when the first row is asked for, so that a recipe can be checked
on a machine that does not have them.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from polopt.envs.text import Reward, TextTask
from polopt.launch.recipe import RecipeError
from polopt.losses import soft_overlong

__all__ = ["VerlTask", "from_file", "rows", "score_gsm8k"]

_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
Score = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class VerlTask(TextTask):
    """A text task whose rows are read on first use."""

    def __post_init__(self) -> None:
        """Check nothing yet: the rows may be on another machine."""


def rows(
    *,
    train_files: list[str],
    eval_files: list[str],
    tokenizer: str,
    prompt_key: str = "prompt",
    source_key: str = "data_source",
    max_prompt_length: int | None = None,
    train_limit: int | None = None,
    eval_limit: int | None = None,
    reward: Score | None = None,
    overlong: Mapping[str, int] | None = None,
    correct_at: float = 1.0,
) -> TextTask:
    """Return the task in files that verl reads.

    Args:
        train_files: Parquet, JSON or JSON-lines files; `~` and `$NAME` are expanded.
        eval_files: Likewise; without any the last 1 % of the training rows are held out.
        tokenizer: Folder or name of the model whose chat template measures prompts.
        prompt_key: Column of the prompts.
        source_key: Column that chooses the reward.
        max_prompt_length: Longer prompts (tokens, template included) are dropped.
        train_limit: Rows used of the training files, at most.
        eval_limit: Likewise for evaluation.
        reward: `f(data_source, solution_str, ground_truth, extra_info)` as in verl, returning
            a number or a mapping with `score`. None: by `data_source`; GSM8K is built in.
        overlong: `limit` and `cache` of DAPO's penalty for long answers, in tokens.
        correct_at: An answer counts as correct from this score on.
    """
    if not train_files:
        raise RecipeError("task.train_files is empty: name at least one parquet or JSON file")
    length = _Length(tokenizer, max_prompt_length) if max_prompt_length else None
    train: Sequence[Mapping[str, Any]] = _Rows(train_files, prompt_key, length, train_limit)
    evaluation: Sequence[Mapping[str, Any]]
    if eval_files:
        evaluation = _Rows(eval_files, prompt_key, length, eval_limit)
    else:
        evaluation, train = _Part(train, held_out=True), _Part(train, held_out=False)
    rewards: list[Reward] = [_Scores(reward or _by_source, source_key)]
    if overlong is not None:
        rewards.append(_Overlong(**overlong))
    return VerlTask(
        name="verl",
        train=train,
        evaluation=evaluation,
        rewards=rewards,
        correct_at=correct_at,
    )


def from_file(*, path: str, name: str = "compute_score") -> Score:
    """Return a reward function of verl from its file, which is run when it is first called.

    Args:
        path: A Python file.
        name: The function in it.
    """
    found: list[Score] = []

    def score(**arguments: Any) -> Any:  # noqa: ANN401
        if not found:
            found.append(_load(path, name))
        return found[0](**arguments)

    return score


def _load(path: str, name: str) -> Score:
    file = _expanded(path)
    spec = importlib.util.spec_from_file_location("verl_reward", file)
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise RecipeError(f"task.reward.path: there is no Python file {path!r}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise RecipeError(f"task.reward.name: {path} has no function {name!r}")
    return function


def score_gsm8k(solution: str, ground_truth: str) -> float:
    """Return 1 if the number behind the last `####` is the right one, else 0."""
    found = _ANSWER.findall(solution)
    if not found:
        return 0.0
    return float(found[-1].replace(",", "").rstrip(".") == str(ground_truth).replace(",", ""))


def _by_source(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any,  # noqa: ANN401
) -> float:
    if str(data_source).rsplit("/", 1)[-1] == "gsm8k":
        return score_gsm8k(solution_str, ground_truth)
    raise RecipeError(
        f"there is no built-in reward for data_source {data_source!r}: give one with "
        "task.reward={use: polopt.launch.verl.task:from_file, path: reward.py}"
    )


class _Scores:
    """Calls a reward of verl once per completion."""

    __name__ = "score"

    def __init__(self, function: Score, source_key: str) -> None:
        self._function, self._source_key = function, source_key

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:  # noqa: ANN401
        scores = []
        for i, completion in enumerate(completions):
            truth = columns.get("reward_model", [{}] * len(completions))[i] or {}
            found = self._function(
                data_source=columns.get(self._source_key, [""] * len(completions))[i],
                solution_str=_text(completion),
                ground_truth=truth.get("ground_truth"),
                extra_info=columns.get("extra_info", [None] * len(completions))[i],
            )
            scores.append(float(found["score"] if isinstance(found, Mapping) else found))
        return scores


class _Overlong:
    """DAPO's penalty for long answers: 0 up to `limit - cache` tokens, then down to -1."""

    __name__ = "overlong"

    def __init__(self, limit: int, cache: int) -> None:
        if not 0 < cache <= limit:
            raise RecipeError(f"task.overlong: cache must be in [1, limit={limit}], got {cache}")
        self._limit, self._cache = limit, cache

    def __call__(self, completion_ids: Sequence[Any], **_: Any) -> list[float]:  # noqa: ANN401
        length = torch.tensor([len(ids) for ids in completion_ids])
        return soft_overlong(length, limit=self._limit, cache=self._cache).tolist()


class _Length:
    """Whether a prompt fits, by the chat template of a model."""

    def __init__(self, tokenizer: str, limit: int) -> None:
        self.name, self.limit = tokenizer, limit
        self._tokenizer: Any = None

    def fits(self, prompt: Any) -> bool:  # noqa: ANN401
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(_expanded(self.name))
        if isinstance(prompt, str):
            return len(self._tokenizer(prompt)["input_ids"]) <= self.limit
        text = self._tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=False
        )
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"]) <= self.limit


class _Rows(Sequence[Mapping[str, Any]]):
    """Rows of files, read on first use; before that the length is that of the files."""

    def __init__(
        self, files: list[str], prompt_key: str, length: _Length | None, limit: int | None
    ) -> None:
        self.files, self._key, self._length, self._limit = files, prompt_key, length, limit
        self._loaded: list[Mapping[str, Any]] | None = None
        self.dropped = 0

    def _rows(self) -> list[Mapping[str, Any]]:
        if self._loaded is None:
            found = [row for file in self.files for row in _read(file)]
            found = found[: self._limit]
            for i, row in enumerate(found):
                if self._key not in row:
                    raise RecipeError(
                        f"row {i} of {self.files[0]} has no column {self._key!r}, only "
                        f"{sorted(row)}: set task.prompt_key"
                    )
            named = [
                {"prompt": row[self._key], **{k: v for k, v in row.items() if k != self._key}}
                for row in found
            ]
            self._loaded = [r for r in named if not self._length or self._length.fits(r["prompt"])]
            self.dropped = len(named) - len(self._loaded)
            if not self._loaded:
                raise RecipeError(
                    f"no row of {', '.join(self.files)} is left of {len(named)}: "
                    "task.max_prompt_length is too small, or the files are empty"
                )
        return self._loaded

    def __len__(self) -> int:
        if self._loaded is not None:
            return len(self._loaded)
        if not all(Path(_expanded(f)).is_file() for f in self.files):
            return 0
        return len(self._rows()) if self._length is None else sum(map(_count, self.files))

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows())

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
        return self._rows()[index]


class _Part(Sequence[Mapping[str, Any]]):
    """The last 1 % of rows, or the rest."""

    def __init__(self, whole: Sequence[Mapping[str, Any]], *, held_out: bool) -> None:
        self._whole, self._held_out = whole, held_out

    def _cut(self) -> int:
        return len(self._whole) - max(len(self._whole) // 100, 1)

    def _rows(self) -> list[Mapping[str, Any]]:
        rows = list(self._whole)
        return rows[self._cut() :] if self._held_out else rows[: self._cut()]

    def __len__(self) -> int:
        size = len(self._whole)
        return max(size - self._cut() if self._held_out else self._cut(), 0) if size else 0

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows())

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
        return self._rows()[index]


def _expanded(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))


def _count(path: str) -> int:
    if path.endswith(".parquet"):
        from pyarrow.parquet import ParquetFile

        return int(ParquetFile(_expanded(path)).metadata.num_rows)
    return len(_read(path))


def _read(path: str) -> list[dict[str, Any]]:
    file = Path(_expanded(path))
    if not file.is_file():
        raise RecipeError(f"task: there is no file {path!r}; bring it here or change the path")
    try:
        if file.suffix == ".parquet":
            from pyarrow.parquet import read_table

            return read_table(file).to_pylist()
        import json

        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json" and text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise RecipeError(f"task: cannot read {path!r}: {error}") from error


def _text(completion: Any) -> str:  # noqa: ANN401
    return completion if isinstance(completion, str) else completion[-1]["content"]

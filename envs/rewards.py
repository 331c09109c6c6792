"""Rewards for right answers. Each is called as TRL calls rewards, see `polopt.envs.contract`."""

import functools
import importlib.util
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polopt.envs.answers import after_hashes, after_word, in_tags, last_boxed
from polopt.envs.contract import RewardError, text_of

__all__ = [
    "BySource",
    "FromFile",
    "Gsm8k",
    "MathVerify",
    "ReasoningGym",
    "make_problems",
    "score_gsm8k",
    "score_math",
]


@dataclass(frozen=True)
class Gsm8k:
    """1 if the number behind the last `####` is the row's answer, else 0, as verl scores GSM8K.

    The column `answer` holds a number, or a whole solution with `####` as the original data do.
    """

    __name__ = "gsm8k"

    def __call__(
        self, completions: Sequence[Any], answer: Sequence[Any], **_: object
    ) -> list[float]:
        """Score completions."""
        return [score_gsm8k(text_of(c), gold) for c, gold in zip(completions, answer, strict=True)]

    def extract(self, text: str) -> str | None:
        """Return the final answer in a text."""
        return after_hashes(text)


def score_gsm8k(solution: str, answer: object) -> float:
    """Return 1 if the number behind the last `####` is the right one, else 0."""
    gold, found = str(answer), after_hashes(solution)
    gold = after_hashes(gold) or gold.replace(",", "").strip()
    return float(found is not None and found == gold)


@dataclass(frozen=True, kw_only=True)
class MathVerify:
    r"""1 if an answer equals the row's as mathematics (`\frac12` is `0.5`), else 0.

    Needs math-verify. A sample is left out if its row's `answer` cannot be read.

    Attributes:
        boxed: Only the last `\boxed{…}` counts. Otherwise math-verify looks for an answer in
            the whole text, which a policy can exploit by writing several.
    """

    boxed: bool = True
    __name__ = "math_verify"

    def __post_init__(self) -> None:
        _math_verify()

    def __call__(
        self, completions: Sequence[Any], answer: Sequence[Any], **_: object
    ) -> list[float | None]:
        """Score completions."""
        scores = []
        for completion, gold in zip(completions, answer, strict=True):
            text = text_of(completion)
            if self.boxed:
                inner = last_boxed(text)
                text = None if inner is None else f"${inner}$"
            scores.append(score_math(text, gold))
        return scores

    def extract(self, text: str) -> str | None:
        """Return the final answer in a text."""
        return last_boxed(text)


def score_math(answer: str | None, gold: object) -> float | None:
    """Return 1 if an answer equals `gold` as mathematics, else 0; None if `gold` is unreadable.

    Args:
        answer: Text with the answer in it, between dollar signs if it is LaTeX; None scores 0.
        gold: The right answer: a number, LaTeX with or without dollar signs, or with a box.
    """
    library = _math_verify()
    # Its own timeouts use SIGALRM, which only the main thread may set.
    main = threading.current_thread() is threading.main_thread()
    limits = ({"parsing_timeout": 5}, {"timeout_seconds": 5})
    parsing, verifying = limits if main else ({"parsing_timeout": None}, {"timeout_seconds": None})
    text = str(gold).strip()
    text = last_boxed(text) or text
    right = library.parse(text if "$" in text else f"${text}$", **parsing)
    if not right:
        return None
    if answer is None:
        return 0.0
    return float(library.verify(right, library.parse(answer, **parsing), **verifying))


def _math_verify() -> Any:  # noqa: ANN401
    try:
        import math_verify
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this reward needs math-verify: pip install 'polopt[math]'", name=error.name
        ) from None
    return math_verify


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """The score of a verifier of reasoning-gym, of an answer to the problem in column `index`.

    What stands in the last `<answer>…</answer>` is scored, or without tags the whole completion.

    Attributes:
        dataset: The dataset's name in reasoning-gym.
        settings: All of its settings, seed and size among them, so that problems come back.
    """

    dataset: str
    settings: Mapping[str, Any]
    __name__ = "reasoning_gym"

    def problems(self) -> Any:  # noqa: ANN401
        """Return the dataset, which makes each problem when it is asked for."""
        return _problems(self.dataset, json.dumps(self.settings, sort_keys=True))

    def __call__(
        self, completions: Sequence[Any], index: Sequence[int], **_: object
    ) -> list[float]:
        """Score completions."""
        problems = self.problems()
        answers = (self.extract(text_of(c)) or text_of(c).strip() for c in completions)
        return [
            problems.score_answer(answer, problems[i])
            for answer, i in zip(answers, index, strict=True)
        ]

    def extract(self, text: str) -> str | None:
        """Return the final answer in a text."""
        return in_tags(text, "answer")


@functools.lru_cache(maxsize=8)
def _problems(dataset: str, settings: str) -> Any:  # noqa: ANN401
    return make_problems(dataset, **json.loads(settings))


def make_problems(dataset: str, **settings: Any) -> Any:  # noqa: ANN401
    """Return a dataset of reasoning-gym.

    Raises:
        ValueError: If reasoning-gym refuses.
        ModuleNotFoundError: If it is not installed.
    """
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this task needs reasoning-gym: pip install 'polopt[trl]'", name=error.name
        ) from None
    try:
        return reasoning_gym.create_dataset(dataset, **settings)
    except (AssertionError, ValueError, TypeError) as error:
        raise ValueError(f"reasoning-gym refuses {dataset} with {settings}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class BySource:
    r"""The reward that a row's `data_source` asks for, for rows as verl prepares them.

    GSM8K (`openai/gsm8k`): the number behind `####`. MATH (`lighteval/MATH`,
    `DigitalLearningGmbH/MATH-lighteval`, `HuggingFaceH4/MATH-500`, NuminaMath): the last
    `\boxed{…}`. DAPO's (`math_dapo`, `aime…`): the line behind the last `Answer:`, 1 or −1.
    Answers are compared as mathematics by math-verify, where verl compares normalised text.

    Attributes:
        source_key: Column that names the source.
    """

    source_key: str = "data_source"
    __name__ = "score"

    def __call__(
        self,
        completions: Sequence[Any],
        answer: Sequence[Any],
        **columns: Any,  # noqa: ANN401
    ) -> list[float | None]:
        """Score completions."""
        if self.source_key not in columns:
            raise RewardError(
                f"the rows have no column {self.source_key!r}, by which a reward could be chosen: "
                "name the rewards, for example task.rewards=[{use: MathVerify}]"
            )
        sources = columns[self.source_key]
        rows = zip(sources, completions, answer, strict=True)
        return [_score_by_source(str(source), text_of(c), gold) for source, c, gold in rows]

    def check(self, sources: Iterable[str]) -> None:
        """Refuse sources that have no reward here.

        Raises:
            RewardError: With the source, or with the library that is missing.
        """
        kinds = {source: _kind(source) for source in sorted(sources)}
        for source, kind in kinds.items():
            if kind is None:
                raise RewardError(_unknown(source))
        if set(kinds.values()) - {"gsm8k"}:
            try:
                _math_verify()
            except ModuleNotFoundError as error:
                raise RewardError(str(error)) from error

    def extract(self, text: str) -> str | None:
        """Return the final answer in a text, of whatever source."""
        return last_boxed(text) or after_hashes(text) or after_word(text, "Answer")


# Names behind the last slash, as in DigitalLearningGmbH/MATH-lighteval.
_MATH = {"math", "math-lighteval", "math-500", "numinamath-cot", "numinamath-1.5"}


def _kind(source: str) -> str | None:
    name = source.rsplit("/", 1)[-1].lower()
    if name == "gsm8k":
        return "gsm8k"
    if name.startswith(("math_dapo", "aime")):
        return "dapo"
    return "math" if name in _MATH or name.startswith("numina_") else None


def _score_by_source(source: str, solution: str, answer: object) -> float | None:
    kind = _kind(source)
    if kind == "gsm8k":
        return score_gsm8k(solution, answer)
    if kind == "dapo":
        found = after_word(solution, "Answer")
        score = score_math(None if found is None else f"${found}$", answer)
        return None if score is None else 2.0 * score - 1.0
    if kind == "math":
        found = last_boxed(solution)
        return score_math(None if found is None else f"${found}$", answer)
    raise RewardError(_unknown(source))


def _unknown(source: str) -> str:
    return (
        f"there is no built-in reward for data_source {source!r}: name the rewards, for example "
        "task.rewards=[{use: FromFile, path: reward.py}]"
    )


@dataclass(frozen=True, kw_only=True)
class FromFile:
    """A function of a Python file, called once per completion as verl calls its rewards.

    `f(data_source=…, solution_str=…, ground_truth=…, extra_info=…)` returns a number, or a
    mapping with `score`. The file is run when the first completion is scored.

    Attributes:
        path: A Python file; `~` and `$NAME` are expanded.
        name: The function in it.
        source_key: Column that becomes `data_source`.
    """

    path: str
    name: str = "compute_score"
    source_key: str = "data_source"
    __name__ = "score"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[Any]:  # noqa: ANN401
        """Score completions."""
        function, missing = _function(self.path, self.name), [None] * len(completions)
        rows = zip(
            completions,
            columns.get(self.source_key, missing),
            columns.get("answer", missing),
            columns.get("extra_info", missing),
            strict=True,
        )
        found = [
            function(data_source=s, solution_str=text_of(c), ground_truth=truth, extra_info=extra)
            for c, s, truth, extra in rows
        ]
        return [f["score"] if isinstance(f, Mapping) else f for f in found]

    def check(self) -> None:
        """Refuse a file that is not there, without running it.

        Raises:
            RewardError: With the path.
        """
        _python_file(self.path)


def _python_file(path: str) -> str:
    file = os.path.expandvars(os.path.expanduser(path))
    if not Path(file).is_file():
        raise RewardError(f"the reward's path: there is no Python file {path!r}")
    return file


@functools.lru_cache(maxsize=8)
def _function(path: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("polopt_reward", _python_file(path))
    if spec is None or spec.loader is None:
        raise RewardError(f"the reward's path: the name of {path!r} does not end in .py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise RewardError(f"the reward's name: {path} has no function {name!r}")
    return function

"""What a reward may return, and who is told when it returns something else.

A reward is called as TRL calls it, `reward(prompts=…, completions=…, completion_ids=…, **columns)`
with the columns of the rows, and returns one number per completion, or None to leave the sample
out of its group. It may be `async`. A completion is a text or a list of messages.
"""

import functools
import inspect
import math
import os
import pkgutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "Reward",
    "RewardError",
    "because",
    "checked",
    "import_reward",
    "is_async",
    "name_of",
    "scores_of",
    "text_of",
]

Reward = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""`reward(prompts=…, completions=…, **columns)` gives one score per completion, None to leave
the sample out. The columns are those of the rows, as in TRL."""


class RewardError(ValueError):
    """A reward does not keep to its contract, or scored nothing: the run cannot go on."""


def text_of(completion: Any) -> str:  # noqa: ANN401
    """Return the text of a completion: a string, or the last of its messages."""
    content = completion
    if not isinstance(completion, str):
        content = completion[-1].get("content") if completion else None
    if isinstance(content, list):  # parts, as multimodal templates have them
        content = "".join(part.get("text") or "" for part in content)
    return content or ""


def import_reward(name: str) -> Reward:
    """Return the reward `module:function`; modules of the working folder are found.

    Raises:
        ValueError: If there is none.
    """
    if os.getcwd() not in sys.path:  # like `python -m`, but installed packages come first
        sys.path.append(os.getcwd())
    try:
        if ":" not in name:
            raise ValueError("there is no colon")
        found: Any = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ValueError(
            f"cannot import the reward {name!r} ({error}): write module:function"
        ) from error
    if not callable(found):
        raise ValueError(f"the reward {name!r} is not a function, but {found!r}")
    return found  # type: ignore[return-value]


def name_of(reward: Any) -> str:  # noqa: ANN401
    """Return the name under which TRL logs a reward."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return getattr(reward, "__name__", type(reward).__name__)


def is_async(reward: Any) -> bool:  # noqa: ANN401
    """Tell whether calling a reward returns a coroutine."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(reward.__call__)


def scores_of(found: Any, count: int, name: str) -> list[float | None]:  # noqa: ANN401
    """Return what a reward returned as `count` numbers, None where the sample is left out.

    Args:
        found: What it returned: a list, an array or a tensor of numbers, None or NaN.
        count: Number of completions.
        name: Names the reward, for messages.

    Raises:
        RewardError: If it is anything else.
    """
    wanted = f"expected a list of {count} numbers, one for each completion"
    if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__len__"):
        raise RewardError(f"the reward {name!r} returned {_short(found)}, {wanted}")
    if getattr(found, "ndim", 1) != 1:
        raise RewardError(f"the reward {name!r} returned shape {tuple(found.shape)}, {wanted}")
    if len(found) != count:
        raise RewardError(f"the reward {name!r} returned {len(found)} scores, {wanted}")
    return [_number(score, i, name) for i, score in enumerate(found)]


def _number(score: Any, i: int, name: str) -> float | None:  # noqa: ANN401
    if score is None:
        return None
    try:
        number = math.nan if isinstance(score, str | bytes) else float(score)
        good = not isinstance(score, str | bytes) and not math.isinf(number)
    except (TypeError, ValueError):
        number, good = math.nan, False
    if not good:
        raise RewardError(
            f"the reward {name!r} gave {_short(score)} to completion {i}, expected a finite "
            "number, or None to leave the sample out"
        )
    return None if math.isnan(number) else number


def _short(value: object) -> str:
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "…"
    return text if value is None else f"{text} ({type(value).__name__})"


def because(error: BaseException) -> str:
    """Return an exception raised by a reward as words, with the line that raised it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    place = ""
    if frame is not None:
        place = f" ({Path(frame.tb_frame.f_code.co_filename).name}, line {frame.tb_lineno})"
    text = str(error).split("\n")[0]
    hint = ""
    if isinstance(error, TypeError) and "unexpected keyword argument" in text:
        hint = "; a reward gets all columns of the rows: take **columns"
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}{hint}"


def checked(reward: Any, faults: list[RewardError] | None = None) -> Any:  # noqa: ANN401
    """Return a reward whose results are checked, and whose exceptions name it.

    Args:
        reward: A reward, sync or async.
        faults: Where to put what is wrong, for a trainer that has to hear it on all ranks; the
            call then gives no scores. By default it is raised.

    Returns:
        A reward of the same kind and name that raises `RewardError`.
    """
    name = name_of(reward)

    def fault(error: Exception, count: int) -> list[float | None]:
        told = error
        if not isinstance(error, RewardError):
            told = RewardError(
                f"the reward {name!r} raised {because(error)}: mend it, or wrap it in "
                "polopt.envs.isolation.isolated, which leaves the failing sample out"
            )
            told.__cause__ = error
        if faults is None:
            raise told
        faults.append(told)  # type: ignore[arg-type]
        return [None] * count

    def call(completions: Sequence[Any], **columns: Any) -> list[float | None]:  # noqa: ANN401
        try:
            found = reward(completions=completions, **columns)
            return scores_of(found, len(completions), name)
        except Exception as error:
            return fault(error, len(completions))

    async def call_async(completions: Sequence[Any], **columns: Any) -> list[float | None]:  # noqa: ANN401
        try:
            found = await reward(completions=completions, **columns)
            return scores_of(found, len(completions), name)
        except Exception as error:
            return fault(error, len(completions))

    made = call_async if is_async(reward) else call
    made.__name__ = name
    made.__wrapped__ = reward  # type: ignore[attr-defined]
    return made

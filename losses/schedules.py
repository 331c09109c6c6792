"""Schedules: a coefficient as a function of the step, resolved by the loop.

Any coefficient of a preset may be a schedule: `ppo(clip=Linear(start=0.2, end=0.05,
steps=100_000))`. The loop calls `resolve(algorithm, step)` before an update and passes on
plain numbers, so the losses know nothing of schedules.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, get_args

import torch

__all__ = [
    "Coefficient",
    "Constant",
    "Cosine",
    "Exponential",
    "Linear",
    "Schedule",
    "Warmup",
    "check_coefficient",
    "check_unit",
    "number",
    "resolve",
    "value_at",
]

T = TypeVar("T")


class Schedule(ABC):
    """A number that depends on the step. Subclasses are frozen dataclasses."""

    @abstractmethod
    def __call__(self, step: float) -> float:
        """Return the value at `step`, in the unit the loop counts in (steps or frames)."""

    def ends(self) -> tuple[float, ...]:
        """Return the values between which it stays, checked before a run; () if unknown."""
        return ()


Coefficient = float | Schedule


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """`value` for ever."""

    value: float

    def __post_init__(self) -> None:
        _check_finite(value=self.value)

    def ends(self) -> tuple[float, ...]:
        """See `Schedule`."""
        return (self.value,)

    def __call__(self, step: float) -> float:
        """See `Schedule`."""
        return self.value


@dataclass(frozen=True, kw_only=True)
class _Ramp(Schedule):
    start: float
    end: float
    steps: float

    def __post_init__(self) -> None:
        _check_finite(start=self.start, end=self.end, steps=self.steps)
        if not self.steps > 0:
            raise ValueError(f"steps must be positive, got {self.steps}")

    def ends(self) -> tuple[float, ...]:
        """See `Schedule`."""
        return (self.start, self.end)

    def _progress(self, step: float) -> float:
        return min(max(step / self.steps, 0.0), 1.0)


@dataclass(frozen=True, kw_only=True)
class Linear(_Ramp):
    """From `start` to `end` in a straight line over `steps`, then `end`."""

    def __call__(self, step: float) -> float:
        """See `Schedule`."""
        return self.start + (self.end - self.start) * self._progress(step)


@dataclass(frozen=True, kw_only=True)
class Cosine(_Ramp):
    """From `start` to `end` along half a cosine over `steps`, then `end`.

    end + (start − end)·(1 + cos(π·progress)) / 2. Source: https://arxiv.org/abs/1608.03983,
    without restarts.
    """

    def __call__(self, step: float) -> float:
        """See `Schedule`."""
        cosine = (1.0 + math.cos(math.pi * self._progress(step))) / 2.0
        return self.end + (self.start - self.end) * cosine


@dataclass(frozen=True, kw_only=True)
class Exponential(_Ramp):
    """From `start` to `end` by a constant factor per step over `steps`, then `end`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.start > 0 and self.end > 0):
            raise ValueError(
                f"start and end must be positive, got start={self.start} end={self.end}"
            )

    def __call__(self, step: float) -> float:
        """See `Schedule`."""
        return self.start * (self.end / self.start) ** self._progress(step)


@dataclass(frozen=True, kw_only=True)
class Warmup(Schedule):
    """From zero to the first value of `then` in a straight line over `steps`, then `then`.

    `then` starts counting when the warm-up ends.
    """

    steps: float
    then: Coefficient

    def __post_init__(self) -> None:
        _check_finite(steps=self.steps)
        if not isinstance(self.then, Schedule):
            _check_finite(then=self.then)
        if not self.steps > 0:
            raise ValueError(f"steps must be positive, got {self.steps}")

    def ends(self) -> tuple[float, ...]:
        """See `Schedule`."""
        return (0.0, *(self.then.ends() if isinstance(self.then, Schedule) else (self.then,)))

    def __call__(self, step: float) -> float:
        """See `Schedule`."""
        if step < self.steps:
            return value_at(self.then, 0.0) * max(step, 0.0) / self.steps
        return value_at(self.then, step - self.steps)


def value_at(coefficient: Coefficient, step: float) -> float:
    """Return the number that a coefficient stands for at `step`."""
    return coefficient(step) if isinstance(coefficient, Schedule) else coefficient


def number(coefficient: Coefficient, name: str) -> float:
    """Return a coefficient that is a number, as the losses need it.

    Raises:
        ValueError: If it is a schedule.
    """
    if isinstance(coefficient, Schedule):
        raise ValueError(f"{name} is a schedule: pass resolve(objective, step) to the loss")
    return coefficient


def check_coefficient(
    name: str,
    value: Coefficient | torch.Tensor,
    *,
    allowed: Callable[[float], bool] = lambda x: 0.0 <= x < math.inf,
    expected: str = "a finite number of at least 0",
) -> None:
    """Raise a ValueError if a coefficient is no number, or not an allowed one.

    Of a schedule the ends are checked: not after hours of training.

    Args:
        name: Of the coefficient, for the message.
        value: A number, a schedule, or a scalar tensor (see `resolve`).
        allowed: Whether a number may be.
        expected: What numbers may be, for the message.
    """
    if not isinstance(value, float | int | Schedule | torch.Tensor):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    for x in value.ends() if isinstance(value, Schedule) else (value,):
        if not allowed(x):  # type: ignore[arg-type]
            raise ValueError(f"{name} must be {expected}, got {x}")


def check_unit(name: str, value: Coefficient) -> None:
    """Raise a ValueError if a coefficient is not within [0, 1]."""
    check_coefficient(name, value, allowed=lambda x: 0.0 <= x <= 1.0, expected="in [0, 1]")


def _check_finite(**numbers: float) -> None:
    for name, value in numbers.items():
        if not isinstance(value, float | int) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}")


def resolve(tree: T, step: float, *, tensors: bool = False) -> T:
    """Return `tree` with every schedule inside replaced by its value at `step`.

    Args:
        tree: A (nested) dataclass such as `Algorithm` or `Objective`, mappings and tuples
            in it included.
        step: In the unit the schedules were written in.
        tensors: Give coefficients as scalar tensors, for a compiled loss: it would be compiled
            anew for each new number, and is not for a new tensor. Constants but zero as well,
            since `clamp` takes two numbers or two tensors.

    Raises:
        ValueError: If a value breaks the rules of the dataclass that holds it.
    """
    return _resolve(tree, step, tensors)


def _resolve(node: Any, step: float, tensors: bool) -> Any:  # noqa: ANN401
    if isinstance(node, Schedule):
        return _scalar(node(step)) if tensors else node(step)
    if is_dataclass(node) and not isinstance(node, type):
        changed = {}
        for field in fields(node):
            old = getattr(node, field.name)
            new = _resolve(old, step, tensors)
            if tensors and Schedule in get_args(field.type) and isinstance(new, float) and new:
                new = _scalar(new)
            if new is not old:
                changed[field.name] = new
        return replace(node, **changed) if changed else node
    if isinstance(node, dict):
        new = {key: _resolve(value, step, tensors) for key, value in node.items()}
        return new if any(new[key] is not node[key] for key in node) else node
    if isinstance(node, tuple):
        items = tuple(_resolve(item, step, tensors) for item in node)
        return items if any(a is not b for a, b in zip(items, node, strict=True)) else node
    return node


def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)

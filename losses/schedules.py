"""Schedules: a coefficient as a function of the step, resolved by the loop.

Any coefficient of a preset may be a schedule: `ppo(clip=Linear(start=0.2, end=0.05,
steps=100_000))`. The loop calls `resolve(algorithm, step)` before an update and passes on
plain numbers, so the losses know nothing of schedules.
"""

import math
from abc import ABC, abstractmethod
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


Coefficient = float | Schedule


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """`value` for ever."""

    value: float

    def __call__(self, step: float) -> float:
        """See `Schedule`."""
        return self.value


@dataclass(frozen=True, kw_only=True)
class _Ramp(Schedule):
    start: float
    end: float
    steps: float

    def __post_init__(self) -> None:
        if not self.steps > 0:
            raise ValueError(f"steps must be positive, got {self.steps}")

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

    end + (start − end)·(1 + cos(π·progress)) / 2. Source: https://arxiv.org/abs/1608.03983
    eq. 5 without restarts.
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
        if not self.steps > 0:
            raise ValueError(f"steps must be positive, got {self.steps}")

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


def check_coefficient(name: str, value: Coefficient, *, low: float = 0.0) -> None:
    """Raise a ValueError if a number is below `low`; a schedule is checked once resolved."""
    if isinstance(value, float | int) and not value >= low:
        raise ValueError(f"{name} must be at least {low:g}, got {value}")


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

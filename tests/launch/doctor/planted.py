"""Tasks with a fault in them, for `plant.py`; recipes name them as `use: planted:…`."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from polopt.envs import control
from polopt.envs.control import ControlTask
from polopt.envs.text import TextTask, arithmetic


class Drag:
    """Makes a run take `first` times as long as it would at its start, `last` times at its end.

    Multiples of what the run itself takes between two calls, and not seconds: so the fault has the
    same size on a machine that is busy with other work.
    """

    def __init__(self, first: float, last: float, total: int):
        self.first, self.last, self.total = first, last, total
        self.frames, self.owed, self.began = 0, 0.0, time.perf_counter()

    def __call__(self, frames: int) -> None:
        now = time.perf_counter()
        self.frames += frames
        done = min(1.0, self.frames / self.total)
        self.owed += (now - self.began) * (self.first + (self.last - self.first) * done - 1.0)
        self.began = now
        if self.owed > 2e-3:  # shorter sleeps take longer than asked for
            time.sleep(self.owed)
            self.began = time.perf_counter()
            self.owed -= self.began - now


@dataclass
class Faulty:
    """The physics of a task, whose reward or speed goes wrong after some frames."""

    physics: Any
    scale: float = 1.0
    late_scale: float | None = None
    nan: bool = False
    after: int = 0
    sleep: float = 0.0
    slower: float = 0.0
    drag: tuple[float, float, int] | None = None
    batch: int = 32
    frames: int = field(default=0)

    def __post_init__(self):
        self.dragging = Drag(*self.drag) if self.drag else None

    def __getattr__(self, name):
        return getattr(self.physics, name)

    def step(self, state, action):
        state, reward, terminated = self.physics.step(state, action)
        if len(state) != self.batch:  # an evaluation
            return state, reward, terminated
        self.frames += self.batch
        if self.sleep or self.slower:
            time.sleep(self.sleep + self.slower * self.frames)
        if self.dragging:
            self.dragging(self.batch)
        late = self.frames > self.after
        scale = self.late_scale if late and self.late_scale is not None else self.scale
        reward = reward * scale
        if self.nan and late:
            reward = torch.full_like(reward, math.nan)
        return state, reward, terminated


def task(*, of: str, batch: int = 32, **fault: Any) -> ControlTask:
    found = getattr(control, of)()
    return replace(found, physics=Faulty(found.physics, batch=batch, **fault))


def text(*, reward: str = "", train_size: int = 80, evaluation_size: int = 16) -> TextTask:
    found = arithmetic(
        terms=(2, 2), digits=(1, 1), train_size=train_size, evaluation_size=evaluation_size
    )
    return replace(found, rewards=[scorer(reward, found.rewards[0])])


def scorer(kind: str, right: Any) -> Any:
    """Return a reward function: `right`, or one with a fault.

    `slow 2` takes twice as long as the rest of the step, which began when it was last called.
    """
    waits = float(kind.removeprefix("slow ")) if kind.startswith("slow ") else 0.0
    ended = None

    def score(completions: Sequence[Any], **columns: Any) -> list[Any]:
        nonlocal ended
        good = right(completions=completions, **columns)
        if waits:
            if ended is not None:
                time.sleep(min(waits * (time.perf_counter() - ended), 2.0))  # no pauses of others
            ended = time.perf_counter()
        if kind == "zero":
            return [0.0] * len(good)
        if kind == "one":
            return [1.0] * len(good)
        if kind == "none":
            return [None] * len(good)
        if kind == "half none":
            return [None if i % 2 else g for i, g in enumerate(good)]
        if kind == "wrong":  # pays for wrong answers
            return [1.0 - g for g in good]
        return good

    return score

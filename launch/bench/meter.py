"""The process of `polopt bench control` that trains, and the clock that all libraries share."""

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polopt.envs.control import (
    ControlTask,
    acrobot,
    cartpole,
    gymnasium,
    mountain_car,
    mountain_car_continuous,
    pendulum,
)
from polopt.ext.torchrl.evaluate import play
from polopt.launch.bench.table import Goal, Trial

__all__ = ["TASKS", "Meter", "main"]

TASKS: dict[str, Callable[[], ControlTask]] = {
    "cartpole": cartpole,
    "acrobot": acrobot,
    "pendulum": pendulum,
    "mountaincar": mountain_car,
    "mountaincar-continuous": mountain_car_continuous,
    "lunarlander": lambda: gymnasium(name="LunarLander-v3"),
}
"""By the names of `bench.table.GOALS`."""


class Meter:
    """Plays greedy episodes at the same frames for all libraries, and books training alone.

    Training is timed from the moment it is made, and from the end of each call of `ends`.

    Args:
        trial: What is trained, and where it ends.
        most: Frames after which the library's own schedule ends, if it has one.

    Attributes:
        frames: The most of this run.
        curve: Frames and greedy mean return of every evaluation.
        cpu: CPU seconds of training so far, without evaluations.
        solved: Whether the last evaluation reached the bar.
    """

    def __init__(self, trial: Trial, *, most: int | None = None) -> None:
        self.trial, self.goal = trial, trial.goal
        self.frames = self.goal.frames if most is None else min(self.goal.frames, most)
        self.curve: list[tuple[int, float]] = []
        self.cpu, self.solved = 0.0, False
        self._env = TASKS[trial.task]().make(100, seed=trial.seed)
        self._due = self.goal.every
        self._began = time.process_time()

    def ends(self, frames: int, act: Callable[[Tensor], Tensor]) -> bool:
        """Evaluate if it is time to, and return whether training ends here.

        Args:
            frames: Trained on so far.
            act: From observations [N, O] to the most likely actions.
        """
        self.cpu += time.process_time() - self._began
        limit = self.trial.cpu_seconds
        over = frames >= self.frames or (limit is not None and self.cpu >= limit)
        if frames >= self._due or over:
            self._due = (frames // self.goal.every + 1) * self.goal.every
            generator = torch.get_rng_state()
            self._env.set_seed((self.trial.seed * 1_000_003 + frames) % 2**31)
            value = float(play(self._env, act).mean())
            torch.set_rng_state(generator)
            self.curve.append((frames, value))
            self.solved = value >= self.goal.bar
        self._began = time.process_time()
        return over or self.solved

    def result(self) -> dict[str, Any]:
        """Return what came out, as `polopt bench` reads it."""
        frames, value = self.curve[-1]
        return {
            "solved": self.solved,
            "frames": frames,
            "cpu_seconds": round(self.cpu, 3),
            "final_return": value,
            "curve": self.curve,
        }


def main() -> None:
    """Train what the lines on stdin name, each in a process of its own.

    A line is a pair of an entry's function and a `Trial`, as JSON. The answer to it is a line on
    stdout: what the function returned, or null if it failed. Processes are forked from this one,
    which has imported what takes long, and run on one thread of one core.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is not the answer
    for line in sys.stdin:
        function, settings = json.loads(line)
        trial = Trial(**{**settings, "goal": Goal(**settings["goal"])})
        module, name = function.split(":")
        with contextlib.suppress(ImportError):  # what it is shows in the child
            importlib.import_module(module)
        child = os.fork()
        if child == 0:
            answer = b"null"
            try:
                train = getattr(importlib.import_module(module), name)
                answer = json.dumps(train(trial)).encode()
            except Exception:
                traceback.print_exc()
            os.write(answers, answer + b"\n")
            os._exit(0)
        if os.waitpid(child, 0)[1]:  # killed, so it has not answered
            os.write(answers, b"null\n")


if __name__ == "__main__":
    main()

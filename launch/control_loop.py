"""What every control run shares: evaluation, checkpoints, progress and summary.

What is particular to an algorithm (how it collects and learns) is a `Learner`.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from polopt.envs.control import ControlTask
from polopt.envs.finite import EnvError, FiniteEnv
from polopt.ext.torchrl.evaluate import play
from polopt.launch.control_sections import (
    Checkpoints,
    Evaluation,
)
from polopt.launch.curve import write_curves
from polopt.launch.recipe import RecipeError
from polopt.launch.record import phase_seconds, read_metrics
from polopt.launch.run import Run

__all__ = ["Diverged", "Learner", "check_update", "play_greedily", "restoring", "train"]

_LARGEST_WEIGHT = 1e10  # beyond it layers overflow, and the next draw of an action fails
_COUNTERS = ("frames", "greedy", "solved", "train_cpu")


class Diverged(FloatingPointError):
    """The learner came upon a number that is not finite, and is as it was before.

    Its state is saved, so that the run can be resumed from before the update that went wrong.
    """


class Learner(Protocol):
    """The part of a control run that its algorithm brings."""

    def iterate(self, frames: int) -> tuple[int, dict[str, float]]:
        """Collect and learn once.

        Args:
            frames: How many were collected before, over all sessions of the run.

        Returns:
            How many are collected now, and metrics by name. Those that are NaN were not
            measured. Times of the phases are named as by `Stopwatch.take`.

        Raises:
            FloatingPointError: If an observation, a reward or a loss is not finite.
            Diverged: The same, after the learner went back to where this call began.
        """
        ...

    def act(self, observation: Tensor) -> Tensor:
        """Return the greedy actions for observations [N, O]."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return copies of everything that a resumed run needs: tensors by name, and the rest."""
        ...

    def load(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        ...


def train(
    make: Callable[[], Learner],
    run: Run,
    *,
    task: ControlTask,
    total_frames: int,
    evaluation: Evaluation,
    checkpoints: Checkpoints,
    seed: int,
    drop: bool = False,
) -> dict[str, Any]:
    """Train until the bar or the last frame, and return the summary.

    Args:
        make: Makes the learner. It seeds torch's global generator itself.
        run: The run folder; a checkpoint in it is continued.
        task: Makes the environments in which the policy is evaluated.
        total_frames: No iteration begins once so many are collected.
        evaluation: When the policy is evaluated, and the bar.
        checkpoints: When the run is saved.
        seed: Of the recipe.
        drop: Whether an episode of an evaluation is left out if a number of it is not finite.

    Raises:
        FloatingPointError: As `Learner.iterate`.
        RecipeError: If the checkpoint is of another recipe, or an environment does not keep to
            the protocol.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small only lose by sharing work
    try:
        loop = _Loop(make(), run, task, total_frames, evaluation, checkpoints, seed, drop)
        loop.run_to_end()
        return loop.summary()
    except EnvError as error:
        raise RecipeError(f"'task': {error}") from error
    finally:
        torch.set_num_threads(threads)


def check_update(metrics: Mapping[str, float], parameters: Tensor, frames: int) -> None:
    """Refuse an update after which a loss or a weight is not finite.

    Args:
        metrics: Of the update, by name.
        parameters: All weights.
        frames: At which it was made, for the message.

    Raises:
        FloatingPointError: Saying what went wrong, and where.
    """
    for name, value in metrics.items():
        if name.startswith("loss_") and not math.isfinite(value):
            raise FloatingPointError(
                f"{name} became {value} in the update at frame {frames}: try a lower optimizer.lr"
            )
    largest = float(parameters.detach().abs().max())
    if not largest < _LARGEST_WEIGHT:
        raise FloatingPointError(
            f"a weight became {largest} in the update at frame {frames}: try a lower optimizer.lr"
        )


def play_greedily(
    env: FiniteEnv, act: Callable[[Tensor], Tensor], *, seed: int, place: str
) -> Tensor:
    """Play one greedy episode in each copy of an environment.

    Args:
        env: N copies.
        act: From observations [N, O] to greedy actions.
        seed: Of the states in which they begin.
        place: What is played, for messages.

    Returns:
        Returns of the episodes that were not dropped, float [N] or fewer.

    Raises:
        FloatingPointError: If a number is not finite, and if `env` drops these, in every copy.
    """
    env.set_seed(seed)
    env.begin(place)
    returns = play(env, act)[~env.broken]
    if not len(returns):
        raise FloatingPointError(f"every environment gave numbers that are not finite in {place}")
    return returns


@contextlib.contextmanager
def restoring(checkpoint: Path) -> Iterator[None]:
    """Turn the error of a checkpoint that does not fit into one sentence.

    Raises:
        RecipeError: With the checkpoint, and what does not fit.
    """
    try:
        yield
    except (KeyError, ValueError, RuntimeError) as error:  # torch's, where shapes differ
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise RecipeError(
            f"the checkpoint {checkpoint.name} of {checkpoint.parents[1]} does not fit this recipe "
            f"and this polopt: {' '.join(what.split())}"
        ) from error


class _Loop:
    """The counters of a run, and what happens between iterations."""

    def __init__(
        self,
        learner: Learner,
        run: Run,
        task: ControlTask,
        total_frames: int,
        evaluation: Evaluation,
        checkpoints: Checkpoints,
        seed: int,
        drop: bool,
    ) -> None:
        self.learner, self.run, self.task = learner, run, task
        self.total_frames, self.seed = total_frames, seed
        self.evaluation, self.checkpoints = evaluation, checkpoints
        self.env = FiniteEnv(task.make(evaluation.episodes, seed=seed), drop=drop)
        self.frames = 0
        self.greedy = -math.inf
        self.solved = False
        self.train_cpu = 0.0
        if (found := run.latest()) is not None:
            self._load(*found)
            self.solved = self.solved and self._at_bar()  # the bar may have been raised

    def run_to_end(self) -> None:
        """Iterate until the bar, the last frame, or a signal."""
        if self.frames == 0:
            self._evaluate()
        evaluate_at = _next(self.frames, self.evaluation.every)
        save_at = _next(self.frames, self.checkpoints.every)
        while self.frames < self.total_frames and not self.solved and not self.run.should_stop():
            self._iterate()
            if self.frames >= evaluate_at:
                self._evaluate()
                # Not asked before training: some untrained policies balance the pole.
                self.solved = self._at_bar()
                evaluate_at = _next(self.frames, self.evaluation.every)
            if self.frames >= save_at:
                self._save()
                save_at = _next(self.frames, self.checkpoints.every)
        self._save()

    def summary(self) -> dict[str, Any]:
        """Draw the learning curve, and return what came out."""
        lines = read_metrics(self.run.path / "metrics.jsonl")
        curves = {
            label: [(m["step"], m[name]) for m in lines if name in m]
            for label, name in (("training", "return_mean"), ("greedy", "greedy_return"))
        }
        title = f"{self.task.name}, seed {self.seed}"
        picture = self.run.path / "learning_curve.svg"
        write_curves(picture, curves, title=title, x="frames", y="return")
        # Without a bar nothing is solved or not.
        solved = {} if self.evaluation.stop_at is None else {"solved": self.solved}
        return {
            "task": self.task.name,
            **solved,
            "final_return": self.greedy,
            "frames": self.frames,
            "train_cpu_seconds": round(self.train_cpu, 3),
            "frames_per_cpu_second": round(self.frames / max(self.train_cpu, 1e-9), 1),
            "frames_per_second": round(self.frames / max(self.run.seconds, 1e-9), 1),
            "phase_seconds": phase_seconds(lines),
        }

    def _iterate(self) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        try:
            frames, metrics = self.learner.iterate(self.frames)
        except Diverged:
            self._save()
            raise
        metrics["steps_per_second"] = (frames - self.frames) / (time.perf_counter() - wall)
        self.frames = frames
        known = {k: v for k, v in metrics.items() if not math.isnan(v)}
        self.run.log(frames, {**known, **self.run.usage()})
        self.run.progress(frames, self.total_frames, f"greedy return {self.greedy:.1f}")
        self.train_cpu += time.process_time() - cpu

    def _evaluate(self) -> None:
        # Starts differ between evaluations and are the same for a resumed run.
        seed = (self.seed * 1_000_003 + self.frames) % 2**31
        place = f"the evaluation at frame {self.frames}"
        began = time.perf_counter()
        returns = play_greedily(self.env, self.learner.act, seed=seed, place=place)
        self.greedy = float(returns.mean())
        self.run.log(
            self.frames,
            {
                "greedy_return": self.greedy,
                "greedy_return_std": float(returns.std(unbiased=False)),
                "time_evaluate": time.perf_counter() - began,
            },
        )

    def _at_bar(self) -> bool:
        bar = self.evaluation.stop_at
        return bar is not None and self.greedy >= bar

    def _load(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        with restoring(self.run.path / "checkpoints" / f"step-{step}"):
            self.learner.load(tensors, state)
            for name in _COUNTERS:
                setattr(self, name, state[name])

    def _save(self) -> None:
        tensors, state = self.learner.state()
        counters = {name: getattr(self, name) for name in _COUNTERS}
        self.run.save(self.frames, tensors, {**state, **counters})


def _next(frames: int, every: int) -> int:
    return (frames // every + 1) * every

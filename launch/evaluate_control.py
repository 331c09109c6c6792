"""`polopt eval` of a control run: greedy episodes of the policy in one of its checkpoints."""

from pathlib import Path
from typing import Any, Protocol

import torch

from polopt.envs.control import ControlTask
from polopt.envs.finite import FiniteEnv
from polopt.launch import checkpoint
from polopt.launch.control_loop import Learner, play_greedily, restoring
from polopt.launch.control_sections import Evaluation
from polopt.launch.recipe import RecipeError

__all__ = ["measure", "table"]


class ControlJob(Protocol):
    """What the jobs of all control tasks have."""

    @property
    def task(self) -> ControlTask: ...
    @property
    def evaluation(self) -> Evaluation: ...
    def learner(self) -> Learner: ...


def measure(job: ControlJob, run: Path, *, step: int, seed: int) -> dict[str, Any]:
    """Return what the policy of a checkpoint earns.

    Args:
        job: Of the run; plays its `evaluation.episodes`.
        run: Its folder.
        step: Of the checkpoint.
        seed: Of the states in which episodes begin.

    Raises:
        RecipeError: If the checkpoint is damaged or does not fit, or an environment gives a
            number that is not finite.
    """
    folder = dict(reversed(checkpoint.steps(run / "checkpoints")))[step]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small only lose by sharing work
    try:
        learner = job.learner()
        with restoring(folder):
            learner.load(*checkpoint.read(folder))
        env = FiniteEnv(job.task.make(job.evaluation.episodes, seed=seed))
        returns = play_greedily(env, learner.act, seed=seed, place="the evaluation")
    except FloatingPointError as error:
        raise RecipeError(str(error)) from error
    finally:
        torch.set_num_threads(threads)
    bar = job.evaluation.stop_at
    return {
        "run": str(run),
        "checkpoint": step,
        "task": job.task.name,
        "episodes": len(returns),
        "seed": seed,
        "mean": float(returns.mean()),
        "std": float(returns.std(unbiased=False)),
        "min": float(returns.min()),
        "max": float(returns.max()),
        **({} if bar is None else {"bar": bar, "solved": float(returns.mean()) >= bar}),
        "returns": returns.tolist(),
    }


def table(content: dict[str, Any]) -> str:
    """Return what `measure` found, for people."""
    lines = [
        f"{content['run']}, checkpoint {content['checkpoint']}, on {content['task']}: "
        f"{content['episodes']} greedy episodes",
        f"  return {content['mean']:.2f} ± {content['std']:.2f} (standard deviation), "
        f"from {content['min']:.2f} to {content['max']:.2f}",
    ]
    if "bar" in content:
        lines += [f"  bar    {content['bar']:g}, {'' if content['solved'] else 'not '}reached"]
    return "\n".join(lines)

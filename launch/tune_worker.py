"""Processes that step environments for `polopt tune-envs`."""

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Part", "WorkerError", "Workers"]

_STEPS = 32  # of each environment between two looks at the clock, at most


class WorkerError(RuntimeError):
    """An environment cannot be made or stepped; the message says why."""


@dataclass(frozen=True)
class Part:
    """What one process did in a round.

    Attributes:
        steps: Of all its environments.
        wall: Seconds.
        cpu: CPU seconds.
        waited: Seconds in which it could have run and had no core; 0 where Linux does not tell.
    """

    steps: int
    wall: float
    cpu: float
    waited: float


class Workers:
    """Some processes, each with environments of a recipe; a context manager.

    Args:
        recipe: File or name.
        overrides: Settings changed in it.
        count: How many.
    """

    def __init__(self, recipe: str, overrides: Sequence[str], count: int) -> None:
        self._arguments = recipe, list(overrides)
        self.count = count

    def __enter__(self) -> "Workers":
        context = multiprocessing.get_context("spawn")  # torch has threads that a fork would lose
        self._pipes, self._processes = [], []
        for seed in range(self.count):
            here, there = context.Pipe()
            process = context.Process(
                target=_work, args=(there, *self._arguments, seed), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()

    def build(self, processes: int, each: int) -> None:
        """Give the first so many processes new environments, and warm them up.

        Raises:
            WorkerError: If that does not work.
        """
        self._ask(processes, "build", each)

    def run(self, processes: int, seconds: float) -> list[Part]:
        """Let the first so many processes step at the same time.

        Raises:
            WorkerError: If an environment fails.
        """
        return self._ask(processes, "run", seconds)

    def _ask(self, processes: int, what: str, value: float) -> list[Any]:
        pipes = self._pipes[:processes]
        answers = []
        try:
            for pipe in pipes:
                pipe.send((what, value))
            for pipe in pipes:
                answers.append(pipe.recv())
        except (EOFError, OSError) as error:
            raise WorkerError("a process with environments ended by itself") from error
        for answer in answers:
            if isinstance(answer, str):
                raise WorkerError(answer)
        return answers


def _work(pipe: Connection, recipe: str, overrides: list[str], seed: int) -> None:
    """Answer requests until the parent ends; what goes wrong is an answer."""
    import torch

    torch.set_num_threads(1)
    collector = None
    try:
        while True:
            what, value = pipe.recv()
            try:
                if what == "build":
                    collector = _collector(recipe, overrides, int(value), seed)
                    collector.collect()
                    pipe.send(None)
                else:
                    pipe.send(_run(collector, value))
            except Exception as error:
                text = " ".join(str(error).split()) or type(error).__name__
                pipe.send(text[:400])
    except (EOFError, OSError, KeyboardInterrupt):
        return


def _collector(recipe: str, overrides: list[str], num_envs: int, seed: int) -> Any:  # noqa: ANN401
    from polopt.envs.finite import FiniteEnv
    from polopt.ext.torchrl.collector import BatchedCollector
    from polopt.ext.torchrl.networks import make_actor
    from polopt.launch.job import prepare
    from polopt.launch.recipe import load
    from polopt.launch.train import find_recipe

    job: Any = prepare(load(find_recipe(recipe), overrides), name=Path(recipe).stem)
    env = FiniteEnv(job.task.make(num_envs, seed=seed))
    # Few steps where a step is long: the clock is looked at between batches.
    steps = max(1, min(_STEPS, 4096 // num_envs))
    return BatchedCollector(
        env,
        make_actor(env, job.network.hidden),
        frames_per_batch=num_envs * steps,
        total_frames=2**62,
    )


def _run(collector: Any, seconds: float) -> Part:  # noqa: ANN401
    steps, waited = 0, _waited()
    began, cpu = time.perf_counter(), time.process_time()
    while (wall := time.perf_counter() - began) < seconds:
        collector.collect()
        steps += collector.frames_per_batch
    return Part(steps, wall, time.process_time() - cpu, _waited() - waited)


def _waited() -> float:
    """Return the seconds that this thread was ready to run and had no core."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0

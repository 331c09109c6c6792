"""A job that needs no TorchRL and no TRL, for tests of the command line.

Recipes name it as `use: fake:task`; the tests put this folder on PYTHONPATH.
"""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any, Literal

from polopt.launch.job import COMMON
from polopt.launch.recipe import RecipeError, call, check_keys


@dataclass(frozen=True, kw_only=True)
class Collector:
    total_frames: int = 10
    sleep: float = 0.0
    save_every: int = 2


@dataclass(frozen=True, kw_only=True)
class FakeTask:
    """Counts upwards; `fault` says what goes wrong at step 5 (`grad`: a gradient that is NaN)."""

    level: Literal["easy", "hard"] = "easy"
    fault: str | None = None
    scale: float = 1.0
    flag: bool = False

    def prepare(self, tree: dict[str, Any], *, name: str) -> "FakeJob":
        check_keys(tree, (*COMMON, "collector"))
        collector = call(Collector, tree.get("collector", {}), "collector")
        if collector.total_frames < 1:
            raise RecipeError(f"'collector.total_frames' must be positive, got {collector}")
        return FakeJob(self, collector, tree, name)


def task(
    *,
    level: Literal["easy", "hard"] = "easy",
    fault: str | None = None,
    scale: float = 1.0,
    flag: bool = False,
) -> FakeTask:
    if scale <= 0.0:
        raise ValueError(f"scale must be positive, got {scale}")
    return FakeTask(level=level, fault=fault, scale=scale, flag=flag)


class Unready:
    def prepare(self, tree: dict[str, Any], *, name: str) -> None:
        return None


def needs_library(*, name: str = "trl") -> FakeTask:
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


class FakeJob:
    def __init__(self, task: FakeTask, collector: Collector, tree: dict[str, Any], name: str):
        self.task, self.collector, self.name = task, collector, name
        self.tree = {**tree, "collector": vars(collector)}
        self.processes = tree.get("launch", {}).get("processes", 1)

    def arithmetic(self):
        return {"frames": self.collector.total_frames, "ranks": self.processes}

    def train(self, run):
        import torch

        if self.processes > 1:
            torch.distributed.init_process_group("gloo")
        print("chatter of a library")
        os.system("echo chatter of a child")
        total = torch.zeros(3)
        step, total = 0, torch.zeros(3)
        if found := run.latest():
            step, tensors, state = found
            total = tensors["total"]
            assert state["rng"].dtype == torch.uint8
        while step < self.collector.total_frames:
            step += 1
            total = total + step
            run.log(step, {"reward": total[0] * self.task.scale, "odd": float("nan")})
            if self.task.fault == "grad":
                run.log(step, {"grad_norm": float("nan") if step == 5 else 1.0})
            run.progress(step, self.collector.total_frames, "counting")
            time.sleep(self.collector.sleep)
            if step == 5 and self.task.fault not in (None, "grad"):
                self._fail()
            stop = run.should_stop()
            if stop or step % self.collector.save_every == 0:
                run.save(step, {"total": total}, {"rng": torch.get_rng_state()})
            if stop:
                break
        ranks = 1
        if self.processes > 1:
            ranks = torch.distributed.get_world_size()
            torch.distributed.destroy_process_group()
        return {"final_reward": float(total[0]), "steps": step, "ranks": ranks}

    def _fail(self):
        assert self.task.fault
        if self.task.fault == "raise":
            raise RuntimeError("the fault that was asked for")
        if self.task.fault == "recipe":
            raise RecipeError("the refusal that was asked for")
        if self.task.fault == "hang":
            time.sleep(60)
        os.kill(os.getpid(), getattr(signal, self.task.fault))

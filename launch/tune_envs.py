"""`polopt tune-envs`: how many environments at once, and in how many processes, give most steps."""

import argparse
import contextlib
import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polopt.launch.result import Result

if TYPE_CHECKING:
    from polopt.launch.tune_worker import Workers

__all__ = ["EPILOG", "Speed", "add_arguments", "recommend", "tune_envs", "usable_cores"]

EPILOG = """\
examples:
  polopt tune-envs cartpole-ppo
  polopt tune-envs lunarlander-ppo --most 64 --seconds 1
  polopt tune-envs my.yaml --json

Steps are made by the recipe's environment and a policy of its hidden layers; nothing is learnt and
nothing is written. Environments are one process's, or dealt to several processes that step at the
same time. Time in which other programs had the cores is taken out. Recommended is the smallest
number that divides the recipe's batch and is within 10 % of the best that does; several processes
only where they give at least a quarter more.
"""

_NEAR, _GAIN = 0.9, 1.25
_FALLS = 0.7  # of the best: two such speeds in a row, and more environments are not tried
_LONG = 4.0  # seconds for one step of all copies from which on no more are tried
_ROUNDS = 2
_LEAST = 8  # steps of an environment in a batch


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One measurement.

    Attributes:
        num_envs: Environments, in all processes together.
        processes: How many processes share them.
        steps_per_second: Steps of all of them; the better of two rounds.
    """

    num_envs: int
    processes: int
    steps_per_second: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="RECIPE [key=value ...]",
        help="the recipe of a control task, and settings to change in it",
    )
    parser.add_argument(
        "--most", type=int, default=1024, metavar="N", help="most environments to try (1024)"
    )
    parser.add_argument(
        "--seconds", type=float, default=0.4, metavar="S", help="of each measurement (0.4)"
    )


def tune_envs(args: argparse.Namespace, signals: object) -> Result:
    """Measure, and recommend a setting.

    Raises:
        RecipeError: If the recipe is wrong, or not one of a control task.
    """
    from polopt.launch.recipe import RecipeError
    from polopt.launch.tune_worker import WorkerError, Workers

    if not 1 <= args.most <= 65536:
        raise RecipeError(f"--most must be from 1 to 65536, got {args.most}")
    if not 0.0 < args.seconds <= 60.0:
        raise RecipeError(f"--seconds must be above 0 and at most 60, got {args.seconds:g}")
    job, overrides = _job(args.arguments)
    cores = usable_cores()
    try:
        with Workers(args.arguments[0], overrides, max(2, min(cores, 16))) as workers:
            measured = _measure(workers, cores, args.most, args.seconds)
    except WorkerError as error:
        raise RecipeError(f"'task': {error}") from error
    now, batch = job.collector.num_envs, getattr(job.collector, "frames_per_batch", None)
    best, note = recommend(measured, now, batch)
    if now > args.most:
        left = f"the recipe's {now} environments were not measured: --most is {args.most}"
        note = f"{left}; {note}" if note else left
    content = {
        "recipe": args.arguments[0],
        "cores": cores,
        "measured": [asdict(speed) for speed in measured],
        "now": now,
        "recommended": asdict(best),
        "setting": f"collector.num_envs={best.num_envs}",
        **({"note": note} if note else {}),
    }
    return Result(content=content, text=_table(measured, best, now, cores, note))


def _job(words: Sequence[str]) -> tuple[Any, list[str]]:
    from polopt.launch.job import prepare
    from polopt.launch.recipe import RecipeError, load
    from polopt.launch.train import find_recipe
    from polopt.launch.words import check_words

    if not words or "=" in words[0]:
        raise RecipeError("name a recipe first: polopt tune-envs RECIPE [key=value …]")
    name, *overrides = words
    check_words(overrides, "recipe")
    job: Any = prepare(load(find_recipe(name), overrides), name=Path(name).stem)
    if "trainer" in job.tree:
        raise RecipeError(
            f"{name} trains a language model, which steps no environments: after a run, "
            "`polopt doctor RUN` names the phase that takes the time and what moves it"
        )
    if not hasattr(getattr(job, "collector", None), "num_envs"):
        raise RecipeError(f"{name} has no collector.num_envs: there is nothing to tune")
    return job, list(overrides)


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores or 1, max(1, math.ceil(int(quota) / int(period))))
    return max(cores or 1, 1)


def _powers(most: int) -> Iterator[int]:
    return itertools.takewhile(lambda n: n <= most, (2**i for i in itertools.count()))


def _measure(workers: "Workers", cores: int, most: int, seconds: float) -> list[Speed]:
    """Return the speeds by processes and environments, and tell each on stderr."""
    found: list[Speed] = []
    for processes in _powers(workers.count):
        for speed in _row(workers, processes, most, seconds, cores):
            found.append(speed)
            print(
                f"{speed.num_envs:6} environments, {_processes(processes)}: "
                f"{speed.steps_per_second:12,.0f} steps/s",
                file=sys.stderr,
            )
    return found


def _row(
    workers: "Workers", processes: int, most: int, seconds: float, cores: int
) -> Iterator[Speed]:
    best, falls = 0.0, 0
    for each in _powers(most // processes):
        workers.build(processes, each)
        rounds = [workers.run(processes, seconds) for _ in range(_ROUNDS)]
        speed = max(sum(r.steps for r in parts) / _elapsed(parts, cores) for parts in rounds)
        yield Speed(num_envs=each * processes, processes=processes, steps_per_second=speed)
        falls = falls + 1 if speed < _FALLS * best else 0
        best = max(best, speed)
        if falls == 2 or each * processes / speed > _LONG:
            return


def _elapsed(parts: Sequence[Any], cores: int) -> float:
    """Return the seconds that a round would have taken with the cores for it alone.

    Waiting for a core is left out. What a process spent running or asleep it needs in any case,
    and together they cannot run more than the cores allow.
    """
    alone = max(part.wall - part.waited for part in parts)
    return max(alone, sum(part.cpu for part in parts) / cores, 1e-9)


def recommend(measured: Sequence[Speed], now: int, batch: int | None) -> tuple[Speed, str]:
    """Return the setting to take, and what to know about it.

    Args:
        measured: With at least one of a single process.
        now: The recipe's `num_envs`.
        batch: The recipe's `frames_per_batch`, which num_envs must divide; None if it has none.
            Of each environment a batch has eight steps, or as few as it has now: advantages that
            see fewer are worse ones.
    """
    least = 1 if batch is None else min(_LEAST, max(batch // now, 1))
    fitting = [
        s for s in measured
        if batch is None or (batch % s.num_envs == 0 and batch // s.num_envs >= least)
    ]  # fmt: skip
    single = [s for s in measured if s.processes == 1]
    best = _smallest([s for s in fitting if s.processes == 1] or single)
    several = [s for s in fitting if s.processes > 1]
    if several and (most := _smallest(several)).steps_per_second >= _GAIN * best.steps_per_second:
        gain = most.steps_per_second / best.steps_per_second
        return most, (
            f"{most.processes} processes of {most.num_envs // most.processes} environments make "
            f"{gain:.1f} times as many steps as one with {best.num_envs}; a run of ours collects "
            "in one process: run seeds side by side, or use TorchRL's MultiSyncCollector"
        )
    top = max(s.steps_per_second for s in single)
    if batch is None or best.steps_per_second >= _NEAR * top:
        return best, ""
    wider = _smallest(single)
    return best, (
        f"{wider.num_envs} environments make {top / best.steps_per_second:.1f} times as many "
        f"steps, but need batches of {least * wider.num_envs} (collector.frames_per_batch) to "
        f"make {least} step{'s' * (least > 1)} each"
    )


def _smallest(speeds: Sequence[Speed]) -> Speed:
    """Return the fewest environments, then processes, within a tenth of the best."""
    top = max(s.steps_per_second for s in speeds)
    near = [s for s in speeds if s.steps_per_second >= _NEAR * top]
    return min(near, key=lambda s: (s.processes, s.num_envs))


def _table(measured: Sequence[Speed], best: Speed, now: int, cores: int, note: str) -> str:
    counts = sorted({s.processes for s in measured})
    speeds = {(s.num_envs, s.processes): s.steps_per_second for s in measured}
    head = ["num_envs", *(_processes(c) for c in counts)]
    lines = ["steps per second", "".join(f"{text:>13}" for text in head)]
    for envs in sorted({s.num_envs for s in measured}):
        line = f"{envs:>13,}"
        for count in counts:
            speed = speeds.get((envs, count))
            mark = "*" if (envs, count) == (best.num_envs, best.processes) else " "
            line += f"{'' if speed is None else f'{speed:,.0f}':>12}{mark}"
        lines.append(line.rstrip())
    lines += ["", f"{cores} core{'s' * (cores > 1)} can be used"]
    shared = [
        (s, one) for s in measured if s.processes > 1 and (one := speeds.get((s.num_envs, 1)))
    ]
    if shared and best.processes == 1:
        ratio = max(s.steps_per_second / one for s, one in shared)
        lines.append(
            f"the same environments in more processes: at most {ratio:.2f} times the steps"
        )
    words = f"recommended: collector.num_envs={best.num_envs}"
    words += f" in {_processes(best.processes)}" if best.processes > 1 else ""
    if best.num_envs == now and best.processes == 1:
        words += ", as it is"
    elif before := speeds.get((now, 1)):
        words += f", {best.steps_per_second / before:.2f} times the steps of {now} as it is"
    lines.append(words)
    if note:
        lines.append(f"note: {note}")
    return "\n".join(lines)


def _processes(count: int) -> str:
    return f"{count} process{'es' * (count > 1)}"

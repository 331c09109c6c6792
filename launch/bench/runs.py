"""Control: ours and other libraries to the same bar, on the same seeds."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polopt.launch.bench.report import table, write
from polopt.launch.bench.table import (
    ALGORITHMS,
    ENTRIES,
    GOALS,
    LIBRARIES,
    TASKS,
    Entry,
    Trial,
)
from polopt.launch.recipe import RecipeError, nearest
from polopt.launch.result import Result
from polopt.launch.run import new_folder

__all__ = ["compare"]


def compare(
    tasks: Sequence[str],
    algorithms: Sequence[str],
    libraries: Sequence[str],
    seeds: Sequence[int],
    *,
    frames: int | None,
    cpu_seconds: float | None,
    root: str,
) -> Result:
    """Train every library on every task and seed, one after the other.

    Args:
        tasks: Of `bench.table.TASKS`.
        algorithms: Of `bench.table.ALGORITHMS`.
        libraries: Of `bench.table.LIBRARIES`; those not installed are left out.
        seeds: Each trains anew.
        frames: The most of one run; None leaves it to the goal.
        cpu_seconds: After so many of training other libraries end too; None: never.
        root: Where the folder of results goes.

    Raises:
        RecipeError: If a name or a number is wrong, nothing can be run, or the folder of results
            cannot be made.
    """
    for option, words, known in (
        ("--tasks", tasks, TASKS),
        ("--algorithms", algorithms, ALGORITHMS),
        ("--libraries", libraries, LIBRARIES),
    ):
        for word in words:
            if word not in known:
                raise RecipeError(f"{option}: there is no {word!r}, {nearest(word, known)}")
    if frames is not None and frames < 2048:
        raise RecipeError(f"--frames must be at least 2048, got {frames}")
    if cpu_seconds is not None and not cpu_seconds > 0:
        raise RecipeError(f"--cpu-seconds must be positive, got {cpu_seconds}")
    for seed in seeds:
        if not 0 <= seed < 2**32:
            raise RecipeError(f"--seeds must be from 0 to 4294967295, got {seed}")
    entries = _entries(tasks, algorithms, libraries)
    plan = [
        (entry, Trial.make(task, algorithm, seed, frames=frames, cpu=cpu_seconds))
        for seed in dict.fromkeys(seeds)  # first: a busy hour meets all libraries alike
        for task, algorithm in GOALS
        if task in tasks and algorithm in algorithms
        for entry in entries
        if entry.algorithm == algorithm and task in entry.tasks
    ]
    return _run(plan, root)


def _entries(
    tasks: Sequence[str], algorithms: Sequence[str], libraries: Sequence[str]
) -> list[Entry]:
    """Return the entries that take part and are installed; says which are not."""
    if find_spec("torchrl") is None:
        raise RecipeError("bench control: torchrl is not installed: pip install 'polopt[torchrl]'")
    asked = [
        entry
        for entry in ENTRIES
        if entry.library in libraries
        and any((task, entry.algorithm) in GOALS and task in entry.tasks for task in tasks)
        and entry.algorithm in algorithms
    ]
    if not asked:
        raise RecipeError(
            f"nothing to run: {_words(libraries)} with {_words(algorithms)} is not there for "
            f"{_words(tasks)}, see polopt bench control --help"
        )
    missing = {e.library: e.package for e in asked if e.package and not e.installed}
    for library, package in missing.items():
        name = package.replace("_", "-")
        sys.stderr.write(f"{library} is left out: {name} is not installed: pip install {name}\n")
    entries = [entry for entry in asked if entry.installed]
    if not entries:
        raise RecipeError("none of the libraries is installed: add --libraries polopt")
    return entries


def _words(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _run(plan: Sequence[tuple[Entry, Trial]], root: str) -> Result:
    try:
        folder = new_folder(Path(root), "bench-control")
    except ValueError as error:
        raise RecipeError(str(error)) from error
    runs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with _trainer(folder / "log.txt") as train:
        for number, (entry, trial) in enumerate(plan, 1):
            what = f"{trial.task}, {trial.algorithm}, {entry.library}, seed {trial.seed}"
            answer = train(entry, trial)
            if answer is None:
                failed = f"{what} failed: see {folder / 'log.txt'}"
                sys.stderr.write(f"polopt: {failed}\n")
                return Result(content={"error": failed, "folder": str(folder)}, text="", code=1)
            about = {name: getattr(trial, name) for name in ("task", "algorithm", "seed")}
            runs.append({"library": entry.library, **about, **answer})
            ending = "solved" if answer["solved"] else "not solved"
            sys.stderr.write(
                f"{number}/{len(plan)} · {what}: {ending} after {answer['frames']} frames, "
                f"{answer['cpu_seconds']:.1f} CPU seconds\n"
            )
            rows = write(folder, runs)  # anew each time: an early end loses nothing
    return Result(content={"folder": str(folder), "rows": rows}, text=f"{table(rows)}\n\n{folder}")


@contextlib.contextmanager
def _trainer(log: Path) -> Iterator[Callable[[Entry, Trial], dict[str, Any] | None]]:
    """Start the process of `bench.meter`, and yield the function that has it train.

    Args:
        log: Receives what libraries print.
    """
    command = [sys.executable, "-W", "ignore", "-m", "polopt.launch.bench.meter"]
    with (
        log.open("w") as printed,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            start_new_session=True,
        ) as process,
    ):

        def train(entry: Entry, trial: Trial) -> dict[str, Any] | None:
            try:
                process.stdin.write(json.dumps([entry.function, asdict(trial)]) + "\n")  # type: ignore[union-attr]
                process.stdin.flush()  # type: ignore[union-attr]
            except BrokenPipeError:
                return None
            line = process.stdout.readline()  # type: ignore[union-attr]
            return json.loads(line) if line else None

        try:
            yield train
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # with the process that trains
            raise

"""Control: ours and other libraries to the same bar, on the same seeds."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polopt.launch.curve import write_curves
from polopt.launch.environment import describe
from polopt.launch.files import write_json, write_text
from polopt.launch.recipe import RecipeError
from polopt.launch.result import Result
from polopt.launch.run import new_folder
from polopt.launch.statistics import interquartile_mean, interval

__all__ = ["compare", "summarise"]

_PACKAGES = {"sb3": "stable_baselines3"}
"""What a library needs that polopt does not bring."""


def compare(
    tasks: Sequence[str], libraries: Sequence[str], seeds: Sequence[int], *, frames: int, root: str
) -> Result:
    """Train every library on every task and seed, one after the other.

    Args:
        tasks: Of `polopt.launch.bench.TASKS`.
        libraries: Of `polopt.launch.bench.LIBRARIES`; those not installed are left out.
        seeds: Each trains anew.
        frames: The most of one run.
        root: Where the folder of results goes.

    Raises:
        RecipeError: If nothing can be run, or the folder cannot be made.
    """
    present = _installed(libraries)
    plan = [
        (library, task, seed)
        for task in tasks
        for library in present
        for seed in seeds
        if library != "polopt-zoo" or task == "cartpole"
    ]
    if not plan:
        raise RecipeError("nothing to run: polopt-zoo is there for cartpole alone")
    try:
        folder = new_folder(Path(root), "bench-control")
    except ValueError as error:
        raise RecipeError(str(error)) from error
    runs: list[dict[str, Any]] = []
    for number, (library, task, seed) in enumerate(plan, 1):
        done = _train(library, task, seed, frames)
        if done.returncode:
            failed = f"{library} failed on {task} with seed {seed}"
            sys.stderr.write(f"{done.stderr}\npolopt: {failed}; its output stands above\n")
            return Result(content={"error": failed, "folder": str(folder)}, text="", code=1)
        answer = json.loads(done.stdout)
        runs.append({"library": library, "task": task, "seed": seed, **answer})
        ending = "solved" if answer["solved"] else "not solved"
        sys.stderr.write(
            f"{number}/{len(plan)} · {task}, {library}, seed {seed}: {ending} after "
            f"{answer['frames']} frames, {answer['cpu_seconds']:.1f} CPU seconds\n"
        )
        _write(folder, runs)  # anew each time: an early end loses nothing
    rows = summarise(runs)
    content = {"folder": str(folder), "rows": rows}
    return Result(content=content, text=f"{_table(rows)}\n\n{folder}")


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per task and library.

    Args:
        runs: What the runs returned, with `library`, `task` and `seed`.

    Returns:
        Rows with the counts of seeds and solved seeds, and for `frames`, `cpu_seconds`,
        `frames_per_cpu_second` and `final_return` the interquartile mean and its 95 % interval.
        Seeds that did not reach the bar count with all they spent.
    """
    rows = []
    for task, library in dict.fromkeys((r["task"], r["library"]) for r in runs):
        mine = [r for r in runs if (r["task"], r["library"]) == (task, library)]
        row: dict[str, Any] = {"task": task, "library": library, "seeds": len(mine)}
        row["solved"] = sum(r["solved"] for r in mine)
        columns = {k: [float(r[k]) for r in mine] for k in ("frames", "cpu_seconds")}
        columns["frames_per_cpu_second"] = [r["frames"] / r["cpu_seconds"] for r in mine]
        columns["final_return"] = [float(r["final_return"]) for r in mine]
        for name, values in columns.items():
            row[name] = {"mean": interquartile_mean(values), "interval": interval(values)}
        rows.append(row)
    return rows


def _installed(libraries: Sequence[str]) -> list[str]:
    if find_spec("torchrl") is None:
        raise RecipeError("bench control: torchrl is not installed: pip install 'polopt[torchrl]'")
    found = []
    for library in libraries:
        package = _PACKAGES.get(library)
        if package is None or find_spec(package) is not None:
            found.append(library)
        else:
            name = package.replace("_", "-")
            sys.stderr.write(
                f"{library} is left out: {name} is not installed: pip install {name}\n"
            )
    if not found:
        raise RecipeError("none of the libraries is installed: add --libraries polopt")
    return found


def _train(library: str, task: str, seed: int, frames: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "polopt.launch.bench_peers"]
    return subprocess.run(
        [*command, library, task, str(seed), str(frames)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        check=False,
    )


def _write(folder: Path, runs: Sequence[dict[str, Any]]) -> None:
    rows = summarise(runs)
    write_json(folder / "results.json", {"environment": describe(), "rows": rows, "runs": runs})
    write_text(folder / "table.md", _table(rows) + "\n")
    for task in dict.fromkeys(r["task"] for r in runs):
        curves = {
            library: _mean_curve([r["curve"] for r in runs
                                  if (r["task"], r["library"]) == (task, library)])
            for library in dict.fromkeys(r["library"] for r in runs if r["task"] == task)
        }  # fmt: skip
        write_curves(
            folder / f"{task}.svg",
            curves,
            title=f"{task}: interquartile mean over seeds, each until it reached the bar",
            x="frames",
            y="greedy return",
        )


def _mean_curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, float]]:
    """Average over seeds at every frame that one was looked at; those that ended stay there."""
    first = max(points[0][0] for points in curves)
    frames = sorted({frame for points in curves for frame, _ in points if frame >= first})
    return [
        (
            frame,
            interquartile_mean([[v for f, v in points if f <= frame][-1] for points in curves]),
        )
        for frame in frames
    ]


def _table(rows: Sequence[dict[str, Any]]) -> str:
    names = ("frames", "cpu_seconds", "frames_per_cpu_second", "final_return")
    titles = ("frames to bar", "CPU seconds to bar", "frames per CPU second", "return at the end")
    lines = [["task", "library", "solved", *titles], ["---"] * 7]
    for row in rows:
        solved = f"{row['solved']} of {row['seeds']}"
        least = "" if row["solved"] == row["seeds"] else "≥ "
        cells = [
            (least if name in ("frames", "cpu_seconds") else "") + _cell(**row[name])
            for name in names
        ]
        lines.append([row["task"], row["library"], solved, *cells])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return table + "\n\nInterquartile mean over seeds [95 % bootstrap interval]."


def _cell(mean: float, interval: tuple[float, float] | None) -> str:
    def number(value: float) -> str:
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"

    spread = f" [{number(interval[0])}, {number(interval[1])}]" if interval else ""
    return number(mean) + spread

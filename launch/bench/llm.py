"""`polopt bench llm`: our complete DAPO and TRL's own, on the same CPU time."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polopt.launch.result import Result

__all__ = ["EPILOG", "add_arguments", "bench", "summarise"]

EPILOG = """\
examples:
  polopt bench llm
  polopt bench llm --seeds 11 12 13 14 15 --cpu-seconds 60 --target 0.85
  polopt bench llm trainer.learning_rate=1e-3 --seeds 0 1

Both trainers get the model, problems, held-out problems, batches and optimizer of the recipe, and
its clip; each run is a process of its own, on one thread of one core. CPU seconds are those of
training: imports, the warm-up of the model and evaluations are left out.

  polopt  PolicyTrainer with the recipe's algorithm: dapo
  trl     GRPOTrainer of TRL with loss_type="dapo": no groups are replaced

The folder of the results has a table (Markdown), results.json and a picture of held-out accuracy
over CPU seconds, with 95 % intervals over seeds.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings of the recipe to change"
    )
    parser.add_argument("--recipe", default="arithmetic-dapo", metavar="RECIPE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="N")
    parser.add_argument(
        "--cpu-seconds", type=float, default=60.0, metavar="S", help="of training, each run (60)"
    )
    parser.add_argument(
        "--every", type=float, default=2.0, metavar="S", help="between evaluations (2)"
    )
    parser.add_argument(
        "--target", type=float, default=0.85, metavar="P", help="sampled accuracy to reach (0.85)"
    )
    parser.add_argument("--runs", metavar="DIR", default="runs", help="where the folder goes")


def bench(args: argparse.Namespace, signals: object) -> Result:
    """Train what the command line names, one run after the other.

    Raises:
        RecipeError: If the recipe or a number is wrong, or the folder cannot be made.
    """
    from polopt.launch.job import missing_extra
    from polopt.launch.recipe import RecipeError
    from polopt.launch.run import new_folder

    for option, value in (("--cpu-seconds", args.cpu_seconds), ("--every", args.every)):
        if not 0.0 < value < float("inf"):
            raise RecipeError(f"{option} must be positive, got {value}")
    if not 0.0 < args.target <= 1.0:
        raise RecipeError(f"--target must be in (0, 1], got {args.target}")
    seeds = list(dict.fromkeys(args.seeds))
    with missing_extra("bench llm"):
        from polopt.launch.bench.llm_run import TRAINERS, job_of
    for seed in {min(seeds), max(seeds)}:
        job_of(args.recipe, args.overrides, seed)
    try:
        folder = new_folder(Path(args.runs), "bench-llm")
    except ValueError as error:
        raise RecipeError(str(error)) from error
    plan = [(trainer, seed) for seed in seeds for trainer in TRAINERS]
    runs: list[dict[str, Any]] = []
    for number, (trainer, seed) in enumerate(plan, 1):
        wanted = {"recipe": args.recipe, "overrides": args.overrides, "seed": seed,
                  "trainer": trainer, "every": args.every, "budget": args.cpu_seconds}  # fmt: skip
        done = _train(wanted)
        if done.returncode:
            failed = f"{trainer} failed with seed {seed}"
            sys.stderr.write(f"{done.stderr}\npolopt: {failed}; its output stands above\n")
            return Result(content={"error": failed, "folder": str(folder)}, text="", code=1)
        runs.append({"trainer": trainer, "seed": seed, **json.loads(done.stdout)})
        last = runs[-1]["curve"][-1]
        sys.stderr.write(
            f"{number}/{len(plan)} · {trainer}, seed {seed}: sampled accuracy "
            f"{last['sampled']:.3f} after {last['cpu_seconds']:.0f} CPU seconds\n"
        )
        _write(folder, runs, args)  # anew each time: an early end loses nothing
    summary = summarise(runs, args.target)
    content = {"folder": str(folder), **summary}
    return Result(content=content, text=f"{_table(summary)}\n\n{folder}")


def _train(wanted: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "polopt.launch.bench.llm_run", json.dumps(wanted)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        check=False,
    )


def summarise(runs: Sequence[dict[str, Any]], target: float) -> dict[str, Any]:
    """Return what the runs say.

    Args:
        runs: What `bench.llm_run.run` returned, with `trainer` and `seed`.
        target: Sampled accuracy to reach.

    Returns:
        `target`; `rows`, one per trainer: how many seeds, how many reached the target, and the
        interquartile mean with its 95 % interval of the CPU seconds to the first evaluation at
        the target (all it had, where there is none), of both accuracies at the end, and of the
        optimizer steps and answers generated; and `speed_up`, the same of the CPU seconds of
        `trl` over those of `polopt` with the same seed, for the seeds that both have. It is a
        lower bound if `trl` missed the target where `polopt` did not.
    """
    rows, to_target = [], {}
    for trainer in dict.fromkeys(r["trainer"] for r in runs):
        mine = [r for r in runs if r["trainer"] == trainer]
        spent = {r["seed"]: _reached(r["curve"], target) for r in mine}
        to_target[trainer] = {seed: seconds for seed, (seconds, _) in spent.items()}
        columns = {"cpu_seconds": list(to_target[trainer].values())}
        for kind in ("sampled", "greedy"):
            columns[kind] = [r["curve"][-1][kind] for r in mine]
        for name in ("steps", "generated"):
            columns[name] = [float(r[name]) for r in mine]
        rows.append({
            "trainer": trainer,
            "seeds": len(mine),
            "reached": sum(hit for _, hit in spent.values()),
            **{name: _spread(values) for name, values in columns.items()},
        })  # fmt: skip
    ours, theirs = (to_target.get(name, {}) for name in ("polopt", "trl"))
    ratios = [theirs[seed] / ours[seed] for seed in ours if seed in theirs and ours[seed]]
    return {
        "target": target,
        "rows": rows,
        "speed_up": _spread(ratios) if ratios else None,
        "speed_ups": ratios,
    }


def _reached(curve: Sequence[dict[str, float]], target: float) -> tuple[float, bool]:
    for point in curve:
        if point["sampled"] >= target:
            return point["cpu_seconds"], True
    return curve[-1]["cpu_seconds"], False


def _spread(values: Sequence[float]) -> dict[str, Any]:
    from polopt.launch.statistics import interquartile_mean, interval

    return {"mean": interquartile_mean(values), "interval": interval(values)}


def _write(folder: Path, runs: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    from polopt.launch.curve import write_curves
    from polopt.launch.environment import describe
    from polopt.launch.files import write_json, write_text

    summary = summarise(runs, args.target)
    settings = {"recipe": args.recipe, "overrides": args.overrides, "cpu_seconds": args.cpu_seconds}
    write_json(
        folder / "results.json",
        {"environment": describe(), "settings": settings, **summary, "runs": list(runs)},
    )
    write_text(folder / "table.md", _table(summary) + "\n")
    curves, bands = {}, {}
    for row in summary["rows"]:
        name = row["trainer"]
        points = _grid([r["curve"] for r in runs if r["trainer"] == name], args.every)
        curves[name] = [(x, spread["mean"]) for x, spread in points]
        bands[name] = [(x, *(spread["interval"] or [spread["mean"]] * 2)) for x, spread in points]
    write_curves(
        folder / "accuracy.svg",
        curves,
        bands=bands,
        title=f"{args.recipe}: interquartile mean over seeds, 95 % interval",
        x="CPU seconds of training",
        y="held-out accuracy of sampled answers",
    )


def _grid(
    curves: Sequence[Sequence[dict[str, float]]], every: float
) -> list[tuple[float, dict[str, Any]]]:
    """Return the spread over seeds at multiples of `every` that all of them reached."""
    end = min(curve[-1]["cpu_seconds"] for curve in curves)
    times = [i * every for i in range(int(end / every) + 1)]
    return [(x, _spread([_at(curve, x) for curve in curves])) for x in times]


def _at(curve: Sequence[dict[str, float]], x: float) -> float:
    """Return the accuracy at a time, linear between evaluations."""
    before = [p for p in curve if p["cpu_seconds"] <= x][-1]
    after = next((p for p in curve if p["cpu_seconds"] > x), before)
    gap = after["cpu_seconds"] - before["cpu_seconds"]
    share = (x - before["cpu_seconds"]) / gap if gap else 0.0
    return before["sampled"] + share * (after["sampled"] - before["sampled"])


def _table(summary: dict[str, Any]) -> str:
    target = f"{summary['target']:g}"
    titles = ("trainer", f"reached {target}", f"CPU seconds to {target}", "sampled at the end",
              "greedy at the end", "optimizer steps", "answers generated")  # fmt: skip
    lines = [titles, ("---",) * len(titles)]
    for row in summary["rows"]:
        missed = row["reached"] < row["seeds"]
        lines.append((
            row["trainer"],
            f"{row['reached']} of {row['seeds']}",
            ("≥ " if missed else "") + _cell(row["cpu_seconds"], ".1f"),
            _cell(row["sampled"], ".3f"),
            _cell(row["greedy"], ".3f"),
            _cell(row["steps"], ",.0f"),
            _cell(row["generated"], ",.0f"),
        ))  # fmt: skip
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text += "\n\nInterquartile mean over seeds [95 % bootstrap interval]; ≥ where a seed ended "
    text += "without the target."
    if summary["speed_up"] is not None:
        each = ", ".join(f"{ratio:.2f}" for ratio in summary["speed_ups"])
        text += " CPU seconds of trl over those of polopt, same seed: "
        text += f"{_cell(summary['speed_up'], '.2f')} ({each})."
    return text


def _cell(spread: dict[str, Any], form: str) -> str:
    low_high = spread["interval"]
    rest = f" [{low_high[0]:{form}}, {low_high[1]:{form}}]" if low_high else ""
    return f"{spread['mean']:{form}}{rest}"

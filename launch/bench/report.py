"""What a comparison leaves behind: rows, a table, and a picture for each task and algorithm."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polopt.launch.curve import write_curves
from polopt.launch.environment import describe
from polopt.launch.files import write_json, write_text
from polopt.launch.statistics import interquartile_mean, interval

__all__ = ["summarise", "table", "write"]

_COLUMNS = {
    "frames": "frames to bar",
    "cpu_seconds": "CPU seconds to bar",
    "frames_per_cpu_second": "frames per CPU second",
    "final_return": "return at the end",
}


def summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per task, algorithm and library.

    Args:
        runs: What the runs returned, with `library`, `algorithm`, `task` and `seed`.

    Returns:
        Rows with the counts of seeds and solved seeds, and for `frames`, `cpu_seconds`,
        `frames_per_cpu_second` and `final_return` the interquartile mean and its 95 % interval.
        Seeds that did not reach the bar count with all they spent.
    """
    rows = []
    for key in _keys(runs):
        mine = [r for r in runs if _key(r) == key]
        row: dict[str, Any] = dict(zip(("task", "algorithm", "library"), key, strict=True))
        row |= {"seeds": len(mine), "solved": sum(r["solved"] for r in mine)}
        values = {name: [float(r[name]) for r in mine] for name in _COLUMNS if name in mine[0]}
        values["frames_per_cpu_second"] = [r["frames"] / r["cpu_seconds"] for r in mine]
        for name in _COLUMNS:
            spread = interval(values[name])
            row[name] = {"mean": interquartile_mean(values[name]), "interval": spread}
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [["task", "algorithm", "library", "solved", *_COLUMNS.values()], ["---"] * 8]
    for row in rows:
        least = "" if row["solved"] == row["seeds"] else "≥ "
        cells = [
            (least if name in ("frames", "cpu_seconds") else "") + _cell(**row[name])
            for name in _COLUMNS
        ]
        solved = f"{row['solved']} of {row['seeds']}"
        lines.append([row["task"], row["algorithm"], row["library"], solved, *cells])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        f"{text}\n\nInterquartile mean over seeds [95 % bootstrap interval]; ≥ where a seed "
        "ended without the bar."
    )


def write(folder: Path, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write `results.json`, `table.md` and the pictures, and return the rows."""
    rows = summarise(runs)
    write_json(folder / "results.json", {"environment": describe(), "rows": rows, "runs": runs})
    write_text(folder / "table.md", table(rows) + "\n")
    for task, algorithm in dict.fromkeys((r["task"], r["algorithm"]) for r in rows):
        seeds = {
            key[2]: [r["curve"] for r in runs if _key(r) == key]
            for key in _keys(runs)
            if key[:2] == (task, algorithm)
        }
        over_frames = {library: _over_frames(curves) for library, curves in seeds.items()}
        write_curves(
            folder / f"{task}-{algorithm}.svg",
            {
                library: [(frame, interquartile_mean(values)) for frame, values in points]
                for library, points in over_frames.items()
            },
            title=f"{task}, {algorithm}: mean and range of seeds, each until the bar",
            x="frames",
            y="greedy return",
            bands={
                library: [(frame, min(values), max(values)) for frame, values in points]
                for library, points in over_frames.items()
            },
        )
    return rows


def _keys(runs: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Return tasks, algorithms and libraries, those of a task together."""
    keys = list(dict.fromkeys(map(_key, runs)))
    firsts = list(dict.fromkeys(key[:2] for key in keys))
    return sorted(keys, key=lambda key: firsts.index(key[:2]))


def _key(entry: dict[str, Any]) -> tuple[str, str, str]:
    return entry["task"], entry["algorithm"], entry["library"]


def _over_frames(
    curves: Sequence[Sequence[Sequence[float]]],
) -> list[tuple[float, list[float]]]:
    """Return the returns of all seeds at every frame that one was looked at.

    Those that ended stay where they are; frames before all seeds were looked at are left out.
    """
    first = max(points[0][0] for points in curves)
    frames = sorted({frame for points in curves for frame, _ in points if frame >= first})
    return [
        (frame, [[v for f, v in points if f <= frame][-1] for points in curves]) for frame in frames
    ]


def _cell(mean: float, interval: tuple[float, float] | None) -> str:
    def number(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

    spread = f" [{number(interval[0])}, {number(interval[1])}]" if interval else ""
    return number(mean) + spread

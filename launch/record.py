"""Reading run folders, also while the run goes on and after a kill."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polopt.ext.metrics import PHASES
from polopt.launch.files import check_format, decode, read_json
from polopt.launch.recipe import load

__all__ = ["Record", "phase_seconds", "read_metrics", "read_run"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a run folder holds.

    Attributes:
        path: The folder.
        config: The resolved recipe.
        environment: Versions, machine and command line of each start, oldest first.
        metrics: The lines of metrics.jsonl: step, time, cpu, and metrics by name.
        summary: How it ended; None while it runs, or after a kill.
        checkpoints: Steps that can be resumed from, oldest first.
    """

    path: Path
    config: dict[str, Any]
    environment: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any] | None
    checkpoints: list[int]


def read_run(path: Path) -> Record:
    """Read a run folder, also one that still runs or was killed.

    Raises:
        ValueError: If it is not a run folder, a file is damaged, or a newer polopt wrote it.
    """
    if not (path / "config.yaml").is_file():
        raise ValueError(f"{path} is not a run folder: it has no config.yaml")
    summary = path / "summary.json"
    folder = path / "checkpoints"
    numbers = {p.name.removeprefix("step-").removesuffix(".old") for p in folder.glob("step-*")}
    # TRL's folders, if they were written to the end.
    whole = folder.glob("checkpoint-*/polopt.json")
    numbers |= {p.parent.name.removeprefix("checkpoint-") for p in whole}
    sessions = read_json(path / "environment.json").get("sessions")
    if not isinstance(sessions, list):
        raise ValueError(f"{path / 'environment.json'} is damaged: it has no list of sessions")
    return Record(
        path=path,
        config=load(path / "config.yaml"),
        environment=sessions,
        metrics=read_metrics(path / "metrics.jsonl"),
        summary=_summary(summary),
        checkpoints=sorted(int(n) for n in numbers if n.isdecimal()),
    )


def _summary(path: Path) -> dict[str, Any] | None:
    """Return how a run ended; None if it did not. Another rank may remove it while it is read."""
    if not path.exists():
        return None
    try:
        return read_json(path)
    except ValueError:
        if path.exists():
            raise
        return None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read metrics.jsonl; empty if it is not there yet.

    A last line that a kill cut off is left out, and so are lines that a resumed run superseded.

    Raises:
        ValueError: If another line is damaged, or was written by a newer polopt.
    """
    if not path.exists():
        return []
    *lines, rest = path.read_text(encoding="utf-8", errors="replace").split("\n")
    del rest  # empty, or cut off
    result: list[dict[str, Any]] = []
    for number, text in enumerate(lines, 1):
        try:
            line = decode(text)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is damaged: {error}") from error
        check_format(line, path)
        missing = {"step", "time", "cpu"} - line.keys()
        if missing:
            raise ValueError(f"{path}, line {number} is damaged: it has no {min(missing)!r}")
        if "resumed_from" in line:
            result = [r for r in result if r["step"] <= line["resumed_from"]]
        else:
            del line["format"]
            result.append(line)
    return result


def phase_seconds(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds of each phase over a run, by name.

    Args:
        lines: As `read_metrics` returns them. Those with a `step_time`, of language models, are
            means of their optimizer steps.
    """
    total: dict[str, float] = {}
    before = 0
    for line in lines:
        steps = line["step"] - before if "step_time" in line else 1
        times = {p: line[f"time_{p}"] for p in PHASES if f"time_{p}" in line}
        for phase, seconds in times.items():
            total[phase] = total.get(phase, 0.0) + steps * seconds
        before = line["step"] if times else before
    return {phase: round(total[phase], 3) for phase in PHASES if phase in total}

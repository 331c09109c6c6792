"""Answers of a language model, as a run folder keeps them."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polopt.launch.doctor.lines import number

__all__ = ["Sample", "clean", "read_samples", "read_tables"]

_LINE = 1 << 20  # characters of a line; longer ones are passed over
_SHOWN = 1500  # characters of a text
_TABLE, _LARGEST = "completions_", 64 << 20  # TRL's tables, in bytes
_STEPS, _EACH = 3, 4  # moments of a run, and answers of each
# Controls, halves of characters, and what turns the direction of the text that follows.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer.

    Attributes:
        step: Of the run.
        kind: `training`, or how a held-out problem was answered: `greedy` or `sampled`.
        prompt: What was asked.
        answer: What is right, where the task says so.
        completion: What the model wrote.
        marks: Rewards and advantage by name, or whether it is correct.
    """

    step: int
    kind: str
    prompt: str
    answer: str
    completion: str
    marks: dict[str, str]


def clean(text: str, most: int = _SHOWN) -> str:
    """Return a text that a page can hold: shortened, without control characters."""
    note = f" … ({len(text) - most} more characters)"
    if len(text) > most + len(note):
        text = f"{text[:most]}{note}"
    return _CONTROL.sub("\ufffd", text.replace("\r\n", "\n"))


def read_samples(folder: Path) -> list[Sample]:
    """Return some answers from the beginning to the end of a run, by kind and step.

    Of a file that grows, or was cut off, what is whole is read.
    """
    found: list[Sample] = []
    for name in ("samples.jsonl", "completions.jsonl"):
        # Answers at a few of the steps; which ones is known only at the end.
        kept: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for row in _rows(folder / name):
            kind, step = str(row.get("kind", "training")), row.get("step")
            if not isinstance(step, int) or "completion" not in row:
                continue
            mine = kept.setdefault((kind, step), [])
            if len(mine) < _EACH:
                mine.append(row)
            if len(kept) > 64 * _STEPS:
                for key in list(kept)[1:-1:2]:
                    del kept[key]
        for kind in dict.fromkeys(key[0] for key in kept):
            steps = _spread(sorted(step for k, step in kept if k == kind))
            found += [_sample(r, kind, s) for s in steps for r in kept[kind, s]]
    return found


def read_tables(folder: Path) -> list[Sample]:
    """Return some answers of a run of TRL with `log_completions`, from its tables.

    Args:
        folder: The output folder, or one of its checkpoints. The tables are read with pyarrow;
            without it, or without tables, there are no answers.
    """
    if folder.name.startswith("checkpoint-"):
        folder = folder.parent
    tables = {
        int(p.stem[len(_TABLE) :]): p
        for p in folder.glob(f"completions/{_TABLE}*.parquet")
        if p.stem[len(_TABLE) :].isdecimal() and p.is_file() and p.stat().st_size <= _LARGEST
    }
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ModuleNotFoundError:
        return []
    found: list[Sample] = []
    for step in _spread(sorted(tables)):
        with contextlib.suppress(ArrowException, OSError, ValueError):
            for row in read_table(tables[step]).slice(0, _EACH).to_pylist():
                if "completion" in row:
                    numbers = {k: v for k, v in row.items() if k not in ("step", "advantage")}
                    numbers = {k: v for k, v in numbers.items() if isinstance(v, int | float)}
                    found.append(_sample({**row, "rewards": numbers}, "training", step))
    return found


def _spread(steps: list[int]) -> list[int]:
    """Return the first, the last, and some between."""
    last = len(steps) - 1
    return sorted({steps[round(i * last / (_STEPS - 1))] for i in range(_STEPS)}) if steps else []


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(_LINE):
                if not line.endswith("\n"):  # too long, or still being written
                    while rest := file.readline(_LINE):
                        if rest.endswith("\n"):
                            break
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(row, dict):
                    yield row
    except OSError:
        return


def _sample(row: Mapping[str, Any], kind: str, step: int) -> Sample:
    marks: dict[str, str] = {}
    if "correct" in row:
        marks["correct"] = "yes" if row["correct"] is True else "no"
    rewards = row.get("rewards")
    given = dict(rewards) if isinstance(rewards, dict) else {}
    for name, value in [*given.items(), ("advantage", row.get("advantage"))]:
        if isinstance(value, int | float):
            marks[clean(str(name), 60)] = f"{number(+value):.3g}".replace("-", "−")
        elif value is None and name in given:
            marks[clean(str(name), 60)] = "none"
    answer = row.get("answer", "")
    return Sample(
        step=step,
        kind=kind,
        prompt=clean(_text(row.get("prompt", ""))),
        answer=clean(_text(answer)) if answer is not None else "",
        completion=clean(_text(row["completion"])),
        marks=marks,
    )


def _text(value: Any) -> str:  # noqa: ANN401
    """Return a text, or the messages of a conversation one after the other."""
    if isinstance(value, list) and all(isinstance(m, dict) for m in value) and value:
        if len(value) == 1:
            return str(value[0].get("content", ""))
        return "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

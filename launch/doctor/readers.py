"""From a path to runs: which format a file has, where one run ends, and what it is about."""

import contextlib
import gzip
import io
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from polopt.launch.doctor.beside import hydra_settings, lost_overrides, sb3_settings
from polopt.launch.doctor.events import event_rows, is_event_file
from polopt.launch.doctor.lines import (
    Reading,
    Row,
    history_rows,
    json_rows,
    mention,
    table_rows,
    text_rows,
)
from polopt.launch.doctor.log import Log, Mention, Series
from polopt.launch.doctor.names import FRAMEWORKS, aliases, canonical, framework_of, settings_from
from polopt.launch.doctor.scalars import read_scalars
from polopt.launch.files import read_json
from polopt.launch.recipe import load

__all__ = ["NotALogError", "build_log", "read"]

_MENTIONS, _SEGMENTS = 200, 64
_UNREADABLE = (OSError, EOFError, zlib.error)
_JSON = re.compile(r'\{[ \t]*["}]')


class NotALogError(ValueError):
    """A path is not a log that the doctor reads; the message says what it is instead."""


class _NoLogError(NotALogError):
    """A folder that has none."""


def read(path: Path) -> list[Log]:
    """Read the runs in a file or folder.

    Folders: a run folder of ours, an output folder or checkpoint of transformers, a folder with
    SB3's progress.csv, with TensorBoard files, with the `scalars` of TorchRL's CSVLogger, with
    verl's `.jsonl`, or a folder of such folders.

    Raises:
        NotALogError: In one sentence.
    """
    try:
        if path.is_dir():
            return _folder(path, depth=2)
        if not path.exists():
            raise NotALogError(f"there is no file or folder {str(path)!r}")
        return _files([path])
    except _UNREADABLE as error:
        raise NotALogError(_unreadable(path, error)) from error


def _unreadable(path: Path, error: Exception) -> str:
    return f"cannot read {path}: {getattr(error, 'strerror', None) or error}"


def _folder(path: Path, depth: int) -> list[Log]:
    for name in ("metrics.jsonl", "trainer_state.json", "progress.csv", "progress.json"):
        for file in (path / name, path / f"{name}.gz"):
            if file.is_file():
                return _ours(file) if name == "metrics.jsonl" else _with_text(file)
    checkpoints = [p for p in path.glob("checkpoint-*/trainer_state.json")]
    if checkpoints:
        return _files([max(checkpoints, key=lambda p: (len(p.parent.name), p.parent.name))])
    events = sorted(path.glob("*.tfevents.*"))
    if events:
        return _files(events, name=path)
    if (path / "scalars").is_dir() and (log := _torchrl(path)):
        return [log]
    logs: list[Log] = []
    singles = [p for s in ("*.jsonl", "*.jsonl.gz", "*.log", "*.log.gz") for p in path.glob(s)]
    for file in sorted(p for p in singles if p.is_file()):
        with contextlib.suppress(NotALogError):
            logs += _files([file])
    left: list[str] = []  # one that cannot be read does not keep the others from being read
    if depth and not logs:
        for child in sorted(p for p in path.iterdir() if p.is_dir()):
            try:
                logs += _folder(child, depth - 1)
            except _NoLogError:
                continue
            except NotALogError as error:
                left.append(str(error))
            except _UNREADABLE as error:
                left.append(_unreadable(child, error))
    if logs:
        logs[-1].notes += [f"left out: {reason}" for reason in left]
    elif left:
        raise NotALogError("; ".join(left))
    else:
        raise _NoLogError(
            f"{path} has no log that is read: metrics.jsonl, trainer_state.json, progress.csv, "
            "TensorBoard files, .jsonl or .log"
        )
    return logs


def _torchrl(path: Path) -> Log | None:
    """Read a run of TorchRL's CSVLogger; None where no metric of it is known."""
    reading = Reading()
    series = read_scalars(path / "scalars", reading)
    log = build_log(series, str(path), framework="torchrl")
    if not log.columns:
        return None
    log.rows = max(len(s) for s in log.columns.values())
    _infer(log)
    if reading.damaged:
        log.notes.append(_left_out(reading.damaged))
    return log


def _with_text(file: Path) -> list[Log]:
    """Read a table of metrics, and what the console output beside it says went wrong."""
    logs = _files([file])
    for text in sorted(file.parent.glob("*.log")):
        with contextlib.suppress(NotALogError, *_UNREADABLE), _open(text) as opened:
            for item in _rows(opened, text, Reading()):
                if isinstance(item, Mention) and len(logs[-1].mentions) < _MENTIONS:
                    logs[-1].mentions.append(item)
    return logs


def _ours(file: Path) -> list[Log]:
    """Read one of our run folders, also while it runs, or after it was killed."""
    path = file.parent
    logs = _files([file], name=path, framework="polopt")
    try:
        tree = load(path / "config.yaml") if (path / "config.yaml").is_file() else {}
        summary = read_json(path / "summary.json") if (path / "summary.json").is_file() else {}
        logs[-1].mentions += _command(path / "environment.json")
    except ValueError as error:
        logs[-1].notes.append(f"the settings are not known: {error}")
        return logs
    for log in logs:
        if tree:
            log.kind = "control" if "collector" in tree else "llm"
            log.settings, log.paths = settings_from(tree, log.framework, log.kind)
            _infer(log)
    error = str(summary.get("error", ""))
    if error:
        found = mention(error, 0, "") or Mention(kind="failed", phase="", line=0, text=error[:200])
        logs[-1].mentions.append(found)
    return logs


def _command(path: Path) -> list[Mention]:
    """Return the settings of our command line that had no effect."""
    sessions = read_json(path).get("sessions") if path.is_file() else None
    first = sessions[0] if isinstance(sessions, list) and sessions else None
    words = first.get("command") if isinstance(first, dict) else None
    return lost_overrides([str(w) for w in words]) if isinstance(words, list) else []


def _files(paths: list[Path], name: Path | None = None, framework: str | None = None) -> list[Log]:
    """Read one file, or the TensorBoard files of one run."""
    split, reading = _Split(), Reading(framework=framework)
    for path in paths:
        try:
            with _open(path) as file:
                for item in _rows(file, path, reading):
                    split.add(item)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:  # cut off, or not compressed
            if not split.segments[0].rows:
                raise NotALogError(f"cannot read {path}: {error}") from error
            reading.cut = True
    source = name or paths[0]
    logs = split.logs(str(source), reading.framework)
    if not logs:
        seen = ", ".join(" ".join(name.split())[:40] for name in sorted(split.unknown)[:4])
        raise NotALogError(
            f"{source} has no metric that is known"
            + (f": it has {seen}" if seen else ", and nothing in it looks like a line of a log")
        )
    config = reading.config
    if config is None and logs[0].framework == "sb3":
        config = sb3_settings(Path(source))
    elif config is None:
        config, lost = hydra_settings(Path(source))
        logs[-1].mentions += lost
    for log in logs:
        if config:
            log.settings, log.paths = settings_from(config, log.framework, log.kind)
        _infer(log)
    if reading.cut:
        logs[-1].notes.append("the end of the file is cut off, what is whole was read")
    if reading.damaged:
        logs[-1].notes.append(_left_out(reading.damaged))
    return logs


def _left_out(lines: int) -> str:
    if lines == 1:
        return "a line that cannot be read was left out"
    return f"{lines} lines that cannot be read were left out"


def _open(path: Path) -> BinaryIO:
    file = path.open("rb")
    if file.peek(2)[:2] == b"\x1f\x8b":  # not read: a pipe cannot go back
        file.close()
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return file


def _rows(file: BinaryIO, path: Path, reading: Reading) -> Iterator[Row | Mention]:
    buffered = file if isinstance(file, io.BufferedReader) else io.BufferedReader(file)  # type: ignore[arg-type]
    head = buffered.peek(4096)[:4096]
    if not head:
        raise NotALogError(f"{path} is empty")
    if is_event_file(head):
        yield from event_rows(buffered, reading)
        return
    if b"\x00" in head:
        raise NotALogError(f"{path} is a binary file, and not a TensorBoard file")
    start = head.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    text = io.TextIOWrapper(buffered, encoding="utf-8-sig", errors="replace", newline="\n")
    reader: Callable[..., Iterable[Row | Mention]] = text_rows
    if start.startswith("{") and '"log_history"' in start:
        reader = history_rows
    elif _JSON.match(start):
        reader = json_rows
    elif _is_table(start):
        reader = table_rows
    yield from reader(text, reading)


def _is_table(start: str) -> bool:
    cells = [c.strip() for c in start.split("\n", 1)[0].split(",")]
    return len(cells) > 1 and (framework_of(cells) is not None or "step" in cells)


@lru_cache(maxsize=4096)
def _known(name: str) -> bool:
    return any(canonical(name, framework) for framework in FRAMEWORKS)


class _Segment:
    """What was logged from one start on."""

    def __init__(self) -> None:
        self.series: dict[str, Series] = {}
        self.rows = self.falls = 0
        self.first = self.last = -math.inf
        self.distinct = 0
        self.counted = False

    def take(self, step: float, row: Row) -> None:
        if self.rows == 0:
            self.first = step
        if step != self.last:
            self.distinct += 1
        self.falls += step < self.last
        self.last = step
        self.rows += 1
        for name, value in row.values.items():
            self.series[name].add(step, value) if name in self.series else self._open(
                name, step, value
            )

    def _open(self, name: str, step: float, value: float) -> None:
        self.series[name] = Series()
        self.series[name].add(step, value)

    def drop_after(self, step: float) -> None:
        for series in self.series.values():
            series.points = [p for p in series.points if p[0] <= step]
        self.last = step

    def merge(self, other: "_Segment") -> None:
        for name, series in other.series.items():
            if name in self.series:
                self.series[name].extend(series)
            else:
                self.series[name] = series
        self.rows += other.rows
        self.falls += other.falls


class _Split:
    """Deals rows to runs: a new one begins where the steps fall back to the start."""

    def __init__(self) -> None:
        self.segments = [_Segment()]
        self.mentions: list[Mention] = []
        self.unknown: set[str] = set()
        self.shuffled = False

    def add(self, item: Row | Mention) -> None:
        """Take in a row, or a line of text."""
        if isinstance(item, Mention):
            if len(self.mentions) < _MENTIONS:
                self.mentions.append(item)
            return
        now = self.segments[-1]
        if item.resumed is not None:
            now.drop_after(item.resumed)
            return
        known = {name: value for name, value in item.values.items() if _known(name)}
        if not known:
            if len(self.unknown) < 50:
                self.unknown |= item.values.keys()
            return
        step = item.step
        if step is None:
            step, now.counted = float(now.rows), True
        if step < now.last and step <= now.first and now.distinct > 1 and not self.shuffled:
            now = _Segment()
            self.segments.append(now)
            if len(self.segments) > _SEGMENTS:  # no file holds so many runs
                self._join()
                now = self.segments[-1]
        now.take(step, Row(step, known))

    def _join(self) -> None:
        first, *others = self.segments
        for other in others:
            first.merge(other)
        self.segments, self.shuffled = [first], True

    def logs(self, source: str, framework: str | None) -> list[Log]:
        """Return one log for each run."""
        if any(s.falls > max(2, 0.02 * s.rows) for s in self.segments):
            self._join()
        used = [s for s in self.segments if s.rows]
        logs = []
        for number, segment in enumerate(used, 1):
            part = f" (run {number} of {len(used)})" if len(used) > 1 else ""
            log = build_log(segment.series, source + part, framework=framework)
            log.rows = segment.rows
            if self.shuffled:
                log.notes.append("the steps are out of order and were sorted")
            elif segment.falls:
                log.notes.append("the steps fall back (a resumed run?): the later values count")
            if segment.counted:
                log.notes.append("lines without a step are counted instead")
            logs.append(log)
        if not logs and self.mentions:
            logs.append(Log(source=source, framework="verl", kind="llm"))
        if logs:
            logs[-1].mentions += self.mentions
        return logs


def build_log(
    series: dict[str, Series], source: str, *, framework: str | None = None, kind: str | None = None
) -> Log:
    """Give logged series their canonical names, and find out who wrote them.

    Args:
        series: Metrics by the name that was logged.
        source: Where they come from.
        framework: Who wrote them, where that is known.
        kind: `control` or `llm`, where that is known.
    """
    framework = framework or framework_of(series) or FRAMEWORKS[0]
    log = Log(source=source, framework=framework, kind=kind or "control")
    order = list(aliases(framework))

    def rank(logged: str) -> tuple[int, int]:  # of several that fit `x/*`, the one with faults
        return order.index(logged) if logged in order else len(order), -series[logged].nonfinite

    for logged in sorted(series, key=rank):
        alias = canonical(logged, framework)
        if alias is None or alias.name in log.columns:
            continue
        column = series[logged]
        column.settle()
        if alias.factor != 1.0:
            points = [_scaled(p, alias.factor) for p in column.points]
            column = Series(points, column.nonfinite, column.first_nonfinite)
        log.columns[alias.name], log.names[alias.name] = column, logged
    if kind is None:
        control = framework == "polopt" and {"return_mean", "steps_per_second"} & series.keys()
        log.kind = "control" if control or framework in ("sb3", "torchrl") else "llm"
    return log


def _scaled(point: tuple[float, float, float, float, int], factor: float) -> Any:  # noqa: ANN401
    step, mean, low, high, count = point
    low, high = sorted((low * factor, high * factor))
    return step, mean * factor, low, high, count


def _infer(log: Log) -> None:
    """Take from the metrics what the configuration does not say."""
    found: dict[str, tuple[float, str]] = {}
    for setting, metric in (("lr", "learning_rate"), ("clip", "clip_range")):
        if (column := log.columns.get(metric)) and column.points:
            found[setting] = max(column.values), log.names[metric]
    updates, rounds = (log.columns.get(m) for m in ("updates", "iterations"))
    if updates and rounds and len(updates) > 1 and len(rounds) > 1 and "clip_range" in log.columns:
        counts = dict(zip(rounds.steps, rounds.values, strict=True))
        both = [(p[0], p[1], counts[p[0]]) for p in updates.points if p[0] in counts]
        if len(both) > 1 and both[-1][2] > both[0][2]:
            spans = both[-1][2] - both[0][2]
            found["epochs"] = (both[-1][1] - both[0][1]) / spans, log.names["updates"]
            found["batch"] = (both[-1][0] - both[0][0]) / spans, log.names["iterations"]
    for setting, (value, name) in found.items():
        if setting not in log.settings:
            log.settings[setting], log.paths[setting] = value, name

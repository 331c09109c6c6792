"""From rows to runs: where one run ends, and what it is about."""

import math
from functools import lru_cache
from typing import Any

from polopt.launch.doctor.lines import Row
from polopt.launch.doctor.log import Log, Mention, Series
from polopt.launch.doctor.names import FRAMEWORKS, aliases, canonical, framework_of

__all__ = ["MENTIONS", "Split", "build_log", "infer"]

MENTIONS = 200
"""Lines of text that are kept of a run."""

_SEGMENTS = 64


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


class Split:
    """Deals rows to runs: a new one begins where the steps fall back to the start."""

    def __init__(self) -> None:
        self.segments = [_Segment()]
        self.mentions: list[Mention] = []
        self.unknown: set[str] = set()
        self.shuffled = False

    def add(self, item: Row | Mention) -> None:
        """Take in a row, or a line of text."""
        if isinstance(item, Mention):
            if len(self.mentions) < MENTIONS:
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


def infer(log: Log) -> None:
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

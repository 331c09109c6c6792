"""One run, whoever logged it: metrics as bounded series, settings, lines of text that matter."""

import bisect
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from polopt.launch.doctor.names import meaning, parameter

__all__ = ["LIMIT", "Log", "Mention", "Series"]

LIMIT = 4096
"""Points that a series keeps; longer ones are averaged over neighbours."""

_LARGEST = 1e150  # sums and squares of larger values overflow


@dataclass
class Series:
    """One metric over a run, in memory that does not grow with the run.

    Beyond twice `LIMIT` points, neighbours are merged: their mean, with the lowest and the highest
    value beside it; from then on a point takes up as many values as the merged ones have, so that
    the whole run is kept at one resolution. Values that are not finite are counted and left out;
    those beyond 1e150, which no sum can hold, count as infinite.

    Attributes:
        points: (step, mean, lowest, highest, number of values).
        nonfinite: How many values were NaN or infinite.
        first_nonfinite: Step of the first of them.
        width: Values that a point takes up.
    """

    points: list[tuple[float, float, float, float, int]] = field(default_factory=list)
    nonfinite: int = 0
    first_nonfinite: float = math.inf
    width: int = 1

    def add(self, step: float, value: float) -> None:
        """Append a value; of two at the same step the later one counts."""
        if not abs(value) <= _LARGEST:
            self.nonfinite += 1
            self.first_nonfinite = min(self.first_nonfinite, step)
            return
        point = (step, value, value, value, 1)
        if self.points and self.points[-1][4] < self.width:
            self.points[-1] = _merged([self.points[-1], point])
            return
        self.points.append(point)
        if len(self.points) >= 2 * LIMIT:
            self.settle()
            while len(self.points) > LIMIT:
                self._halve()

    def settle(self) -> None:
        """Sort by step, and keep the later of two values at the same step."""
        last = {p[0]: p for p in self.points}
        self.points = [last[step] for step in sorted(last)]

    def extend(self, other: "Series") -> None:
        """Append another series, which is taken to be later."""
        self.points += other.points
        self.nonfinite += other.nonfinite
        self.first_nonfinite = min(self.first_nonfinite, other.first_nonfinite)
        self.settle()
        while len(self.points) > LIMIT:
            self._halve()

    def _halve(self) -> None:
        pairs = [self.points[i : i + 2] for i in range(0, len(self.points), 2)]
        self.points = [_merged(pair) for pair in pairs]
        self.width *= 2

    @property
    def steps(self) -> list[float]:
        """Steps, ascending."""
        return [p[0] for p in self.points]

    @property
    def values(self) -> list[float]:
        """Means, by step."""
        return [p[1] for p in self.points]

    def window(self, begin: float, end: float) -> "Series":
        """Return the part between two shares of the steps, as `window(0.5, 1.0)`."""
        if not self.points:
            return self
        first, last = self.points[0][0], self.points[-1][0]
        steps = self.steps
        low = bisect.bisect_left(steps, first + begin * (last - first))
        high = bisect.bisect_right(steps, first + end * (last - first))
        return Series(self.points[low:high])

    def median(self) -> float:
        """Median of the values; NaN without any."""
        return statistics.median(self.values) if self.points else math.nan

    def __len__(self) -> int:
        return len(self.points)


def _merged(pair: list[tuple[float, float, float, float, int]]) -> Any:  # noqa: ANN401
    count = sum(p[4] for p in pair)
    mean = sum(p[1] * p[4] for p in pair) / count
    return pair[-1][0], mean, min(p[2] for p in pair), max(p[3] for p in pair), count


@dataclass(frozen=True, kw_only=True)
class Mention:
    """A line of text that says what went wrong.

    Attributes:
        kind: Which pattern it fits: `oom`, `nonfinite`, `preempted`, …
        phase: What the run was doing, if the lines around it tell: `generation`, `update`, …
        line: Number of the line in its file, from 1; 0 where there is none.
        text: The line, shortened.
    """

    kind: str
    phase: str
    line: int
    text: str


@dataclass(kw_only=True)
class Log:
    """One run.

    Attributes:
        source: The file or folder, and which of its runs.
        framework: Who wrote it: `polopt`, `trl`, `sb3`, `verl`, `torchrl`.
        kind: `control` or `llm`.
        columns: Metrics by canonical name.
        names: What the log calls each of them.
        settings: Settings by canonical name, as far as they are known.
        paths: What the configuration calls each of them.
        mentions: Lines of text that matter.
        notes: What the reader had to leave out or put in order, for the user.
        rows: Number of lines with metrics.
    """

    source: str
    framework: str
    kind: str
    columns: dict[str, Series] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    mentions: list[Mention] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows: int = 0

    def steps(self) -> tuple[float, float]:
        """Return the first and the last step of any metric; zeros without metrics."""
        ends = [(s.points[0][0], s.points[-1][0]) for s in self.columns.values() if s.points]
        return (min(e[0] for e in ends), max(e[1] for e in ends)) if ends else (0.0, 0.0)

    @property
    def replays(self) -> bool:
        """Whether the run learns from replayed transitions."""
        return "replay_time" in self.columns or "buffer_size" in self.settings

    def lacks(self, setting: str) -> bool:
        """Whether a configuration of ours cannot have a setting.

        It is resolved: of a control run all of it, of a language model's run task and algorithm.
        """
        if self.framework != "polopt" or not self.settings or setting in self.settings:
            return False
        name = parameter(setting, self.framework, self.kind)
        return self.kind == "control" or name.startswith(("algorithm.", "task."))

    def parameter(self, setting: str) -> str:
        """Return what advice calls a setting: as the run's configuration does, else the framework.

        A setting that the run cannot have goes by words.
        """
        if setting in self.paths:
            return self.paths[setting]
        if self.lacks(setting):
            return meaning(setting)
        return parameter(setting, self.framework, self.kind, replay=self.replays)

    def numbers(self) -> Iterator[tuple[str, Series]]:
        """Yield the metrics that have values."""
        return ((n, s) for n, s in self.columns.items() if s.points or s.nonfinite)

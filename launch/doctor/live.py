"""The doctor beside a run: looks at what is logged, warns, and can ask for a stop."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polopt.launch.doctor.diagnose import Finding, diagnose
from polopt.launch.doctor.log import Series
from polopt.launch.doctor.names import canonical, settings_from
from polopt.launch.doctor.split import build_log

__all__ = ["Attendance", "Watch"]

_SHARE = 0.01  # of the time, at most, that looking takes
_FATAL = ("grad_norm", "loss", "loss_policy", "loss_value")  # looked at in every line


@dataclass(frozen=True, kw_only=True)
class Attendance:
    """The section `doctor` of a recipe.

    Attributes:
        on_fatal: What happens when a run cannot recover: `warn`, or `stop`, which saves a
            checkpoint and ends the run.
        every: Logged lines between two looks. Looking takes at most a hundredth of the time, so
            that it looks less often where lines come fast.
    """

    on_fatal: Literal["warn", "stop"] = "warn"
    every: int = 10

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, got {self.every}")


class Watch:
    """Follows one run.

    A finding is new when it holds at two looks in a row (a fatal one: at once), and is told once.
    Hints, and what is only a guess, are left to `polopt doctor` after the run.

    Args:
        config: Settings of the run, as its framework names them.
        framework: `polopt`, `trl` or `torchrl`.
        kind: `control` or `llm`.
        attendance: When to look, and what to do.

    Attributes:
        found: What was found so far, by rule.
        halted: Whether the run should save and stop.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        framework: str,
        kind: str,
        attendance: Attendance | None = None,
    ) -> None:
        self.attendance = attendance or Attendance()
        self.found: dict[str, Finding] = {}
        self.halted = False
        self._framework, self._kind = framework, kind
        self._settings = settings_from(config, framework, kind)
        self._series: dict[str, Series] = {}
        self._lines = 0
        self._before: set[str] = set()
        self._rest = 0.0  # until when not to look

    def log(self, step: float, metrics: Mapping[str, Any]) -> list[Finding]:
        """Take in one logged line, and return what is newly found; usually nothing."""
        broken = False
        for name, value in metrics.items():
            alias = canonical(name, self._framework)
            if alias is None or not isinstance(value, int | float):
                continue
            self._series.setdefault(name, Series()).add(step, float(value))
            broken |= alias.name in _FATAL and not math.isfinite(value)
        self._lines += 1
        due = self._lines % self.attendance.every == 0 and time.monotonic() >= self._rest
        return self._look() if broken or due else []

    def _look(self) -> list[Finding]:
        began = time.monotonic()
        log = build_log(self._series, "", framework=self._framework, kind=self._kind)
        log.settings, log.paths = dict(self._settings[0]), dict(self._settings[1])
        sure = [f for f in diagnose(log) if f.level != "hint" and f.confidence != "low"]
        fresh = [
            f for f in sure
            if f.id not in self.found and (f.level == "fatal" or f.id in self._before)
        ]  # fmt: skip
        self._before = {f.id for f in sure}
        self.found |= {f.id: f for f in fresh}
        if self.attendance.on_fatal == "stop":
            self.halted |= any(f.level == "fatal" for f in fresh)
        now = time.monotonic()
        self._rest = now + (now - began) / _SHARE
        return fresh

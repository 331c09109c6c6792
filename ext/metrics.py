"""Names of metrics, the same in both worlds, and a stopwatch for the phases of a loop.

A metric keeps one name from the loss to the report. Losses and diagnostics are named by
`polopt.losses` (`loss_objective`, `clip_fraction`, `kl_approx`, …); this module adds what loops
measure.
"""

import time

__all__ = ["PHASES", "Stopwatch"]

PHASES = ("collect", "replay", "advantage", "loss", "backward", "optimizer")
"""Phases of one iteration, logged in seconds as `time_collect` and so on; loops have some."""


class Stopwatch:
    """Splits time into named phases: each `lap` books the time since the last one.

    One lap costs well under a microsecond.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def start(self) -> None:
        """Begin a phase, booking the time since the last lap nowhere."""
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap under `phase`."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """Return the seconds by metric name, `time_<phase>`, and begin again from zero."""
        taken = {f"time_{phase}": seconds for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken

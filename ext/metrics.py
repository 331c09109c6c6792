"""Names of metrics, the same in both worlds, and a stopwatch for the phases of a loop.

A metric keeps one name from the loss to the report. Losses and diagnostics are named by
`polopt.losses` (`loss_objective`, `clip_fraction`, `kl_approx`, …); this module adds what loops
measure.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["PHASES", "PhaseClock", "Stopwatch"]

PHASES = (
    "collect", "environment", "generate", "replay", "reward", "log_prob", "advantage", "loss",
    "backward", "optimizer", "sync", "wait",
)  # fmt: skip
"""Phases of one iteration, logged in seconds as `time_collect` and so on; loops have some.

A line of a control run is about one iteration. A line of a language model is the mean of the
optimizer steps since the line before.

The `environment` is part of `collect`; all others lie side by side. What is not on the list, such
as an evaluation, is booked nowhere.
"""


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


class PhaseClock:
    """Splits time into phases that lie in one another: the inner one pauses the outer.

    On a CUDA device phases are measured by events in its stream, so that work counts where it is
    done and not where the host first waits for it, and nothing waits for the measurement.

    Args:
        device: Where the work is done; None for the host.
    """

    def __init__(self, device: "torch.device | None" = None) -> None:
        self._cuda = device is not None and device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._marks: list[tuple[Any, str | None]] = []  # when, and the phase from then on

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the time of a block under a name."""
        depth = len(self._open)
        self.begin(name)
        try:
            yield
        finally:
            del self._open[depth:]
            self._mark()

    def begin(self, name: str) -> None:
        """Begin a phase that `end` ends."""
        self._open.append(name)
        self._mark()

    def end(self) -> None:
        """End the innermost phase, if there is one."""
        del self._open[-1:]
        self._mark()

    def take(self) -> dict[str, float]:
        """Return the seconds by metric name, `time_<phase>`, and begin again from zero."""
        self._mark()
        if self._cuda:
            self._marks[-1][0].synchronize()  # once per line of a log
        self._fold()
        taken = {f"time_{phase}": seconds for phase, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken

    def _mark(self) -> None:
        now: Any = time.perf_counter()
        if self._cuda:
            import torch

            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((now, self._open[-1] if self._open else None))
        if len(self._marks) > 256:
            self._fold()

    def _fold(self) -> None:
        """Book what is over; the last mark stays."""
        done = 0
        for (begin, phase), (end, _) in itertools.pairwise(self._marks):
            if self._cuda and not end.query():
                break
            done += 1
            if phase is not None:
                spent = begin.elapsed_time(end) / 1000.0 if self._cuda else end - begin
                self._seconds[phase] = self._seconds.get(phase, 0.0) + spent
        del self._marks[:done]

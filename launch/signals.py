"""Ending on request: SIGTERM and Ctrl-C reach the loop between two updates."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType

__all__ = ["HANDLED", "Signals", "Terminated", "ignored"]

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def ignored(signum: int) -> bool:
    """Whether whoever started the process had a signal ignored, as nohup does with SIGHUP."""
    return signal.getsignal(signum) is signal.SIG_IGN


class Terminated(BaseException):
    """The process was asked to end. Like KeyboardInterrupt, no `except Exception` holds it.

    Attributes:
        signum: The signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"ended by {signal.Signals(signum).name}")
        self.signum = signum


class Signals:
    """Handles SIGTERM, SIGINT and SIGHUP while it is entered.

    At first a signal raises `Terminated` at once. While `patient` is true the first signal is
    only noted, so that the loop can finish its update and save; the second one, or `grace`
    seconds without an end, raises.

    Attributes:
        received: The signal that was noted, or none.
        patient: Whether the loop looks at `received`.
        grace: Seconds, below the 30 that torchrun and Kubernetes grant before they kill.
    """

    def __init__(self, grace: float = 20.0) -> None:
        self.received: int | None = None
        self.patient = False
        self.grace = grace
        self._previous: dict[int, object] = {}
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "Signals":
        for signum in HANDLED:
            if not ignored(signum):
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer:
            self._timer.cancel()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self.patient or self.received is not None:
            self.received = signum
            raise Terminated(signum)
        self.received = signum
        name = signal.Signals(signum).name
        sys.stderr.write(f"polopt: {name}: ending after this update, once more ends at once\n")
        self._timer = threading.Timer(self.grace, os.kill, (os.getpid(), signum))
        self._timer.daemon = True
        self._timer.start()

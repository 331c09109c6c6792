"""The doctor beside a `torchrl.trainers.Trainer`, or any loop that logs to a logger of TorchRL."""

import warnings
from collections.abc import Mapping
from typing import Any

from polopt.launch.doctor.live import Attendance, Watch
from polopt.launch.doctor.report import brief

__all__ = ["DoctorLogger"]


class DoctorLogger:
    """Passes everything on to a logger, and warns of what `polopt doctor` would find.

    In a trainer: `Trainer(…, logger=doctor)`, and `doctor.register(trainer)` where a fatal finding
    should end it. In a loop of one's own: save and leave it where `doctor.halted`.

    Args:
        logger: TorchRL's, such as `CSVLogger`.
        config: Settings, under the names of `polopt`'s recipes, as far as they are known.
        on_fatal: `warn`, or `stop`.
        every: Steps with logged scalars between two looks.

    Attributes:
        watch: What it has found.
    """

    def __init__(
        self,
        logger: Any,  # noqa: ANN401
        config: Mapping[str, Any] | None = None,
        on_fatal: str = "warn",
        every: int = 10,
    ) -> None:
        self._logger = logger
        attendance = Attendance(on_fatal=on_fatal, every=every)  # type: ignore[arg-type]
        self.watch = Watch(config or {}, "torchrl", "control", attendance)
        self._step: float | None = None
        self._line: dict[str, float] = {}
        self._lines = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Everything but scalars is the logger's."""
        return getattr(self._logger, name)

    def log_scalar(self, name: str, value: Any, step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        """See TorchRL's `Logger`."""
        self._logger.log_scalar(name, value, step=step, **kwargs)
        if step != self._step or (step is None and name in self._line):
            self._flush()
            self._step = step
        self._line[name] = float(value)

    def _flush(self) -> None:
        line, self._line = self._line, {}
        if not line:
            return
        self._lines += 1
        step = self._lines if self._step is None else self._step
        for finding in self.watch.log(step, line):
            warnings.warn(f"{finding.id}: {brief(finding)}", stacklevel=3)

    @property
    def halted(self) -> bool:
        """Whether the run should save and end; looks at what was logged so far."""
        self._flush()
        return self.watch.halted

    def register(self, trainer: Any) -> None:  # noqa: ANN401
        """Let a fatal finding save and end a trainer, if `on_fatal` is `stop`."""

        def end() -> None:
            if self.halted:
                trainer.total_frames = trainer.collected_frames

        trainer.register_op("post_steps", end)

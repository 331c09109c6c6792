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
    should end it.

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

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        """Everything but scalars is the logger's."""
        return getattr(self._logger, name)

    def log_scalar(self, name: str, value: Any, step: int | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        """See TorchRL's `Logger`."""
        self._logger.log_scalar(name, value, step=step, **kwargs)
        if step != self._step:
            self._flush()
            self._step = step
        self._line[name] = float(value)

    def _flush(self) -> None:
        line, self._line = self._line, {}
        if self._step is None or not line:
            return
        for finding in self.watch.log(self._step, line):
            warnings.warn(f"{finding.id}: {brief(finding)}", stacklevel=3)

    def register(self, trainer: Any) -> None:  # noqa: ANN401
        """Let a fatal finding save and end a trainer, if `on_fatal` is `stop`."""

        def end() -> None:
            self._flush()
            if self.watch.halted:
                trainer.total_frames = trainer.collected_frames

        trainer.register_op("post_steps", end)

"""The doctor beside a trainer of transformers or TRL."""

from typing import Any

from transformers import TrainerCallback
from transformers.utils import logging

from polopt.launch.doctor.live import Attendance, Watch
from polopt.launch.doctor.report import brief

__all__ = ["DoctorCallback"]

logger = logging.get_logger(__name__)


class DoctorCallback(TrainerCallback):
    """Warns of what `polopt doctor` would find: `GRPOTrainer(…, callbacks=[DoctorCallback()])`.

    Args:
        on_fatal: `warn`, or `stop`: save a checkpoint and end training when it cannot recover.
        every: Logged lines between two looks.

    Attributes:
        watch: What it has found; None before training begins.
    """

    def __init__(self, on_fatal: str = "warn", every: int = 10) -> None:
        self._attendance = Attendance(on_fatal=on_fatal, every=every)  # type: ignore[arg-type]
        self.watch: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """Read the settings."""
        self.watch = Watch(vars(args), "trl", "llm", self._attendance)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ANN401
        """Take in a line; only the main process logs."""
        if self.watch is None or not logs or not state.is_world_process_zero:
            return
        for finding in self.watch.log(state.global_step, logs):
            logger.warning("%s: %s", finding.id, brief(finding))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """End training where that was asked for."""
        if self.watch is not None and self.watch.halted:
            control.should_save = control.should_training_stop = True

"""The doctor beside a trainer of transformers or TRL."""

from typing import Any

import torch
from transformers import TrainerCallback
from transformers.utils import logging

from polopt.ext.metrics import PhaseClock
from polopt.launch.doctor.lines import row_of_trl
from polopt.launch.doctor.live import Attendance, Watch
from polopt.launch.doctor.report import brief

__all__ = ["DoctorCallback"]

logger = logging.get_logger(__name__)


class DoctorCallback(TrainerCallback):
    """Warns of what `polopt doctor` would find: `GRPOTrainer(…, callbacks=[DoctorCallback()])`.

    It also logs where the time goes, in seconds of this process for one optimizer step:
    `time_sample` (all before the pass that has a gradient: generation, rewards, old and reference
    log-probabilities), `time_update` (forward and backward passes) and `time_optimizer`. TRL has no
    event between generation and rewards. Trainers that log phases themselves are left alone.

    Args:
        on_fatal: `warn`, or `stop`: save a checkpoint and end training when it cannot recover.
        every: Logged lines between two looks.

    Attributes:
        watch: What it has found; None before training begins.
    """

    def __init__(self, on_fatal: str = "warn", every: int = 10) -> None:
        self._attendance = Attendance(on_fatal=on_fatal, every=every)  # type: ignore[arg-type]
        self.watch: Watch | None = None
        self._phases = _Phases()

    def on_train_begin(
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        model: Any = None,  # noqa: ANN401
        **_: Any,  # noqa: ANN401
    ) -> None:
        """Read the settings, and start the clock of the phases."""
        self.watch = Watch(vars(args), "trl", "llm", self._attendance)
        self._phases.close()
        self._phases = _Phases()
        # A compiled model would have the clock in its graph.
        if isinstance(model, torch.nn.Module) and not args.torch_compile:
            self._phases.watch(model, args.device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """Begin the first micro-batch of a step."""
        self._phases.turn("sample")

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """Begin the next micro-batch."""
        self._phases.turn("sample")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """Begin the optimizer's step."""
        self._phases.turn("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """End the optimizer's step; what is between two steps is booked nowhere."""
        self._phases.turn(None)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """Leave the model as it was."""
        self._phases.close()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ANN401
        """Take in a line; only the main process logs."""
        if self.watch is None or not logs or not state.is_world_process_zero:
            return
        known = any(name.startswith("time_") for name in logs)
        if "loss" in logs and not known and (times := self._phases.take()):
            logs.update(times)
            state.log_history[-1].update(times)  # what a checkpoint keeps is a copy of the line
        for finding in self.watch.log(state.global_step, row_of_trl(logs).values):
            logger.warning("%s: %s", finding.id, brief(finding))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """End training where that was asked for."""
        if self.watch is not None and self.watch.halted:
            control.should_save = control.should_training_stop = True


class _Phases:
    """Tells sampling, update and optimizer apart, by events and by when a gradient is asked for.

    The embeddings of the input are what every forward pass of a language model begins with,
    whatever is around the model: a wrapper of several processes, an adapter, a fused loss.
    """

    def __init__(self) -> None:
        self._clock: PhaseClock | None = None
        self._hook: Any = None
        self._phase: str | None = None
        self._steps = 0

    def watch(self, model: torch.nn.Module, device: torch.device) -> None:
        """Listen to the forward passes of a model that has embeddings of its input."""
        try:
            embeddings = model.get_input_embeddings()  # type: ignore[operator]
        except (AttributeError, NotImplementedError):  # no language model, or none that says
            return
        if embeddings is None:
            return
        self._clock = PhaseClock(device)
        self._hook = embeddings.register_forward_pre_hook(self._pass)

    def _pass(self, *_: Any) -> None:  # noqa: ANN401
        if self._phase == "sample" and torch.is_grad_enabled():
            self.turn("update")

    def turn(self, phase: str | None) -> None:
        """End a phase, and begin another one."""
        if self._clock is None:
            return
        if self._phase is not None:
            self._clock.end()
        if phase is not None:
            self._clock.begin(phase)
        self._steps += self._phase == "optimizer"
        self._phase = phase

    def take(self) -> dict[str, float]:
        """Return the seconds of a step, on average since the last call, by metric name."""
        if self._clock is None or not self._steps:
            return {}
        times = {name: s / self._steps for name, s in self._clock.take().items()}
        self._steps = 0
        return times

    def close(self) -> None:
        """Take back what was put into the model."""
        if self._hook is not None:
            self._hook.remove()
        self._clock = self._hook = None

"""Where the time of a trainer goes: its phases, under the names of `polopt.ext.metrics`."""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from polopt.ext.metrics import PhaseClock
from polopt.ext.trl.checkpoints import CheckpointingTrainer

__all__ = ["PhaseTrainer"]


class PhaseTrainer(CheckpointingTrainer):
    """`GRPOTrainer` that logs `time_generate`, `time_reward` and so on.

    Seconds of this rank for one optimizer step, as `step_time` is: means over those since the
    last line of the log. `advantage` is all that makes a batch of
    answers and rewards; `wait` is collectives, which last until the slowest rank is there, but for
    the one in which TRL gathers rewards. Evaluations are booked nowhere.

    Attributes:
        phases: The clock.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        self.phases = PhaseClock()
        super().__init__(*args, **kwargs)
        self.phases = PhaseClock(self.accelerator.device)
        self._steps = _Steps(self.phases)
        self.add_callback(self._steps)
        if (sampler := getattr(self, "vllm_generation", None)) is not None:
            self._time(sampler, "sync_weights", "sync")
        if self.accelerator.num_processes > 1:
            for name in ("gather", "reduce"):
                self._time(self.accelerator, name, "wait")

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return self.phases.phase(name) if self.model.training else contextlib.nullcontext()

    def _time(self, owner: Any, name: str, phase: str) -> None:  # noqa: ANN401
        """Book the calls of an object's method under a phase."""
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with self._phase(phase):
                return method(*args, **kwargs)

        setattr(owner, name, timed)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        """See `transformers.Trainer`."""
        # Until the loss, what is not a phase of its own. The model may be in evaluation mode yet.
        with self.phases.phase("advantage"):
            loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            self.phases.begin("optimizer")  # until it has stepped, with the clipping
        return loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """See `transformers.Trainer`."""
        with self._phase("loss"):
            loss = super().compute_loss(*args, **kwargs)
        if self.model.training:
            self.phases.end()
            self.phases.begin("backward")
        return loss

    def _generate(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with self._phase("generate"):
            return super()._generate(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        with self._phase("reward"):
            return super()._calculate_rewards(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        score = super()._get_per_token_logps_and_entropies
        if torch.is_grad_enabled():  # the forward pass of the loss
            return score(*args, **kwargs)
        with self._phase("log_prob"):
            return score(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """See `transformers.Trainer`."""
        if self.model.training and self._steps.count:
            logs.update({k: v / self._steps.count for k, v in self.phases.take().items()})
            self._steps.count = 0
        super().log(logs, start_time)


class _Steps(TrainerCallback):
    """Ends the phase of the optimizer, and counts its steps."""

    def __init__(self, phases: PhaseClock) -> None:
        self._phases = phases
        self.count = 0

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        self._phases.end()
        self.count += 1

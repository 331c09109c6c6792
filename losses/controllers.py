"""Controllers: coefficients that react to what the run measures.

A controller stands where a number or a schedule stands, for example
`ppo(entropy_coef=TargetEntropy(target=0.3))`. The loop tells it what was measured
(`observe_all`), `resolve` reads its present value, and its state goes into checkpoints
(`states_of`, `load_states`).
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from polopt.losses.schedules import Schedule

__all__ = [
    "AdaptiveKl",
    "Controller",
    "TargetEntropy",
    "TargetKl",
    "load_states",
    "observe_all",
    "states_of",
]


class Controller(Schedule):
    """A coefficient with a state.

    Attributes:
        metric: Name of the metric it reacts to.
        value: The present coefficient.
    """

    metric: str
    value: float

    @abstractmethod
    def observe(self, measured: float, samples: int) -> None:
        """Adapt the value to one measurement over `samples` sequences or steps."""

    def __call__(self, step: float) -> float:
        """Return the present value; the step does not matter."""
        return self.value

    def ends(self) -> tuple[float, ...]:
        """Return the first value; nobody knows the last."""
        return (self.value,)


@dataclass(kw_only=True)
class AdaptiveKl(Controller):
    """A coefficient of the divergence in the reward that holds it at a target.

    β ← β·(1 + clip(KL / target − 1, ±0.2)·samples / horizon), at least β / 2: with many
    samples and a short horizon the formula turns negative. Feed it an estimate that cannot be
    negative (k3): the sign of k1 would turn the step round.

    Source: https://arxiv.org/abs/1909.08593.

    Attributes:
        value: First coefficient, positive.
        target: Nats, per unit of what is measured.
        horizon: Samples over which a full error changes β by a factor of about e^0.2.
        metric: What it reacts to.
    """

    value: float = 0.2
    target: float = 0.1
    horizon: int = 10_000
    metric: str = "kl"

    def __post_init__(self) -> None:
        _check_positive(value=self.value, target=self.target, horizon=self.horizon)

    def observe(self, measured: float, samples: int) -> None:
        """See `Controller`."""
        error = min(max(measured / self.target - 1.0, -0.2), 0.2)
        self.value *= max(1.0 + error * samples / self.horizon, 0.5)


@dataclass(kw_only=True)
class TargetKl(Controller):
    """The coefficient of PPO's KL penalty: halved or doubled outside a band.

    KL < target / 1.5: β / 2; KL > target·1.5: β·2. Once per policy update, not per minibatch.

    Source: https://arxiv.org/abs/1707.06347.

    Attributes:
        value: First coefficient, positive.
        target: Nats.
        metric: What it reacts to.
    """

    value: float = 1.0
    target: float = 0.01
    metric: str = "kl_approx"

    def __post_init__(self) -> None:
        _check_positive(value=self.value, target=self.target)

    def observe(self, measured: float, samples: int) -> None:
        """See `Controller`."""
        if measured < self.target / 1.5:
            self.value /= 2.0
        elif measured > self.target * 1.5:
            self.value *= 2.0


@dataclass(kw_only=True)
class TargetEntropy(Controller):
    """A coefficient of the entropy bonus that acts while the entropy is below a target.

    Raised by `step` while the entropy is at or below the target, lowered above it, within
    [low, high]; it counts only while the entropy is at or below the target.

    Source: Skywork-OR1, https://arxiv.org/abs/2505.22312.

    Attributes:
        target: Nats per step.
        step: Change per observation.
        low: Smallest coefficient.
        high: Largest coefficient.
        value: First coefficient.
        metric: What it reacts to.
    """

    target: float
    step: float = 0.005
    low: float = 0.0
    high: float = 1.0
    value: float = 0.0
    metric: str = "entropy"
    active: bool = field(init=False)

    def __post_init__(self) -> None:
        self.active = False  # set here, so that it is part of the state from the beginning
        _check_positive(target=self.target, step=self.step)
        if not self.low <= self.value <= self.high:
            raise ValueError(
                f"value must be in [low, high], got {self.value} in [{self.low}, {self.high}]"
            )

    def observe(self, measured: float, samples: int) -> None:
        """See `Controller`."""
        self.active = measured <= self.target
        change = self.step if self.active else -self.step
        self.value = min(max(self.value + change, self.low), self.high)

    def ends(self) -> tuple[float, ...]:
        """See `Schedule`."""
        return (0.0, self.low, self.high)

    def __call__(self, step: float) -> float:
        """Return the coefficient, or zero while the entropy is above the target."""
        return self.value if self.active else 0.0


def observe_all(tree: Any, metrics: Mapping[str, float], samples: int) -> None:  # noqa: ANN401
    """Tell every controller inside `tree` what was measured.

    A measurement that is not finite is passed over: one bad batch must not spoil a
    coefficient for the rest of the run.

    Args:
        tree: An `Algorithm` or a part of one.
        metrics: By name.
        samples: Sequences or steps behind the measurement.

    Raises:
        ValueError: If a controller's metric is not among `metrics`.
    """
    for path, controller in _controllers(tree, ""):
        if controller.metric not in metrics:
            raise ValueError(
                f"{path} reacts to {controller.metric!r}, which is not among {sorted(metrics)}"
            )
        measured = metrics[controller.metric]
        if math.isfinite(measured):
            controller.observe(measured, samples)


def states_of(tree: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401
    """Return the state of every controller inside `tree`, by its path; JSON can hold it."""
    return {path: dict(vars(controller)) for path, controller in _controllers(tree, "")}


def load_states(tree: Any, states: Mapping[str, Mapping[str, Any]]) -> None:  # noqa: ANN401
    """Restore what `states_of` returned.

    Raises:
        ValueError: If the controllers are others than those that were saved.
    """
    controllers = dict(_controllers(tree, ""))
    if controllers.keys() != states.keys():
        raise ValueError(
            f"saved controllers {sorted(states)} are not those of the recipe {sorted(controllers)}"
        )
    for path, controller in controllers.items():
        if states[path].keys() != vars(controller).keys():
            raise ValueError(
                f"saved state {sorted(states[path])} of {path} is not that of a "
                f"{type(controller).__name__}: {sorted(vars(controller))}"
            )
        for name, value in states[path].items():
            setattr(controller, name, value)


def _controllers(node: Any, path: str) -> Iterator[tuple[str, Controller]]:  # noqa: ANN401
    if isinstance(node, Controller):
        yield path, node
    elif is_dataclass(node) and not isinstance(node, type):
        for f in fields(node):
            yield from _controllers(getattr(node, f.name), f"{path}.{f.name}".lstrip("."))
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _controllers(value, f"{path}.{key}".lstrip("."))
    elif isinstance(node, tuple):
        for i, value in enumerate(node):
            yield from _controllers(value, f"{path}[{i}]")


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")

"""Control tasks: what to solve, and how well. Building one imports no reinforcement learning."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polopt.envs.classic import (
    Acrobot,
    CartPole,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
    Physics,
)

if TYPE_CHECKING:
    from polopt.envs.batched import BatchedEnv, VectorEnv
    from polopt.envs.gym import GymnasiumEnv

__all__ = [
    "ClassicTask",
    "ControlTask",
    "GymnasiumTask",
    "acrobot",
    "cartpole",
    "gymnasium",
    "mountain_car",
    "mountain_car_continuous",
    "pendulum",
]


@dataclass(frozen=True, kw_only=True)
class ControlTask(ABC):
    """A task with observations and actions that are numbers.

    Attributes:
        name: Gymnasium's id of the same task.
        bar: Mean return of 100 greedy episodes from which it counts as solved, if there is one.
        max_steps: Time limit of an episode.
    """

    name: str
    bar: float | None
    max_steps: int

    @abstractmethod
    def make(self, num_envs: int, *, seed: int | None = None) -> "VectorEnv":
        """Build `num_envs` copies as one TorchRL environment.

        Raises:
            ImportError: If TorchRL is missing.
        """


@dataclass(frozen=True, kw_only=True)
class ClassicTask(ControlTask):
    """A classic-control task, computed by torch.

    Attributes:
        physics: Its dynamics.
    """

    physics: Physics

    def make(self, num_envs: int, *, seed: int | None = None) -> "BatchedEnv":
        """See `ControlTask`."""
        from polopt.envs.batched import BatchedEnv

        return BatchedEnv(self.physics, num_envs, max_steps=self.max_steps, seed=seed)


@dataclass(frozen=True, kw_only=True)
class GymnasiumTask(ControlTask):
    """A task of gymnasium, stepped by gymnasium.

    Attributes:
        arguments: Keyword arguments of `gymnasium.make`.
    """

    arguments: Mapping[str, Any]

    def make(self, num_envs: int, *, seed: int | None = None) -> "GymnasiumEnv":
        """See `ControlTask`."""
        from polopt.envs.gym import GymnasiumEnv

        return GymnasiumEnv(self.name, num_envs, seed=seed, arguments=self.arguments)


def gymnasium(
    *,
    name: str,
    bar: float | None = None,
    max_steps: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> ControlTask:
    """Any environment of gymnasium with a vector of observations.

    Args:
        name: Its id, for example LunarLander-v3 (`pip install 'polopt[control]'`).
        bar: Mean return that solves it; gymnasium's threshold by default, if it has one.
        max_steps: Time limit; gymnasium's by default.
        arguments: Further arguments of `gymnasium.make`.

    Raises:
        ValueError: If there is no such environment, its spaces do not fit, or it has no time
            limit.
        ImportError: If its simulator is not installed.
    """
    from polopt.envs.gym import check_id

    settings = dict(arguments or {})
    if max_steps is not None:
        settings["max_episode_steps"] = max_steps
    limit, threshold = check_id(name, settings)
    if limit is None:
        raise ValueError(f"{name} has no time limit of its own: give max_steps")
    bar = threshold if bar is None else bar
    return GymnasiumTask(name=name, bar=bar, max_steps=limit, arguments=settings)


def cartpole() -> ControlTask:
    """CartPole-v1: balance a pole for 500 steps."""
    return ClassicTask(name="CartPole-v1", physics=CartPole(), bar=475.0, max_steps=500)


def pendulum() -> ControlTask:
    """Pendulum-v1: swing up and hold, with a continuous torque."""
    return ClassicTask(name="Pendulum-v1", physics=Pendulum(), bar=-300.0, max_steps=200)


def acrobot() -> ControlTask:
    """Acrobot-v1: swing two links above the bar."""
    return ClassicTask(name="Acrobot-v1", physics=Acrobot(), bar=-100.0, max_steps=500)


def mountain_car() -> ControlTask:
    """MountainCar-v0: rock a car up a hill; no reward until it is there."""
    return ClassicTask(name="MountainCar-v0", physics=MountainCar(), bar=-110.0, max_steps=200)


def mountain_car_continuous() -> ControlTask:
    """MountainCarContinuous-v0: the same with a continuous force."""
    return ClassicTask(
        name="MountainCarContinuous-v0", physics=MountainCarContinuous(), bar=90.0, max_steps=999
    )

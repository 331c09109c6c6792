"""Control tasks: what to solve, and how well. Building one imports no reinforcement learning."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from polopt.envs.classic import (
    Acrobot,
    CartPole,
    MountainCar,
    MountainCarContinuous,
    Pendulum,
    Physics,
)

if TYPE_CHECKING:
    from polopt.envs.batched import BatchedEnv

__all__ = [
    "ControlTask",
    "acrobot",
    "cartpole",
    "mountain_car",
    "mountain_car_continuous",
    "pendulum",
]


@dataclass(frozen=True, kw_only=True)
class ControlTask:
    """A classic-control task.

    Attributes:
        name: Gymnasium's id of the same task.
        physics: Its dynamics.
        bar: Mean return of 100 greedy episodes from which it counts as solved.
        max_steps: Time limit of an episode.
    """

    name: str
    physics: Physics
    bar: float
    max_steps: int

    def make(self, num_envs: int, *, seed: int | None = None) -> "BatchedEnv":
        """Build `num_envs` copies as one TorchRL environment.

        Raises:
            ImportError: If TorchRL is missing.
        """
        from polopt.envs.batched import BatchedEnv

        return BatchedEnv(self.physics, num_envs, max_steps=self.max_steps, seed=seed)


def cartpole() -> ControlTask:
    """CartPole-v1: balance a pole for 500 steps."""
    return ControlTask(name="CartPole-v1", physics=CartPole(), bar=475.0, max_steps=500)


def pendulum() -> ControlTask:
    """Pendulum-v1: swing up and hold, with a continuous torque."""
    return ControlTask(name="Pendulum-v1", physics=Pendulum(), bar=-300.0, max_steps=200)


def acrobot() -> ControlTask:
    """Acrobot-v1: swing two links above the bar."""
    return ControlTask(name="Acrobot-v1", physics=Acrobot(), bar=-100.0, max_steps=500)


def mountain_car() -> ControlTask:
    """MountainCar-v0: rock a car up a hill; no reward until it is there."""
    return ControlTask(name="MountainCar-v0", physics=MountainCar(), bar=-110.0, max_steps=200)


def mountain_car_continuous() -> ControlTask:
    """MountainCarContinuous-v0: the same with a continuous force."""
    return ControlTask(
        name="MountainCarContinuous-v0", physics=MountainCarContinuous(), bar=90.0, max_steps=999
    )

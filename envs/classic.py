"""Gymnasium's classic-control tasks as batched torch functions.

Each class is the physics of one task and nothing else: where episodes start, what one step
does to a batch of states, and what is observed. States are float64 as in gymnasium, so whole
episodes agree with it and not only single steps. Episode length, random numbers and resets
belong to `polopt.envs.batched.BatchedEnv`.

Source of all equations and constants: `gymnasium.envs.classic_control` (CartPole-v1,
Pendulum-v1, Acrobot-v1, MountainCar-v0, MountainCarContinuous-v0).
"""

import math
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "Acrobot",
    "CartPole",
    "MountainCar",
    "MountainCarContinuous",
    "Pendulum",
    "Physics",
]

_PI = math.pi


class Physics(Protocol):
    """What `BatchedEnv` needs to know of a task."""

    @property
    def state_size(self) -> int:
        """Length S of one state."""
        ...

    @property
    def low(self) -> tuple[float, ...]:
        """Lower bound of each observation, float32 as gymnasium's."""
        ...

    @property
    def high(self) -> tuple[float, ...]:
        """Upper bound of each observation."""
        ...

    @property
    def actions(self) -> int | tuple[float, float]:
        """How many discrete actions there are, or the bounds of the one continuous one."""
        ...

    def start(self, uniform: Tensor) -> Tensor:
        """Map uniform numbers in [0, 1), [N, S], to starting states [N, S]."""
        ...

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Advance by one step.

        Args:
            state: [N, S] float64.
            action: [N] int64 where actions are discrete, [N, 1] float where continuous.

        Returns:
            The next state [N, S], the reward [N] float64 and terminated [N] bool.
        """
        ...

    def observe(self, state: Tensor) -> Tensor:
        """Observations [N, O] float32 of states [N, S]."""
        ...


class CartPole:
    """A pole on a cart, pushed left (0) or right (1); reward 1 for every step.

    State and observation: position, velocity, angle, angular velocity.
    """

    state_size = 4
    x_limit = 2.4
    angle_limit = 12 * 2 * _PI / 360
    high = (2 * x_limit, math.inf, 2 * angle_limit, math.inf)
    low = tuple(-h for h in high)
    actions = 2

    def start(self, uniform: Tensor) -> Tensor:
        """Every entry uniform in ±0.05."""
        return uniform * 0.1 - 0.05

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Euler step of 0.02 s under a force of ±10 N."""
        _, speed, angle, spin = state.unbind(-1)
        force = action.to(state.dtype) * 20.0 - 10.0
        cosine, sine = angle.cos(), angle.sin()
        push = (force + 0.05 * spin * spin * sine) / 1.1
        spin_rate = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3.0 - 0.1 * cosine * cosine / 1.1))
        rate = torch.stack((speed, push - 0.05 * spin_rate * cosine / 1.1, spin, spin_rate), -1)
        state = torch.add(state, rate, alpha=0.02)
        position, _, angle, _ = state.unbind(-1)
        terminated = (position.abs() > self.x_limit) | (angle.abs() > self.angle_limit)
        return state, torch.ones_like(position), terminated

    def observe(self, state: Tensor) -> Tensor:
        """The state in float32."""
        return state.float()


class Pendulum:
    """Swing a pendulum up with a torque in ±2; never terminates.

    State: angle (zero is up), angular velocity. Observation: cosine, sine, angular velocity.
    """

    state_size = 2
    high = (1.0, 1.0, 8.0)
    low = (-1.0, -1.0, -8.0)
    actions = (-2.0, 2.0)

    def start(self, uniform: Tensor) -> Tensor:
        """Angle uniform in ±π, velocity in ±1."""
        return (uniform * 2 - 1) * uniform.new_tensor((_PI, 1.0))

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Euler step of 0.05 s; the reward is minus the cost of the state before it."""
        angle, spin = state.unbind(-1)
        torque = action.squeeze(-1).to(state.dtype).clamp(-2.0, 2.0)
        cost = _wrap(angle) ** 2 + 0.1 * spin**2 + 0.001 * torque**2
        spin = (spin + (15.0 * angle.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
        state = torch.stack((angle + spin * 0.05, spin), -1)
        return state, -cost, torch.zeros_like(spin, dtype=torch.bool)

    def observe(self, state: Tensor) -> Tensor:
        """Cosine and sine of the angle, and the velocity."""
        angle, spin = state.unbind(-1)
        return torch.stack((angle.cos(), angle.sin(), spin), -1).float()


class Acrobot:
    """Swing the lower of two links above the bar with a torque of -1, 0 or 1 between them.

    State: two angles, two angular velocities. Reward -1 for every step, 0 for the last.
    """

    state_size = 4
    spin_limits = (4 * _PI, 9 * _PI)
    high = (1.0, 1.0, 1.0, 1.0, *spin_limits)
    low = tuple(-h for h in high)
    actions = 3

    def start(self, uniform: Tensor) -> Tensor:
        """Every entry uniform in ±0.1."""
        return uniform * 0.2 - 0.1

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One Runge-Kutta step of 0.2 s."""
        torque = action.to(state.dtype) - 1.0
        k1 = self._rate(state, torque)
        k2 = self._rate(state + 0.1 * k1, torque)
        k3 = self._rate(state + 0.1 * k2, torque)
        k4 = self._rate(state + 0.2 * k3, torque)
        angle1, angle2, spin1, spin2 = (state + 0.2 / 6.0 * (k1 + 2 * (k2 + k3) + k4)).unbind(-1)
        angle1, angle2 = _wrap(angle1), _wrap(angle2)
        first, second = self.spin_limits
        state = torch.stack(
            (angle1, angle2, spin1.clamp(-first, first), spin2.clamp(-second, second)), -1
        )
        terminated = -angle1.cos() - (angle2 + angle1).cos() > 1.0
        return state, terminated.to(state.dtype) - 1.0, terminated

    def observe(self, state: Tensor) -> Tensor:
        """Cosine and sine of both angles, and both velocities."""
        angles, spins = state.split(2, -1)
        (c1, c2), (s1, s2) = angles.cos().unbind(-1), angles.sin().unbind(-1)
        return torch.cat((torch.stack((c1, s1, c2, s2), -1), spins), -1).float()

    @staticmethod
    def _rate(state: Tensor, torque: Tensor) -> Tensor:
        """Time derivative of the state, after Sutton and Barto's book."""
        angle1, angle2, spin1, spin2 = state.unbind(-1)
        cosine, sine = angle2.cos(), angle2.sin()
        d1 = 3.5 + cosine
        d2 = 1.25 + 0.5 * cosine
        phi2 = 4.9 * (angle1 + angle2).sin()
        phi1 = -0.5 * sine * (spin2 * spin2 + 2 * spin2 * spin1) + 14.7 * angle1.sin() + phi2
        ratio = d2 / d1
        rate2 = (torque + ratio * phi1 - 0.5 * spin1 * spin1 * sine - phi2) / (1.25 - d2 * ratio)
        rate1 = -(d2 * rate2 + phi1) / d1
        return torch.stack((spin1, spin2, rate1, rate2), -1)


class MountainCar:
    """Drive an underpowered car up a hill: left (0), coast (1), right (2); reward -1 per step.

    State and observation: position, velocity.
    """

    state_size = 2
    high = (0.6, 0.07)
    low = (-1.2, -0.07)
    actions: int | tuple[float, float] = 3
    goal = 0.5

    def start(self, uniform: Tensor) -> Tensor:
        """Position uniform in [-0.6, -0.4], at rest."""
        return uniform * uniform.new_tensor((0.2, 0.0)) - uniform.new_tensor((0.6, 0.0))

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step; the car stops at the left wall."""
        state, terminated = self._drive(state, (action.to(state.dtype) - 1.0) * 0.001)
        return state, torch.full_like(state[..., 0], -1.0), terminated

    def observe(self, state: Tensor) -> Tensor:
        """The state in float32."""
        return state.float()

    def _drive(self, state: Tensor, force: Tensor) -> tuple[Tensor, Tensor]:
        position, speed = state.unbind(-1)
        speed = (speed + force - 0.0025 * (3 * position).cos()).clamp(-0.07, 0.07)
        position = (position + speed).clamp(-1.2, 0.6)
        speed = torch.where((position == -1.2) & (speed < 0), 0.0, speed)
        return torch.stack((position, speed), -1), (position >= self.goal) & (speed >= 0)


class MountainCarContinuous(MountainCar):
    """MountainCar with a force in ±1, a goal at 0.45 worth 100, and a cost of force²/10."""

    actions = (-1.0, 1.0)
    goal = 0.45

    def step(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One step; the cost counts the action as given, the motor clips it."""
        force = action.squeeze(-1).to(state.dtype)
        state, terminated = self._drive(state, force.clamp(-1.0, 1.0) * 0.0015)
        # Gymnasium rounds this task's state to float32 after each step.
        return state.float().double(), 100.0 * terminated - 0.1 * force**2, terminated


def _wrap(angle: Tensor) -> Tensor:
    """The same angle in [-π, π)."""
    return torch.remainder(angle + _PI, 2 * _PI) - _PI

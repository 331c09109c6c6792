"""Watches an environment for observations and rewards that are not finite."""

import math
import time
from collections.abc import Mapping
from types import SimpleNamespace

import torch
from torch import Tensor

from polopt.envs.batched import VectorEnv
from polopt.envs.guard import check_transitions

__all__ = ["EnvError", "FiniteEnv"]


class EnvError(ValueError):
    """An environment does not keep to the protocol of `VectorEnv`."""


class FiniteEnv(VectorEnv):
    """An environment whose transitions are checked as they come.

    One sum and one comparison per step of all copies. A number that is not finite would reach
    the policy with the next step, and the weights with the next update.

    Args:
        env: What is watched.
        drop: Instead of an error, the copy's episode is truncated there, with zeros in place
            of what it gave, so that its collector resets it; `broken` remembers the copy.

    Raises:
        EnvError: If `env` is not a `VectorEnv`.
        ValueError: If it corrupts transitions, with the reason.
    """

    def __init__(self, env: VectorEnv, *, drop: bool = False) -> None:
        if not isinstance(env, VectorEnv):
            check_transitions(env)
            raise EnvError(
                f"a control task must make a polopt.envs.batched.VectorEnv, got a "
                f"{type(env).__name__}: for gymnasium use polopt.envs.gym.GymnasiumEnv"
            )
        super().__init__(env.batch_size[0], device=env.device)
        self.env, self.drop = env, drop
        self._advance, self._shape = env.advance, env.batch_size  # faster than through the module
        self.exact = env.exact
        for name in ("observation_spec", "action_spec", "reward_spec", "done_spec"):
            setattr(self, name, getattr(env, name).clone())
        self._none_broken = torch.zeros(self.batch_size, dtype=torch.bool, device=self.device)
        self.begin("the environment")

    def begin(self, place: str) -> None:
        """Forget broken copies, and count steps from zero.

        Args:
            place: What begins here, for the message of an error.
        """
        # Held apart: a module looks long at each attribute that is set on it.
        self._seen = SimpleNamespace(place=place, steps=0, seconds=0.0, broken=self._none_broken)

    def times(self) -> dict[str, float]:
        """Return the seconds in the environment since the last `begin`, as `time_environment`."""
        return {"time_environment": self._seen.seconds}

    @property
    def broken(self) -> Tensor:
        """The copies that gave a number that is not finite since the last `begin`, bool [N]."""
        return self._seen.broken

    def restart(self, mask: Tensor | None = None) -> Tensor:
        """See `VectorEnv`.

        Raises:
            FloatingPointError: If an episode begins with such a number, also with `drop`.
        """
        began = time.perf_counter()
        observation = self.env.restart(mask)
        self._seen.seconds += time.perf_counter() - began
        if not math.isfinite(float(observation.sum())):
            self._refuse("first observation of an episode", observation)
        return observation

    def advance(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `VectorEnv`.

        Raises:
            FloatingPointError: If a number is not finite, and `drop` is off.
            EnvError: If a reward or a flag has another shape than [N].
        """
        began = time.perf_counter()
        observation, reward, terminated, truncated = self._advance(action)
        self._seen.seconds += time.perf_counter() - began
        if not reward.shape == terminated.shape == truncated.shape == self._shape:
            shapes = [list(entry.shape) for entry in (reward, terminated, truncated)]
            raise EnvError(
                "reward, terminated and truncated of an environment must have shape "
                f"{list(self._shape)}, got {', '.join(map(str, shapes))}"
            )
        if not math.isfinite(observation.sum().item() + reward.sum().item()):
            wrong = ~(observation.isfinite().all(-1) & reward.isfinite())
            if self.drop:
                observation = torch.where(wrong.unsqueeze(-1), 0.0, observation)
                reward = torch.where(wrong, 0.0, reward)
                terminated, truncated = terminated & ~wrong, truncated | wrong
                self._seen.broken = self._seen.broken | wrong
            else:
                self._refuse("reward", reward)
                self._refuse("observation", observation)
        self._seen.steps += 1
        return observation, reward, terminated, truncated

    def snapshot(self) -> dict[str, Tensor]:
        """See `VectorEnv`."""
        return self.env.snapshot()

    def restore(self, snapshot: Mapping[str, Tensor]) -> Tensor:
        """See `VectorEnv`."""
        self._restored = True
        return self.env.restore(snapshot)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environment."""
        self.env.close(raise_if_closed=raise_if_closed)
        super().close(raise_if_closed=raise_if_closed)

    def _observe(self) -> Tensor:
        return self.env._observe()

    def _set_seed(self, seed: int | None) -> None:
        self.env.set_seed(seed)

    def _refuse(self, what: str, entry: Tensor) -> None:
        """Raise if one row of an entry [N, ...] is not finite."""
        wrong = (~entry.isfinite()).flatten(1).any(-1) if entry.ndim > 1 else ~entry.isfinite()
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise FloatingPointError(
                f"the {what} of environment {row} is {entry[row].tolist()} at step "
                f"{self._seen.steps} of {self._seen.place}"
            )

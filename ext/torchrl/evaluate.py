"""Greedy evaluation."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution

from polopt.envs.batched import VectorEnv

__all__ = ["greedy_returns", "play"]


@torch.no_grad()
def play(env: VectorEnv, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Play one episode in each copy of the environment.

    Args:
        env: N copies; N episodes are played, each to its end or time limit.
        act: From observations [N, O] to actions.

    Returns:
        Undiscounted returns, float [N].
    """
    observation = env.restart()
    total = torch.zeros(env.batch_size[0], device=env.device)
    playing = torch.ones_like(total, dtype=torch.bool)
    while playing.any():
        observation, reward, terminated, truncated = env.advance(act(observation))
        total += torch.where(playing, reward, 0.0)
        playing &= ~(terminated | truncated)
    return total


def greedy_returns(env: VectorEnv, distribution: Callable[[Tensor], Distribution]) -> Tensor:
    """Play one episode in each copy of the environment, taking the most likely actions.

    Args:
        env: As of `play`.
        distribution: From observations [N, O] to the policy's distribution.

    Returns:
        Undiscounted returns, float [N].
    """
    return play(env, lambda observation: distribution(observation).mode)

"""Greedy evaluation."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution

from polopt.envs.batched import BatchedEnv

__all__ = ["greedy_returns"]


@torch.no_grad()
def greedy_returns(env: BatchedEnv, distribution: Callable[[Tensor], Distribution]) -> Tensor:
    """Play one episode in each copy of the environment, taking the most likely actions.

    Args:
        env: N copies; N episodes are played, each to its end or time limit.
        distribution: From observations [N, O] to the policy's distribution.

    Returns:
        Undiscounted returns, float [N].
    """
    observation = env.restart()
    total = torch.zeros(env.batch_size[0], device=env.device)
    playing = torch.ones_like(total, dtype=torch.bool)
    while playing.any():
        action = distribution(observation).mode
        observation, reward, terminated, truncated = env.advance(action)
        total += torch.where(playing, reward, 0.0)
        playing &= ~(terminated | truncated)
    return total

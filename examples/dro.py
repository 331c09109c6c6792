"""DRO in one file: a loss that polopt does not ship, added by its user.

Direct Reward Optimisation (Richemond et al., https://arxiv.org/abs/2405.19107): the policy
gradient, held near the policy that sampled by half the square of the log-ratio. In a recipe,
started in this folder:

    algorithm: {use: dro:dro, beta: 0.1}
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polopt.losses import Advantage, Algorithm, Objective, group_advantage


@dataclass(frozen=True, kw_only=True)
class Dro:
    """−(A·log π − β/2·(log r)²).

    Attributes:
        beta: Weight of the pull towards the policy that sampled. Not negative.

    Raises:
        ValueError: If `beta` is negative.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        if self.beta < 0.0:
            raise ValueError(f"beta must not be negative, got {self.beta}")

    def __call__(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `polopt.losses.Surrogate`."""
        loss = 0.5 * self.beta * log_ratio.square() - advantage * log_prob
        return loss, torch.zeros_like(log_ratio, dtype=torch.bool)


def dro(*, beta: float = 0.1) -> Algorithm:
    """DRO on group advantages.

    Args:
        beta: Weight of the pull towards the policy that sampled.
    """
    return Algorithm(
        objective=Objective(surrogate=Dro(beta=beta)),
        advantage=Advantage(estimate=group_advantage),
    )

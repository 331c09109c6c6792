"""SPO as a surrogate of one's own: the worked example of CONTRIBUTING.md.

Simple Policy Optimization (Xie et al., https://arxiv.org/abs/2401.16025) replaces PPO's clip by
a quadratic penalty whose weight is the advantage itself. In a recipe, started in this folder:

    algorithm: {use: spo:spo, epsilon: 0.2}
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polopt.losses import Algorithm, ppo


@dataclass(frozen=True, kw_only=True)
class Spo:
    """The loss of a step is −(r·A − |A|/(2ε)·(r − 1)²).

    Its gradient is that of −r·A at r = 1 and vanishes at r = 1 + ε for A > 0 and at r = 1 − ε
    for A < 0. Beyond, it pulls the ratio back, where PPO's is zero.

    Attributes:
        epsilon: How far the best ratio is from one. Positive.

    Raises:
        ValueError: If `epsilon` is not positive.
    """

    epsilon: float = 0.2

    def __post_init__(self) -> None:
        if not self.epsilon > 0.0:
            raise ValueError(f"epsilon must be positive, got {self.epsilon}")

    def __call__(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `polopt.losses.Surrogate`."""
        moved = torch.expm1(log_ratio)  # r − 1, exact near one
        penalty = advantage.abs() / (2.0 * self.epsilon) * moved.square()
        # Adding A leaves the gradient alone and makes the value −r·A, as of other surrogates.
        loss = penalty - advantage * moved - advantage
        beyond = moved * advantage.sign() > self.epsilon
        return loss, beyond


def spo(
    *, epsilon: float = 0.2, gamma: float = 0.99, lam: float = 0.95, entropy_coef: float = 0.0
) -> Algorithm:
    """SPO with a critic and GAE: everything but the surrogate is PPO's.

    Args:
        epsilon: How far the best ratio is from one.
        gamma: Discount per step.
        lam: λ of GAE.
        entropy_coef: Weight of the entropy bonus.
    """
    algorithm = ppo(gamma=gamma, lam=lam, entropy_coef=entropy_coef)
    return replace(
        algorithm, objective=replace(algorithm.objective, surrogate=Spo(epsilon=epsilon))
    )

"""Bandits: one state, some arms, and what is lost by not pulling the best one."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

__all__ = ["BanditTask", "bandit"]


@dataclass(frozen=True, kw_only=True)
class BanditTask:
    """A bandit whose arms pay independently and never change; built by `bandit`.

    Attributes:
        means: Mean reward of each arm.
        reward: How it pays.
        deviation: Standard deviation of Gaussian rewards.
    """

    means: tuple[float, ...]
    reward: Literal["bernoulli", "gaussian"]
    deviation: float

    @property
    def name(self) -> str:
        """Says what it is."""
        return f"{len(self.means)}-armed {self.reward} bandit"

    @property
    def gaps(self) -> Tensor:
        """What a pull of each arm loses in the mean, float64 [A]."""
        means = torch.tensor(self.means, dtype=torch.float64)
        return means.max() - means

    def pull(self, arms: Tensor, generator: Generator | None = None) -> Tensor:
        """Return rewards float32 [N] of arms int64 [N]."""
        means = torch.tensor(self.means)[arms]
        if self.reward == "bernoulli":
            return torch.bernoulli(means, generator=generator)
        return torch.normal(means, self.deviation, generator=generator)

    def ucb1_bound(self, plays: int) -> float:
        """The most that UCB1 loses in the mean over `plays` pulls.

        8·ln(n)·Σ 1/Δᵢ + (1 + π²/3)·Σ Δᵢ over the arms that are not best.
        Source: https://doi.org/10.1023/A:1013689704352, theorem 1.

        Raises:
            ValueError: If rewards are not within [0, 1].
        """
        if self.reward != "bernoulli":
            raise ValueError(f"the bound is for rewards within [0, 1], not for {self.reward} ones")
        gaps = self.gaps[self.gaps > 0]
        growth = 8.0 * math.log(plays) * float((1.0 / gaps).sum())
        return growth + (1.0 + math.pi**2 / 3.0) * float(gaps.sum())


def bandit(
    *,
    means: tuple[float, ...],
    reward: Literal["bernoulli", "gaussian"] = "bernoulli",
    deviation: float = 1.0,
) -> BanditTask:
    """Arms to choose from, again and again, without a state.

    Args:
        means: Mean reward of each arm; for Bernoulli rewards the chance of a 1.
        reward: `bernoulli`, 0 or 1, or `gaussian`.
        deviation: Standard deviation of Gaussian rewards.

    Raises:
        ValueError: If there are fewer than two arms, or a number is out of its range.
    """
    if len(means) < 2:
        raise ValueError(f"means must name at least two arms, got {list(means)}")
    if not all(math.isfinite(mean) for mean in means):
        raise ValueError(f"means must be finite, got {list(means)}")
    if reward == "bernoulli" and not all(0.0 <= mean <= 1.0 for mean in means):
        raise ValueError(f"means of Bernoulli rewards must be in [0, 1], got {list(means)}")
    if not 0.0 < deviation < math.inf:
        raise ValueError(f"deviation must be positive and finite, got {deviation}")
    return BanditTask(means=tuple(means), reward=reward, deviation=deviation)

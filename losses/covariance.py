"""Clip-Cov and KL-Cov: tokens that drive the entropy down are held back.

The covariance of a token is (log π − mean log π)·(A − mean A), means over all trained tokens
of the batch. Both rules pick tokens over the whole batch, so they declare it (`select`), and a
loop that cuts the batch hands the selection in; see `polopt.losses.policy_loss`.

Source: https://arxiv.org/abs/2505.22617 eq. 10-14.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polopt.losses.schedules import Coefficient, check_coefficient, number
from polopt.losses.surrogates import Clip, clip_loss

__all__ = ["ClipCov", "KlCov", "covariance"]


def covariance(log_prob: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """Return the covariance of each token, float [B, T], −inf outside the mask.

    Args:
        log_prob: float [B, T].
        advantage: float [B, T].
        mask: bool [B, T].
    """
    count = mask.sum().clamp(min=1)
    product = torch.ones_like(log_prob)
    for x in (log_prob, advantage):
        x = torch.where(mask, x, 0.0)
        product = product * (x - x.sum() / count)
    return torch.where(mask, product, -torch.inf)


@dataclass(frozen=True, kw_only=True)
class ClipCov:
    """Clip-Cov: tokens of high covariance, drawn at random, lose their gradient.

    ⌊share·N⌋ of the N tokens of the batch, at least one, drawn uniformly from those whose
    covariance lies within (cov_low, cov_high) and which PPO's clip leaves alone (the paper says
    neither "at least one" nor the latter; the authors' code in verl does). Their loss is zero;
    they stay in the count.

    Attributes:
        low: As in `Clip`; the authors run 1, that is no bound from below.
        high: As in `Clip`; the authors run 1.
        share: Of tokens to hold back.
        cov_low: Smallest covariance of a candidate.
        cov_high: Largest covariance of a candidate.
    """

    low: Coefficient = 1.0
    high: Coefficient = 1.0
    share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0

    def __post_init__(self) -> None:
        Clip(low=self.low, high=self.high)
        _check_share(self.share)
        if not self.cov_low < self.cov_high:
            raise ValueError(
                f"cov_low must be below cov_high, got {self.cov_low} and {self.cov_high}"
            )

    def select(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the tokens to hold back, bool [B, T], drawn from torch's default generator.

        Args:
            log_ratio: float [B, T] of the whole batch, like the others.
            advantage: float [B, T].
            log_prob: float [B, T].
            mask: bool [B, T].
        """
        _, clipped = self._clip(log_ratio, advantage)
        cov = covariance(log_prob, advantage, mask)
        candidate = (cov > self.cov_low) & (cov < self.cov_high) & ~clipped
        lot = torch.where(candidate, torch.rand_like(cov), -1.0)
        return _largest(lot, self.share, mask) & candidate

    def __call__(
        self,
        log_ratio: Tensor,
        advantage: Tensor,
        log_prob: Tensor,
        mask: Tensor | None,
        selected: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See `Surrogate`; `selected` is what `select` returned, bool [B, T]."""
        loss, clipped = self._clip(log_ratio, advantage)
        return torch.where(selected, 0.0, loss), clipped | selected

    def _clip(self, log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
        low, high = number(self.low, "low"), number(self.high, "high")
        return clip_loss(log_ratio, advantage, low, high)


@dataclass(frozen=True, kw_only=True)
class KlCov:
    """KL-Cov: the tokens of highest covariance pay for moving away from the old policy.

    −r·A, without a clip, + coef·|log r| on the ⌊share·N⌋ tokens, at least one, of highest
    covariance.

    Attributes:
        coef: Weight of the penalty, per nat. The paper's 1.
        share: Of tokens to penalise. 2e-3 for 7B, 2e-4 for 32B in the paper.
    """

    coef: Coefficient = 1.0
    share: float = 2e-3

    def __post_init__(self) -> None:
        check_coefficient("coef", self.coef)
        _check_share(self.share)

    def select(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the tokens to penalise, bool [B, T]; arguments as in `ClipCov.select`."""
        return _largest(covariance(log_prob, advantage, mask), self.share, mask) & mask

    def __call__(
        self,
        log_ratio: Tensor,
        advantage: Tensor,
        log_prob: Tensor,
        mask: Tensor | None,
        selected: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See `Surrogate`; `selected` is what `select` returned, bool [B, T]."""
        penalty = torch.where(selected, number(self.coef, "coef") * log_ratio.abs(), 0.0)
        loss = penalty - advantage * log_ratio.exp()
        return loss, torch.zeros_like(loss, dtype=torch.bool)


def _largest(score: Tensor, share: float, mask: Tensor) -> Tensor:
    """Return the ⌊share·N⌋ entries, at least one, of highest score. Without a host sync."""
    count = (share * mask.sum()).floor().clamp(min=1)
    order = score.flatten().argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return (rank < count).view_as(score)


def _check_share(share: float) -> None:
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must be in (0, 1], got {share}")

"""Surrogates: what one step contributes, given its log-ratio and its advantage.

A surrogate is a frozen dataclass with one method. A new one needs no registration: pass an
instance of it to `Objective`.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from polopt.losses.schedules import Coefficient, check_coefficient, check_unit, number

__all__ = [
    "Cispo",
    "Clip",
    "GeometricClip",
    "KlPenalty",
    "Plain",
    "SelectingSurrogate",
    "SoftGate",
    "Surrogate",
]


@runtime_checkable
class Surrogate(Protocol):
    """A rule that turns importance ratios and advantages into a loss per step."""

    def __call__(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each step and where the rule cut its gradient.

        Args:
            log_ratio: float [B, T] or [B], log of new over old probability at the level of
                the objective, within ±20 nats, zero outside the mask.
            advantage: float, broadcasts against `log_ratio`, without gradient.
            log_prob: float, shape of `log_ratio`, under the policy being trained.
            mask: bool, shape of `log_ratio`, or None: every step.

        Returns:
            Loss float and clipped bool, shape of `log_ratio`; ignored outside the mask.
        """
        ...


@runtime_checkable
class SelectingSurrogate(Protocol):
    """A surrogate that treats some steps of the batch differently, chosen over all of it.

    A loop that cuts the batch into micro-batches or ranks calls `select` once on the whole
    and hands the selection to every part; see `polopt.losses.ClipCov`.
    """

    def select(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor
    ) -> Tensor:
        """Return the chosen steps, bool [B, T]; arguments as in `Surrogate`, whole batch."""
        ...

    def __call__(
        self,
        log_ratio: Tensor,
        advantage: Tensor,
        log_prob: Tensor,
        mask: Tensor | None,
        selected: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Like `Surrogate.__call__`, with the chosen steps, bool [B, T]."""
        ...


def _check_positive(**coefficients: Coefficient) -> None:
    for name, value in coefficients.items():
        check_coefficient(name, value, allowed=lambda x: x > 0.0, expected="positive")


def clip_loss(
    log_ratio: Tensor, advantage: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return −min(r·A, clip(r, 1 − low, 1 + high)·A) and where the clip cuts the gradient."""
    ratio = log_ratio.exp()
    cost = -advantage
    now = ratio.detach()
    nearest = now.clamp(1.0 - low, 1.0 + high)
    clipped = cost * nearest > cost * now
    # Where the clip binds the loss is constant: its gradient is that of a choice, several times
    # cheaper than those of a clamp and a maximum.
    return cost * torch.where(clipped, nearest, ratio), clipped


@dataclass(frozen=True, kw_only=True)
class Clip:
    """PPO clipping, with separate bounds (DAPO) and an optional dual clip.

    −min(r·A, clip(r, 1 − low, 1 + high)·A); with `dual` = c and A < 0 at most −c·A.

    The min matters: without it a policy that has moved the wrong way is never pulled back.

    Source: https://arxiv.org/abs/1707.06347; https://arxiv.org/abs/2503.14476 eq. 10
    (clip-higher); https://arxiv.org/abs/1912.09729 (dual clip).

    Attributes:
        low: The ratio is clipped from below at `1 - low`. In [0, 1]; zero, where a schedule may
            end, credits no change beyond the first step.
        high: The ratio is clipped from above at `1 + high`. At least 0.
        dual: Bound on the ratio where the advantage is negative, above one; none by default
            (verl always applies 3.0). It cuts the gradient of a step that has to be pulled
            back from far away.
    """

    low: Coefficient = 0.2
    high: Coefficient = 0.2
    dual: Coefficient | None = None

    def __post_init__(self) -> None:
        check_unit("low", self.low)
        check_coefficient(
            "high", self.high, allowed=lambda x: x >= 0.0, expected="a number of at least 0"
        )
        if self.dual is not None:
            check_coefficient(
                "dual", self.dual, allowed=lambda x: x > 1.0, expected="more than one"
            )

    def __call__(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Surrogate`."""
        low, high = number(self.low, "low"), number(self.high, "high")
        loss, clipped = clip_loss(log_ratio, advantage, low, high)
        if self.dual is not None:
            cost = -advantage
            floor = cost * number(self.dual, "dual")
            over = (cost > 0) & (loss > floor)
            loss = torch.where(over, floor, loss)
            clipped = clipped | over
        return loss, clipped


@dataclass(frozen=True, kw_only=True)
class Cispo:
    """CISPO: a clipped ratio, without gradient, weighs the log-probability.

    −sg(clip(r, 1 − low, 1 + high))·A·log π. Every step keeps its gradient, clipped or not.
    The value depends on log π and cannot be compared with PPO's.

    Source: https://arxiv.org/abs/2506.13585 eq. 4-5. The paper leaves the bounds open.

    Attributes:
        high: The weight is at most `1 + high`.
        low: The weight is at least `1 - low`; None leaves it free, as the paper does.
    """

    high: Coefficient = 4.0
    low: Coefficient | None = None

    def __post_init__(self) -> None:
        check_coefficient(
            "high", self.high, allowed=lambda x: x >= 0.0, expected="a number of at least 0"
        )
        if self.low is not None:
            check_coefficient(
                "low", self.low, allowed=lambda x: 0.0 <= x <= 1.0, expected="in [0, 1] or none"
            )

    def __call__(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Surrogate`."""
        ratio = log_ratio.detach().exp()
        low = None if self.low is None else 1.0 - number(self.low, "low")
        weight = ratio.clamp(min=low, max=1.0 + number(self.high, "high"))
        return -weight * advantage * log_prob, weight != ratio


@dataclass(frozen=True, kw_only=True)
class SoftGate:
    """SAPO: a sigmoid gate instead of a clip.

    −σ(τ·(r − 1))·4/τ·A, with one temperature for A > 0 and one for the rest. Its gradient is
    that of −r·A at r = 1 and fades on both sides.

    Source: https://arxiv.org/abs/2511.20347.

    Attributes:
        tau_positive: Temperature where the advantage is positive.
        tau_negative: Temperature elsewhere; larger, so that it fades faster.
    """

    tau_positive: Coefficient = 1.0
    tau_negative: Coefficient = 1.05

    def __post_init__(self) -> None:
        for name in ("tau_positive", "tau_negative"):
            check_coefficient(
                name,
                getattr(self, name),
                allowed=lambda x: 0.0 < x < float("inf"),
                expected="positive and finite",
            )

    def __call__(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Surrogate`."""
        negative = number(self.tau_negative, "tau_negative")
        spread = number(self.tau_positive, "tau_positive") - negative
        tau = negative + spread * (advantage > 0).to(log_ratio.dtype)
        gate = torch.sigmoid(tau * torch.expm1(log_ratio)) * 4.0 / tau
        return -gate * advantage, torch.zeros_like(log_ratio, dtype=torch.bool)


@dataclass(frozen=True, kw_only=True)
class GeometricClip:
    """GMPO: clips each log-ratio, then takes the geometric mean over the sequence.

    −exp(mean_t c_t)·A with c_t = s·min(s·log r_t, s·clip(log r_t, −low, high)), s = sign(A).
    Goes with aggregation `"sequence_mean"`; advantages are averaged over the sequence.

    Source: https://arxiv.org/abs/2507.20673.

    Attributes:
        low: Bound of the log-ratio from below, in nats.
        high: Bound from above, in nats. The paper uses (e^−0.4, e^0.4).
    """

    low: Coefficient = 0.4
    high: Coefficient = 0.4

    def __post_init__(self) -> None:
        _check_positive(low=self.low, high=self.high)

    def __call__(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Surrogate`."""
        if log_ratio.ndim != 2:
            raise ValueError(f"GeometricClip needs steps [B, T], got {tuple(log_ratio.shape)}")
        if mask is None:
            mask = torch.ones_like(log_ratio, dtype=torch.bool)
        length = mask.sum(-1, keepdim=True).clamp(min=1)
        advantage = torch.where(mask, advantage, 0.0).sum(-1, keepdim=True) / length
        sign = advantage.sign()
        bound = log_ratio.clamp(-number(self.low, "low"), number(self.high, "high"))
        kept = torch.minimum(sign * log_ratio, sign * bound)
        clipped = sign * log_ratio > kept
        mean = torch.where(mask, sign * kept, 0.0).sum(-1, keepdim=True) / length
        return (-advantage * mean.exp()).expand_as(log_ratio), clipped


@dataclass(frozen=True, kw_only=True)
class KlPenalty:
    """PPO with a KL penalty on the old policy instead of a clip.

    −r·A + coef·KL(π_old ‖ π), the divergence estimated on samples of the old policy by
    r − 1 − log r (never negative). `polopt.losses.controllers.TargetKl` adapts `coef`.

    Source: https://arxiv.org/abs/1707.06347.

    Attributes:
        coef: Weight of the divergence, per nat.
    """

    coef: Coefficient = 1.0

    def __post_init__(self) -> None:
        check_coefficient("coef", self.coef)

    def __call__(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Surrogate`."""
        ratio = log_ratio.exp()
        penalty = torch.expm1(log_ratio) - log_ratio
        return number(self.coef, "coef") * penalty - ratio * advantage, torch.zeros_like(
            ratio, dtype=torch.bool
        )


@dataclass(frozen=True, kw_only=True)
class Plain:
    """REINFORCE: −A·log π. With ratio `"none"` this is the policy gradient, and GPG.

    With another ratio level the weight is r without its gradient: −sg(r)·A·log π.

    Source: https://doi.org/10.1007/BF00992696; GPG: https://arxiv.org/abs/2504.02546.
    """

    def __call__(
        self, log_ratio: Tensor, advantage: Tensor, log_prob: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `Surrogate`."""
        weight = log_ratio.detach().exp()
        return -weight * advantage * log_prob, torch.zeros_like(log_ratio, dtype=torch.bool)

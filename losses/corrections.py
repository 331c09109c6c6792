"""Corrections for a sampler that is not the old policy.

The sampler's probabilities (`behavior_log_prob`) differ from those of the policy that anchors
the ratio when another engine generates (vLLM), when its weights are stale, or when the data
was logged. A correction weighs the loss of each step; it never touches the mask, so the
count of the batch stays what it was. Weights carry no gradient.
"""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from polopt.losses.numerics import MAX_LOG_RATIO
from polopt.losses.schedules import Coefficient, check_coefficient, number

__all__ = ["Correction", "Level", "OffPolicyMask", "Reject", "RejectDivergent", "Reweight"]

Level = Literal["token", "sequence", "geometric"]


@runtime_checkable
class Correction(Protocol):
    """A rule that weighs steps by how far the sampler is from the policy."""

    def __call__(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        behavior_log_prob: Tensor,
        advantage: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """Return the weight of each step, float [B, T], without gradient.

        Args:
            log_prob: float [B, T], detached, zero outside the mask like the next two.
            old_log_prob: float [B, T].
            behavior_log_prob: float [B, T].
            advantage: float [B, T] or [B, 1].
            mask: bool [B, T].
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Reweight:
    """Truncated importance sampling: the weight old / behavior, bounded.

    With `low` None this is TIS, min(ρ, high); with `low` it is bounded on both sides.

    Source: https://fengyao.notion.site/off-policy-rl.

    Attributes:
        level: `"token"`, `"sequence"` (the product over the trained steps) or `"geometric"`
            (its length-normalised form).
        high: Largest weight.
        low: Smallest weight, or none.
    """

    level: Level = "token"
    high: Coefficient = 2.0
    low: Coefficient | None = None

    def __post_init__(self) -> None:
        _check_bounds(self.level, self.low, self.high)

    def __call__(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        behavior_log_prob: Tensor,
        advantage: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """See `Correction`."""
        ratio = _log_ratio(old_log_prob, behavior_log_prob, mask, self.level).exp()
        low = None if self.low is None else number(self.low, "low")
        return ratio.clamp(min=low, max=number(self.high, "high"))


@dataclass(frozen=True, kw_only=True)
class Reject:
    """Drops what lies outside bounds on old / behavior, and weighs the rest.

    At token level with `weigh` this is IcePop; at sequence level TRL's `sequence_mask`; at
    geometric level the geometric rejection of verl, with the bounds on the ratio itself
    (verl's `k1` variants bound its inverse, so their "0.5_5.0" keeps [0.2, 2]).

    Source: https://ringtech.notion.site/icepop.

    Attributes:
        level: As in `Reweight`.
        high: Steps (or sequences) with a larger ratio get weight zero.
        low: Likewise with a smaller one. None: no lower bound.
        weigh: Multiply what is kept by its ratio; otherwise by one.
    """

    level: Level = "token"
    high: Coefficient = 2.0
    low: Coefficient | None = None
    weigh: bool = True

    def __post_init__(self) -> None:
        _check_bounds(self.level, self.low, self.high)

    def __call__(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        behavior_log_prob: Tensor,
        advantage: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """See `Correction`."""
        ratio = _log_ratio(old_log_prob, behavior_log_prob, mask, self.level).exp()
        kept = ratio <= number(self.high, "high")
        if self.low is not None:
            kept = kept & (ratio >= number(self.low, "low"))
        return torch.where(kept, ratio if self.weigh else 1.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class RejectDivergent:
    """Drops steps or whole sequences on which sampler and old policy disagree too much.

    Weight 0 where an estimate of KL(sampler ‖ old policy), pooled, is above the limit, else 1.
    With d = log(old / behavior): k2 is d²/2, k3 is exp(d) − 1 − d; neither can be negative,
    so one limit holds deviations in both directions (`Reject` bounds the ratio itself).

    Source: the estimates are those of http://joschu.net/blog/kl-approx.html; as a rule for
    rejection they are verl's (`rollout_rs`).

    Attributes:
        limit: In nats, positive.
        kl: `"k2"` or `"k3"`.
        pool: `"token"`: each step by itself; `"sum"`, `"mean"` or `"max"` over the trained steps
            of a sequence, which is dropped as a whole.
    """

    limit: Coefficient
    kl: Literal["k2", "k3"] = "k3"
    pool: Literal["token", "sum", "mean", "max"] = "mean"

    def __post_init__(self) -> None:
        check_coefficient("limit", self.limit, allowed=_positive, expected="positive")
        if self.kl not in ("k2", "k3"):
            raise ValueError(f"kl must be 'k2' or 'k3', got {self.kl!r}")
        if self.pool not in ("token", "sum", "mean", "max"):
            raise ValueError(f"pool must be 'token', 'sum', 'mean' or 'max', got {self.pool!r}")

    def __call__(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        behavior_log_prob: Tensor,
        advantage: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """See `Correction`."""
        if self.pool != "token":
            _check_sequences(old_log_prob)
        gap = (old_log_prob - behavior_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        step = 0.5 * gap.square() if self.kl == "k2" else torch.expm1(gap) - gap
        if self.pool == "max":
            step = step.amax(-1, keepdim=True) if step.shape[-1] else step[..., :1]
        elif self.pool != "token":
            step = step.sum(-1, keepdim=True)
        if self.pool == "mean":
            step = step / mask.sum(-1, keepdim=True).clamp(min=1)
        return (step <= number(self.limit, "limit")).to(gap.dtype)


@dataclass(frozen=True, kw_only=True)
class OffPolicyMask:
    """Drops whole sequences with a negative advantage that the policy has moved away from.

    Weight 0 where A < 0 and mean_t log(behavior / policy) > threshold, else 1.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556 eq. 8-9; the threshold is not
    published.

    Attributes:
        threshold: In nats per step.
    """

    threshold: Coefficient

    def __post_init__(self) -> None:
        check_coefficient("threshold", self.threshold)

    def __call__(
        self,
        log_prob: Tensor,
        old_log_prob: Tensor,
        behavior_log_prob: Tensor,
        advantage: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """See `Correction`."""
        _check_sequences(log_prob)
        length = mask.sum(-1, keepdim=True).clamp(min=1)
        gap = (behavior_log_prob - log_prob).sum(-1, keepdim=True) / length
        return torch.where(
            (advantage < 0) & (gap > number(self.threshold, "threshold")), 0.0, 1.0
        ).to(log_prob.dtype)


def _log_ratio(old: Tensor, behavior: Tensor, mask: Tensor, level: Level) -> Tensor:
    log_ratio = old - behavior
    if level != "token":
        _check_sequences(old)
        log_ratio = log_ratio.sum(-1, keepdim=True)
    if level == "geometric":
        log_ratio = log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _check_sequences(steps: Tensor) -> None:
    if steps.ndim != 2:
        raise ValueError(
            "a correction by whole sequences needs steps [B, T], got log_prob "
            f"{tuple(steps.shape)}: use level 'token'"
        )


def _check_bounds(level: Level, low: Coefficient | None, high: Coefficient) -> None:
    if level not in get_args(Level):
        raise ValueError(f"level must be one of {get_args(Level)}, got {level!r}")
    check_coefficient("high", high, allowed=_positive, expected="positive")
    if low is not None:
        check_coefficient("low", low)
    numbers = isinstance(low, float | int) and isinstance(high, float | int)
    if numbers and not low < high:  # type: ignore[operator]
        raise ValueError(f"low must be in [0, high), got low={low} high={high}")


def _positive(x: float) -> bool:
    return x > 0.0

"""The policy objective: one point on the axes, and the loss at that point."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from polopt.losses.aggregation import Aggregation, aggregator, check_aggregation, unit_count
from polopt.losses.checks import check_like
from polopt.losses.corrections import Correction
from polopt.losses.divergences import Kl, kl_estimate
from polopt.losses.numerics import MAX_LOG_RATIO, bounded_difference, selected, selected_log_prob
from polopt.losses.schedules import Coefficient, check_coefficient, number
from polopt.losses.surrogates import SelectingSurrogate, Surrogate

__all__ = ["Objective", "RatioLevel", "policy_loss", "select_steps"]

RatioLevel = Literal["token", "sequence", "sequence_sum", "none"]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One choice on each axis of a policy-gradient loss.

    Attributes:
        surrogate: What a step contributes.
        ratio: Level of the importance ratio. `"token"`; `"sequence"`: the length-normalised
            (geometric mean) ratio of GSPO with GSPO-token's gradient
            (https://arxiv.org/abs/2507.18071 eq. 7 and 14); `"sequence_sum"`: the ratio of
            whole sequences (RLOO); `"none"`: one, on-policy methods without an old policy.
        aggregation: How steps are summed up; see `polopt.losses.aggregation`.
        horizon: Steps per sequence, for aggregation `"constant"`.
        entropy_coef: Weight of the entropy bonus, per nat and unit of the aggregation.
        kl_coef: Weight of the divergence from the reference policy, likewise.
        kl: Its estimator; see `polopt.losses.divergences`.
        kl_in: `"loss"`, or `"reward"`: then this loss leaves it alone and whoever computes
            rewards subtracts it there.
        kl_reweighted: Multiply the divergence in the loss by the importance ratio, which
            makes k3 unbiased off policy (DeepSeek-V3.2, https://arxiv.org/abs/2512.02556
            eq. 7). TRL does so by default; GRPO's paper does not.
        corrections: Weights for a sampler that is not the old policy, multiplied.

    Raises:
        ValueError: If a choice is unknown, a coefficient negative, or `horizon` does not
            go with the aggregation.
    """

    surrogate: Surrogate | SelectingSurrogate
    ratio: RatioLevel = "token"
    aggregation: Aggregation = "token_mean"
    horizon: int | None = None
    entropy_coef: Coefficient = 0.0
    kl_coef: Coefficient = 0.0
    kl: Kl = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    kl_reweighted: bool = False
    corrections: tuple[Correction, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.surrogate, type) or not callable(self.surrogate):
            raise ValueError(f"surrogate must be one such as Clip(), got {self.surrogate!r}")
        if not isinstance(self.corrections, tuple) or not all(map(callable, self.corrections)):
            raise ValueError(
                f"corrections must be a tuple of them such as (Reweight(),), "
                f"got {self.corrections!r}"
            )
        check_aggregation(self.aggregation, self.horizon)
        for name, allowed in (("ratio", RatioLevel), ("kl", Kl)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(
                    f"{name} must be one of {get_args(allowed)}, got {getattr(self, name)!r}"
                )
        if self.kl_in not in ("loss", "reward"):
            raise ValueError(f"kl_in must be 'loss' or 'reward', got {self.kl_in!r}")
        if self.kl == "full" and self.kl_in == "reward":
            raise ValueError("kl 'full' is for the loss: rewards take an estimate such as 'k1'")
        check_coefficient(
            "entropy_coef", self.entropy_coef, allowed=math.isfinite, expected="a finite number"
        )
        check_coefficient("kl_coef", self.kl_coef)

    @property
    def uses_reference(self) -> bool:
        """Whether log-probabilities of a reference policy are needed, in loss or reward."""
        return not _is_zero(self.kl_coef)

    @property
    def selects(self) -> bool:
        """Whether the surrogate chooses steps over the whole batch; see `select_steps`."""
        return hasattr(self.surrogate, "select")

    @property
    def uses_entropy(self) -> bool:
        """Whether the entropy is part of the loss."""
        return not _is_zero(self.entropy_coef)

    def count(self, mask: Tensor, *, group_tokens: Tensor | None = None) -> Tensor:
        """Return the additive count of `mask`: what denominators are summed from.

        Args:
            mask: bool [B, T], or [B] for aggregation `"token_mean"`.
            group_tokens: As in `polopt.losses.aggregation.step_weights`.
        """
        return unit_count(mask, self.aggregation, horizon=self.horizon, group_tokens=group_tokens)

    @torch.no_grad()
    def clipped(
        self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, mask: Tensor
    ) -> Tensor:
        """Return at which steps the surrogate cuts the gradient, bool [B, T].

        `policy_loss` gives their share; this is for loops that log more about them. Not for
        surrogates that select over the batch.

        Args:
            log_prob: float [B, T].
            old_log_prob: float [B, T].
            advantage: float [B, T] or [B, 1].
            mask: bool [B, T]; false outside it in the result.
        """
        dtype = torch.promote_types(log_prob.dtype, torch.float32)
        log_prob = selected_log_prob(log_prob, mask, dtype)
        old_log_prob = selected_log_prob(old_log_prob, mask, dtype)
        log_ratio = _log_ratio(log_prob, old_log_prob, mask, self.ratio)
        advantage = selected(advantage, mask, dtype)
        return self.surrogate(log_ratio, advantage, log_prob, mask)[1] & mask  # type: ignore[call-arg]


def policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor | None,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    objective: Objective,
    denominator: Tensor | None = None,
    behavior_log_prob: Tensor | None = None,
    ref_log_prob: Tensor | None = None,
    entropy: Tensor | None = None,
    kl: Tensor | None = None,
    selection: Tensor | None = None,
    group_tokens: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the terms of the policy loss, each a scalar ready to be summed.

    All terms and metrics are weighted sums over the same steps and share one denominator, so
    adding them over micro-batches and ranks that were given the global denominator yields
    the global mean. Arithmetic is done in float32, or float64 if the inputs are.

    Args:
        log_prob: float [B, T] or [B], log-probability (nats) of the taken action or token
            under the policy being trained. Carries the gradient.
        old_log_prob: Same shape, under the policy that anchors the ratio. None only if
            `objective.ratio` is `"none"`.
        advantage: Same shape, or [B, 1].
        mask: bool, same shape, true at trained steps. Fixed before the loss: rules that drop
            steps do so through the surrogate or a correction and leave the count alone.
            None: every step, without mask arithmetic; log-probabilities must be finite then.
        objective: The point on the axes, without schedules (see `schedules.resolve`).
        denominator: Scalar, the count the sum is divided by. None means the count of this
            batch, right on one process without accumulation.
        behavior_log_prob: Same shape, under the sampler. Required by `corrections`.
        ref_log_prob: Same shape. Required when the divergence is part of the loss.
        entropy: Same shape. Required when `entropy_coef` is not zero.
        kl: Same shape, whole-distribution divergence per step, for `objective.kl="full"`.
        selection: bool, same shape, from `select_steps` on the whole batch, for surrogates
            that choose steps. None chooses within this batch.
        group_tokens: float [B], for aggregation `"group_token_mean"`.

    Returns:
        `loss_objective`, and `loss_entropy` and `loss_kl` where they apply; metrics:
        `clip_fraction` (steps that the surrogate bounded), `kl_approx` (old to new,
        k3, nats), `ratio_mean`, and where given `entropy`, `kl` (to the reference) and
        `correction_mean`.

    Raises:
        ValueError: If shapes differ, the mask is not bool, or a required input is missing.
    """
    _check_objective(objective)
    _check_steps(
        log_prob,
        mask=mask,
        old_log_prob=old_log_prob,
        behavior_log_prob=behavior_log_prob,
        ref_log_prob=ref_log_prob,
        entropy=entropy,
        kl=kl,
        selection=selection,
    )
    _check_advantage(advantage, log_prob)
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    total = aggregator(
        log_prob,
        mask,
        objective.aggregation,
        horizon=objective.horizon,
        group_tokens=group_tokens,
        denominator=denominator,
    )
    log_prob = selected_log_prob(log_prob, mask, dtype)
    advantage = selected(advantage.detach(), mask, dtype)
    if old_log_prob is not None:
        old_log_prob = selected_log_prob(old_log_prob.detach(), mask, dtype)
    log_ratio = _log_ratio(log_prob, old_log_prob, mask, objective.ratio)
    if objective.selects:
        if selection is None:
            selection = _select(objective, log_ratio, advantage, log_prob, mask)
        step, clipped = objective.surrogate(log_ratio, advantage, log_prob, mask, selection)  # type: ignore[call-arg]
    else:
        step, clipped = objective.surrogate(log_ratio, advantage, log_prob, mask)  # type: ignore[call-arg]
    out: dict[str, Tensor] = {}
    if objective.corrections:
        weight = _correction(
            objective, log_prob, old_log_prob, behavior_log_prob, advantage, mask, dtype
        )
        step = step * weight
        out["correction_mean"] = total(weight.expand_as(log_prob))
    out["loss_objective"] = total(step)
    if entropy is not None:
        mean = total(selected(entropy, mask, dtype))
        out["entropy"] = mean.detach()
        if objective.uses_entropy:
            out["loss_entropy"] = -number(objective.entropy_coef, "entropy_coef") * mean
    elif objective.uses_entropy:
        raise ValueError("entropy_coef is set, so entropy is required")
    if objective.uses_reference and objective.kl_in == "loss":
        if objective.kl == "full":
            divergence = selected(_required(kl, "kl", "kl='full'"), mask, dtype)
        else:
            ref = _required(ref_log_prob, "ref_log_prob", "kl_coef")
            ref = selected_log_prob(ref.detach(), mask, dtype)
            divergence = kl_estimate(log_prob, ref, objective.kl)
        out["kl"] = total(divergence).detach()
        if objective.kl_reweighted:
            divergence = divergence * log_ratio.exp()
        out["loss_kl"] = number(objective.kl_coef, "kl_coef") * total(divergence)
    out["clip_fraction"] = total(clipped.to(dtype))
    if old_log_prob is not None:
        now = log_ratio.detach()
        away = now
        if objective.ratio != "token":
            away = bounded_difference(log_prob.detach(), old_log_prob)
        out["kl_approx"] = total(torch.expm1(away) - away)
        out["ratio_mean"] = total(now.exp())
    return out


@torch.no_grad()
def select_steps(
    log_prob: Tensor,
    old_log_prob: Tensor | None,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    objective: Objective,
) -> Tensor:
    """Return the steps that the surrogate treats differently, bool, chosen over the batch.

    For a batch that is cut afterwards: call it on the whole, and hand each part its rows as
    `selection`. Arguments as in `policy_loss`; log-probabilities from before the update do.

    Raises:
        ValueError: If the surrogate of the objective chooses nothing.
    """
    _check_objective(objective)
    _check_steps(log_prob, mask=mask, old_log_prob=old_log_prob)
    _check_advantage(advantage, log_prob)
    if not objective.selects:
        raise ValueError(f"{type(objective.surrogate).__name__} selects nothing over the batch")
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    log_prob = selected_log_prob(log_prob, mask, dtype)
    if old_log_prob is not None:
        old_log_prob = selected_log_prob(old_log_prob, mask, dtype)
    log_ratio = _log_ratio(log_prob, old_log_prob, mask, objective.ratio)
    advantage = selected(advantage, mask, dtype)
    return _select(objective, log_ratio, advantage, log_prob, mask)


@torch.no_grad()
def _select(
    objective: Objective,
    log_ratio: Tensor,
    advantage: Tensor,
    log_prob: Tensor,
    mask: Tensor | None,
) -> Tensor:
    if mask is None:
        mask = torch.ones_like(log_ratio, dtype=torch.bool)
    advantage = advantage.expand_as(log_ratio)
    return objective.surrogate.select(log_ratio, advantage, log_prob, mask)  # type: ignore[union-attr]


def _log_ratio(
    log_prob: Tensor, old_log_prob: Tensor | None, mask: Tensor | None, level: RatioLevel
) -> Tensor:
    if level == "none":
        return log_prob - log_prob.detach()
    if old_log_prob is None:
        raise ValueError(f"ratio {level!r} needs old_log_prob, got none")
    if level == "token":
        return bounded_difference(log_prob, old_log_prob)
    if log_prob.ndim != 2:
        raise ValueError(f"ratio {level!r} needs steps [B, T], got {tuple(log_prob.shape)}")
    if level == "sequence_sum":
        # Differences first: those of long sums would lose the digits of a ratio near one.
        whole = (log_prob - old_log_prob).sum(-1, keepdim=True)
        return bounded_difference(whole, torch.zeros_like(whole)).expand_as(log_prob)
    length = log_prob.shape[-1] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
    mean = (log_prob.detach() - old_log_prob).sum(-1, keepdim=True) / length
    # GSPO-token: the value is the sequence's ratio, the gradient belongs to each step, so that
    # advantages may differ within a sequence. With equal ones this is GSPO.
    return log_prob - (log_prob.detach() - mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _correction(
    objective: Objective,
    log_prob: Tensor,
    old_log_prob: Tensor | None,
    behavior_log_prob: Tensor | None,
    advantage: Tensor,
    mask: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    behavior = _required(behavior_log_prob, "behavior_log_prob", "corrections")
    behavior = selected_log_prob(behavior.detach(), mask, dtype)
    old = log_prob.detach() if old_log_prob is None else old_log_prob
    if mask is None:
        mask = torch.ones_like(log_prob, dtype=torch.bool)
    with torch.no_grad():
        weights = [
            c(log_prob.detach(), old, behavior, advantage, mask) for c in objective.corrections
        ]
    weight = weights[0]
    for other in weights[1:]:
        weight = weight * other
    return weight


def _is_zero(coefficient: Coefficient) -> bool:
    return isinstance(coefficient, float | int) and coefficient == 0.0


def _check_objective(objective: Objective) -> None:
    if not isinstance(objective, Objective):
        raise ValueError(
            f"objective must be an Objective, got {type(objective).__name__}: "
            "of an algorithm pass algorithm.objective"
        )


def _check_steps(log_prob: Tensor, **steps: Tensor | None) -> None:
    if not log_prob.is_floating_point() or log_prob.ndim not in (1, 2):
        raise ValueError(
            f"log_prob must be float [B] or [B, T], got {log_prob.dtype} {tuple(log_prob.shape)}"
        )
    check_like("log_prob", log_prob, **steps)


def _check_advantage(advantage: Tensor, log_prob: Tensor) -> None:
    if advantage.shape != log_prob.shape and not (
        log_prob.ndim == 2 and advantage.shape == (len(log_prob), 1)
    ):
        raise ValueError(
            f"advantage must have the shape of log_prob {tuple(log_prob.shape)} or [B, 1], "
            f"got {tuple(advantage.shape)}"
        )


def _required(value: Tensor | None, name: str, reason: str) -> Tensor:
    if value is None:
        raise ValueError(f"{reason} is set, so {name} is required")
    return value

"""Losses of a value function."""

from typing import Literal

import torch
from torch import Tensor

from polopt.losses.aggregation import Aggregation, aggregator
from polopt.losses.checks import check_like
from polopt.losses.numerics import selected

__all__ = ["explained_variance", "value_loss"]


def value_loss(
    value: Tensor,
    old_value: Tensor | None,
    target: Tensor,
    mask: Tensor | None = None,
    *,
    clip: float | None = None,
    loss: Literal["mse", "huber"] = "mse",
    scale: float | Tensor = 1.0,
    coef: float | Tensor = 1.0,
    aggregation: Aggregation = "token_mean",
    horizon: int | None = None,
    group_tokens: Tensor | None = None,
    denominator: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the loss of a value function, pessimistically clipped.

    max(ℓ(v − R), ℓ(v_old + clamp(v − v_old, ±clip) − R)) with ℓ(e) = e²/2 or the Huber loss
    with δ = 1. The clip is in units of the return: it depends on the scale of the reward.
    (SB3 takes the clipped term alone, TorchRL's `l2` has no ½, its default is Huber.)

    The tuning guide's `min(loss, loss of the detached value)` does nothing: both are the same
    number, and a minimum of equal numbers limits no gradient. Use the weight of
    `ValueTerm`, `clip` or `loss="huber"`.

    Source: https://arxiv.org/abs/1707.06347 (clipping as in its authors' code).

    Args:
        value: float [B, T] or [B], carries the gradient.
        old_value: Same shape, at collection time. Required by `clip`.
        target: Same shape.
        mask: bool, same shape, or None: every step.
        clip: Largest change from `old_value` that is credited; None disables it.
        loss: `"mse"` or `"huber"`.
        scale: Errors are divided by it first: hand in the standard deviation of the returns
            to make the loss independent of the scale of the reward.
        coef: Weight of the term.
        aggregation: As in `polopt.losses.aggregation`; that of the objective, if both share a
            denominator.
        horizon: As in `Objective`, for aggregation `"constant"`.
        group_tokens: As in `policy_loss`, for aggregation `"group_token_mean"`.
        denominator: As in `polopt.losses.policy_loss`.

    Returns:
        `loss_critic` and the metric `value_clip_fraction` (steps whose clipped loss was the
        larger one).

    Raises:
        ValueError: If shapes differ, the mask is not bool, `old_value` is missing, or `clip` or
            `scale` is not positive.
    """
    if not value.is_floating_point() or value.ndim not in (1, 2):
        raise ValueError(
            f"value must be float [B] or [B, T], got {value.dtype} {tuple(value.shape)}"
        )
    check_like("value", value, old_value=old_value, target=target, mask=mask)
    if clip is not None and not clip > 0.0:
        raise ValueError(f"clip must be positive or none, got {clip}")
    if not isinstance(scale, Tensor) and not scale > 0.0:
        raise ValueError(f"scale must be positive, got {scale}")
    if clip is not None and old_value is None:
        raise ValueError("clip is set, so old_value is required")
    if loss not in ("mse", "huber"):
        raise ValueError(f"loss must be 'mse' or 'huber', got {loss!r}")
    dtype = torch.promote_types(value.dtype, torch.float32)
    total = aggregator(
        value,
        mask,
        aggregation,
        horizon=horizon,
        group_tokens=group_tokens,
        denominator=denominator,
    )

    value = selected(value, mask, dtype)
    target = selected(target.detach(), mask, dtype)
    error = value - target
    out: dict[str, Tensor] = {}
    if clip is not None and old_value is not None:
        old = selected(old_value.detach(), mask, dtype)
        bound = value.detach().clamp(old - clip, old + clip) - target
        # Both losses grow with the size of the error, so the larger error has the larger loss.
        clipped = bound.abs() > error.detach().abs()
        out["value_clip_fraction"] = total(clipped.to(dtype))
        error = torch.where(clipped, bound, error)
    if isinstance(scale, Tensor) or scale != 1.0:
        error = error / scale
    if loss == "mse":
        cost = total(error.square()) * (0.5 * coef)
    else:
        zero = torch.zeros_like(error)
        cost = total(torch.nn.functional.huber_loss(error, zero, reduction="none")) * coef
    return {"loss_critic": cost, **out}


def explained_variance(value: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the share of the variance of the target that the value explains.

    1 − Var(target − value) / Var(target): 1 is perfect, 0 no better than a constant, negative
    worse. NaN if the target does not vary.

    Args:
        value: float [...].
        target: float [...].
        mask: bool [...], or None: every step.

    Returns:
        Scalar.
    """
    check_like("target", target, value=value, mask=mask)
    dtype = torch.promote_types(target.dtype, torch.float32)
    value, target = value.to(dtype), target.to(dtype)
    if mask is not None:
        value, target = value[mask], target[mask]
    if not target.numel():
        return target.new_tensor(torch.nan)
    spread = target.var(unbiased=False)
    share = 1.0 - (target - value).var(unbiased=False) / spread
    return torch.where(spread > 0, share, torch.nan)

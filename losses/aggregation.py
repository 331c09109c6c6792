"""Aggregation: every mode is one weighted sum over one additive count.

For all modes, `loss = (step_weights * step_loss).sum() / count`, where the weights need only
the local sequence and the count is a sum over sequences. Counts therefore add up over
micro-batches and ranks: whoever owns the loop adds them first, and hands the total to every
backward as the denominator.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["Aggregation", "aggregator", "check_aggregation", "step_weights", "unit_count"]

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant", "group_token_mean"]


def step_weights(
    mask: Tensor,
    mode: Aggregation,
    *,
    group_tokens: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the weight of each step within the loss.

    Args:
        mask: bool [B, T], true at the steps that are trained on. [B] for `"token_mean"`.
        mode: `"token_mean"` (DAPO as its authors run it: each step counts the same),
            `"sequence_mean"` (GRPO: mean over the steps of a sequence, then over sequences),
            `"sequence_sum"` (sum over the steps, then mean over sequences), `"constant"`
            (Dr. GRPO: sum over the steps, divided by a fixed horizon) or
            `"group_token_mean"` (DAPO eq. 8 to the letter: mean over the steps of a group,
            then over groups).
        group_tokens: float or int [B], trained steps of the whole group of each sequence,
            for `"group_token_mean"`. Handed in, since a group may be cut over micro-batches.
        dtype: Of the result.

    Returns:
        `dtype` [B, T], zero outside the mask.

    Raises:
        ValueError: If the mode is unknown, or does not fit the shapes.
    """
    _check(mask, mode, group_tokens)
    weights = mask.to(dtype)
    if mode == "sequence_mean":
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1.0)
    elif mode == "group_token_mean":
        weights = weights / group_tokens.to(dtype).clamp(min=1.0)[:, None]  # type: ignore[union-attr]
    return weights


def unit_count(
    mask: Tensor,
    mode: Aggregation,
    *,
    horizon: int | None = None,
    group_tokens: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return how many units of the mode the batch holds.

    Args:
        mask: bool [B, T], or [B] for `"token_mean"`.
        mode: As in `step_weights`. A unit is a step for `"token_mean"`, a group for
            `"group_token_mean"`, and otherwise a sequence with at least one step.
        horizon: Steps that one sequence counts for, in `"constant"` only.
        group_tokens: As in `step_weights`. A sequence is that part of its group which its
            steps are.
        dtype: Of the result.

    Returns:
        Scalar. Counts of the parts of a batch add up to the count of the batch.

    Raises:
        ValueError: If the mode is unknown, or `horizon` does not go with it.
    """
    _check(mask, mode, group_tokens)
    _check_horizon(mode, horizon)
    if mode == "token_mean":
        return mask.sum().to(dtype)
    if mode == "group_token_mean":
        return (mask.sum(-1) / group_tokens.clamp(min=1)).sum().to(dtype)  # type: ignore[union-attr]
    sequences = mask.any(-1).sum().to(dtype)
    return sequences if horizon is None else sequences * horizon


def aggregator(
    like: Tensor,
    mask: Tensor | None,
    mode: Aggregation,
    *,
    horizon: int | None = None,
    group_tokens: Tensor | None = None,
    denominator: Tensor | None = None,
) -> Callable[[Tensor], Tensor]:
    """Return the function that turns steps into their weighted sum over the denominator.

    Args:
        like: float [B, T] or [B], for shape and type of the steps.
        mask: bool, same shape. None means every step, without mask arithmetic.
        mode: As in `step_weights`.
        horizon: As in `unit_count`.
        group_tokens: As in `step_weights`.
        denominator: Scalar; None means the count of this batch.

    Returns:
        A function of float [B, T] that returns a scalar. What lies outside the mask is
        ignored: NaN there does no harm.

    Raises:
        ValueError: If the denominator is not a scalar, or the mode does not fit the shapes.
    """
    if denominator is not None and not isinstance(denominator, Tensor):
        raise ValueError(f"denominator must be a scalar tensor, got {denominator!r}")
    if denominator is not None and denominator.ndim:
        raise ValueError(f"denominator must be a scalar, got {tuple(denominator.shape)}")
    if mask is None:
        return _aggregator_of_all(like, mode, horizon, denominator)
    dtype = torch.promote_types(like.dtype, torch.float32)
    weights = None
    if mode in ("sequence_mean", "group_token_mean"):
        weights = step_weights(mask, mode, group_tokens=group_tokens, dtype=dtype)
    if denominator is None:
        denominator = unit_count(mask, mode, horizon=horizon, group_tokens=group_tokens)
    # Not below one: a rank's or micro-batch's share of a count can be a fraction.
    scale = 1.0 / denominator.to(dtype).clamp(min=torch.finfo(dtype).tiny)

    def total(step: Tensor) -> Tensor:
        if weights is not None:
            step = step * weights
        return torch.where(mask, step, 0.0).sum() * scale

    return total


def _aggregator_of_all(
    like: Tensor, mode: Aggregation, horizon: int | None, denominator: Tensor | None
) -> Callable[[Tensor], Tensor]:
    if mode == "token_mean" and horizon is None and denominator is None and like.numel():
        return torch.mean  # first: on the control path each check costs as much as an operation
    if mode == "group_token_mean":
        raise ValueError("aggregation 'group_token_mean' needs a mask")
    _check(like, mode, None)
    _check_horizon(mode, horizon)
    steps = like.shape[-1] if mode == "sequence_mean" else 1
    if denominator is None:
        units = like.numel() if mode == "token_mean" else len(like) * (horizon or 1)
        share: float | Tensor = 1.0 / max(units * steps, 1)
    else:
        dtype = torch.promote_types(like.dtype, torch.float32)
        share = 1.0 / (steps * denominator.to(dtype).clamp(min=torch.finfo(dtype).tiny))
    return lambda step: step.sum() * share


def check_aggregation(mode: Aggregation, horizon: int | None) -> None:
    """Raise a ValueError if the mode is unknown or `horizon` does not go with it."""
    if mode not in get_args(Aggregation):
        raise ValueError(f"aggregation must be one of {get_args(Aggregation)}, got {mode!r}")
    _check_horizon(mode, horizon)
    if horizon is not None and not horizon >= 1:
        raise ValueError(f"horizon must be at least 1, got {horizon}")


def _check_horizon(mode: Aggregation, horizon: int | None) -> None:
    if (horizon is not None) != (mode == "constant"):
        raise ValueError(
            f"horizon is for aggregation 'constant' and required there, got {mode=} {horizon=}"
        )


def _check(mask: Tensor, mode: Aggregation, group_tokens: Tensor | None) -> None:
    if mode not in get_args(Aggregation):
        raise ValueError(f"aggregation must be one of {get_args(Aggregation)}, got {mode!r}")
    if mode != "token_mean" and mask.ndim != 2:
        raise ValueError(f"aggregation {mode!r} needs steps [B, T], got {tuple(mask.shape)}")
    if mode == "group_token_mean" and group_tokens is None:
        raise ValueError("aggregation 'group_token_mean' needs group_tokens [B]")
    if group_tokens is not None and group_tokens.shape != mask.shape[:1]:
        raise ValueError(
            f"group_tokens must be [B] = {tuple(mask.shape[:1])}, got {tuple(group_tokens.shape)}"
        )

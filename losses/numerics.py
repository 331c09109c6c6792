"""Bounds that keep a loss and its gradient finite."""

import torch
from torch import Tensor

__all__ = ["MAX_LOG_RATIO", "MIN_LOG_PROB", "bounded_difference", "selected", "selected_log_prob"]

# exp(20) is 5e8: far outside any trust region, far inside float32.
MAX_LOG_RATIO = 20.0
# A step of zero probability. Its ratio becomes exp(-20) and its gradient zero.
MIN_LOG_PROB = -1e4


def selected(x: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `x` in `dtype` with zeros outside the mask.

    Selects before any arithmetic: padding may hold NaN or infinity, and 0 * inf is NaN, in
    the value or in the gradient.

    Args:
        x: float [...].
        mask: bool, broadcast against `x`, or None for all of it.
        dtype: A floating type.
    """
    x = x if x.dtype == dtype else x.to(dtype)  # a call less on the control path
    return x if mask is None else torch.where(mask, x, 0.0)


def selected_log_prob(x: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `selected` log-probabilities, with those of impossible steps made finite.

    Without a mask (control) they are taken as they are: the action was sampled, so it is
    possible, and the clamp would cost as much as the clip of PPO.
    """
    x = selected(x, mask, dtype)
    return x if mask is None else x.clamp(min=MIN_LOG_PROB)


def bounded_difference(x: Tensor, anchor: Tensor) -> Tensor:
    """Return x − anchor within ±20 nats, with the gradient of the free difference.

    A clamp alone would stop the gradient exactly where the policy is farthest away and has
    to be pulled back. Moving the anchor instead costs no node of the graph.

    Args:
        x: float [...], carries the gradient.
        anchor: float [...], without gradient.
    """
    free = x.detach() - anchor
    return x - (anchor + (free - free.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)))

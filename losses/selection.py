"""Selections made before the loss: they become part of the mask, and so of the count."""

import torch
from torch import Tensor

from polopt.losses.checks import check_like

__all__ = [
    "drop_small_advantages",
    "drop_truncated",
    "entropy_threshold",
    "top_entropy",
]


def entropy_threshold(entropy: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """Return the entropy above which the top `share` of the trained tokens lies, a scalar.

    The (1 − share) quantile, linearly interpolated. Over a batch that is cut into
    micro-batches or ranks, compute it once on all of it and hand it to `top_entropy`.

    Args:
        entropy: float [B, T], nats.
        mask: bool [B, T].
        share: In (0, 1].
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"share must be in (0, 1], got {share}")
    check_like("entropy", entropy, mask=mask)
    # torch.quantile refuses more than 16 million values.
    values = entropy[mask].sort().values
    if not len(values):
        return entropy.new_tensor(torch.inf)
    position = (1.0 - share) * (len(values) - 1)
    below = int(position)
    above = min(below + 1, len(values) - 1)
    return torch.lerp(values[below], values[above], position - below)


def top_entropy(
    entropy: Tensor, mask: Tensor, *, share: float = 0.2, threshold: Tensor | None = None
) -> Tensor:
    """Return the mask of the forking tokens: the top `share` by entropy (80/20 rule).

    Used as the mask, so that the loss is divided by the selected tokens, as the paper has it.
    (TRL divides by all of them.)

    Source: https://arxiv.org/abs/2506.01939 eq. 6.

    Args:
        entropy: float [B, T], nats.
        mask: bool [B, T].
        share: Of tokens to keep, in (0, 1].
        threshold: From `entropy_threshold`; None computes it on this batch.

    Returns:
        bool [B, T].
    """
    check_like("entropy", entropy, mask=mask)
    if threshold is None:
        threshold = entropy_threshold(entropy, mask, share=share)
    return mask & (entropy >= threshold)


def drop_truncated(mask: Tensor, truncated: Tensor) -> Tensor:
    """Return the mask without answers that were cut at the length limit (overlong filter).

    Their reward still counts in the statistics of their group.

    Source: DAPO section 3.4, https://arxiv.org/abs/2503.14476.

    Args:
        mask: bool [B, T].
        truncated: bool [B].
    """
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool [B, T], got {mask.dtype} {tuple(mask.shape)}")
    check_like("a row of mask", mask[:, 0] if mask.shape[1] else mask.any(1), truncated=truncated)
    return mask & ~truncated[:, None]


def drop_small_advantages(advantage: Tensor, mask: Tensor, *, threshold: float) -> Tensor:
    """Return the mask without steps whose |advantage| is at most `threshold`.

    The tuning guide presents this as DAPO's dynamic sampling; it is not. DAPO drops whole
    prompts whose answers are all right or all wrong and samples others until the batch is
    full (`Sampling`), so the number of prompts that teach stays constant. This filter makes
    the batch smaller instead, and drops the one answer of a mixed group that happens to lie
    at the mean.

    Args:
        advantage: float [B, T] or [B, 1].
        mask: bool [B, T].
        threshold: Not negative, in units of the advantage.
    """
    if not threshold >= 0.0:
        raise ValueError(f"threshold must not be negative, got {threshold}")
    if mask.dtype != torch.bool or advantage.shape not in (mask.shape, (*mask.shape[:1], 1)):
        raise ValueError(
            "advantage must be [B, T] or [B, 1] and mask bool [B, T], got "
            f"{tuple(advantage.shape)} and {mask.dtype} {tuple(mask.shape)}"
        )
    return mask & (advantage.abs() > threshold)

"""Checks of inputs. Those that read values run once per batch, never inside the loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["check_finite", "check_like", "check_weights"]

_FLAGS = ("mask", "selection", "terminated", "done", "truncated")


def check_like(name: str, like: Tensor, **others: Tensor | None) -> None:
    """Raise a ValueError if a tensor has another shape than `like`, or a flag is not bool.

    Reads no values. Without it a wrong shape would be broadcast into a wrong result.

    Args:
        name: Of `like`, for the message.
        like: Has the shape that all others must have.
        **others: By name; None is skipped.
    """
    for key, x in others.items():
        if x is None:
            continue
        if key in _FLAGS and x.dtype != torch.bool:
            raise ValueError(f"{key} must be bool, got {x.dtype}")
        if x.shape != like.shape:
            raise ValueError(
                f"{key} must have the shape of {name} {tuple(like.shape)}, got {tuple(x.shape)}"
            )


def check_finite(mask: Tensor | None = None, **tensors: Tensor | None) -> None:
    """Raise a ValueError if a tensor holds NaN or infinity at a step that is trained on.

    Reads values, so on an accelerator it waits for them: call it once per batch.

    Args:
        mask: bool [B, T], or None: every step.
        **tensors: float [B, T] or [B, 1] each, by the name for the message; None is skipped.
    """
    for name, x in tensors.items():
        if x is None:
            continue
        bad = ~torch.isfinite(x)
        if mask is not None:
            bad = bad & mask
        if bad.any():
            first = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"{name} must be finite at trained steps, got {int(bad.sum())} values of "
                f"{bad.numel()} that are not, the first at {first}"
            )


def check_weights(rewards: Tensor, weights: Sequence[float] | None) -> Tensor:
    """Return one weight for each reward, float [F], all one for None.

    Args:
        rewards: float [N, F].
        weights: F finite numbers, or None.

    Raises:
        ValueError: If the shapes do not fit, or a weight is not a finite number.
    """
    if rewards.ndim != 2 or not rewards.shape[1]:
        raise ValueError(f"rewards must be [N, F], F at least 1, got {tuple(rewards.shape)}")
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    if weights is None:
        return rewards.new_ones(rewards.shape[1], dtype=dtype)
    if len(weights) != rewards.shape[1]:
        raise ValueError(
            f"weights must have one entry per reward ({rewards.shape[1]}), got {len(weights)}"
        )
    scale = rewards.new_tensor(weights, dtype=dtype)
    if not scale.isfinite().all():
        raise ValueError(f"weights must be finite, got {list(weights)}")
    return scale

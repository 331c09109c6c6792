"""Checks that need the values of a batch: once before its updates, never inside the loss."""

import torch
from torch import Tensor

__all__ = ["check_finite"]


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

"""Interquartile means over seeds, with bootstrap intervals.

Both as in https://arxiv.org/abs/2108.13264 (rliable), for one task.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["interquartile_mean", "interval"]


def interquartile_mean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and the highest quarter, each rounded down.

    Raises:
        ValueError: If there are no values.
    """
    if not values:
        raise ValueError("values must not be empty")
    return float(_trimmed(torch.tensor(values, dtype=torch.float64).unsqueeze(0)))


def interval(values: Sequence[float], *, samples: int = 2000) -> tuple[float, float] | None:
    """Return the 95 % percentile bootstrap interval of the interquartile mean.

    Args:
        values: One per seed; one alone has no interval.
        samples: Resamples; they are drawn with a fixed seed.
    """
    if len(values) < 2:
        return None
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(len(values), (samples, len(values)), generator=generator)
    means = _trimmed(torch.tensor(values, dtype=torch.float64)[index])
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def _trimmed(rows: Tensor) -> Tensor:
    cut = rows.shape[-1] // 4
    return rows.sort(-1).values[..., cut : rows.shape[-1] - cut].mean(-1)

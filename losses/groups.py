"""Advantages of outcome rewards, relative to the other answers to the same prompt."""

from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["group_advantage", "informative"]

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["group", "batch", "none"]


def group_advantage(
    reward: Tensor,
    group: Tensor,
    *,
    baseline: Baseline = "mean",
    scale: Scale = "group",
    eps: float = 1e-6,
) -> Tensor:
    """Return rewards relative to the other samples of their group.

    GRPO: (R − mean) / (std + eps), with n − 1 in the standard deviation as in every
    implementation (the paper is silent). `scale="none"` is Dr. GRPO;
    `baseline="leave_one_out", scale="none"` is RLOO, (R − mean of the others);
    `scale="batch"` divides by the standard deviation of all rewards.

    Groups whose rewards are all equal give exactly zero: rounding must not turn them into
    signal. Samples whose reward is NaN are missing: they get zero, and the statistics of
    their group are those of the others.

    Source: https://arxiv.org/abs/2402.03300, https://arxiv.org/abs/2503.20783,
    https://arxiv.org/abs/2402.14740; batch scale: https://arxiv.org/abs/2508.08221.

    Args:
        reward: float [N]; NaN marks a missing one.
        group: int64 [N], the group of each sample, numbered from zero, in any order.
        baseline: Mean of the group, or of its other members.
        scale: What the difference is divided by.
        eps: Added to the standard deviation.

    Returns:
        float [N], float32 at least. Zero for the only member of a group, which has nothing
        to compare with.

    Raises:
        ValueError: If `reward` and `group` are not both [N], a reward is infinite, a group
            negative, or an option unknown.
    """
    if baseline not in get_args(Baseline):
        raise ValueError(f"baseline must be one of {get_args(Baseline)}, got {baseline!r}")
    if scale not in get_args(Scale):
        raise ValueError(f"scale must be one of {get_args(Scale)}, got {scale!r}")
    if not eps >= 0.0:
        raise ValueError(f"eps must not be negative, got {eps}")
    stats = GroupStats(reward, group)
    centred = stats.centred
    if baseline == "leave_one_out":
        n = stats.size[group]
        centred = centred * n / (n - 1).clamp(min=1)
    if scale == "none":
        return centred
    spread = stats.deviation[group] if scale == "group" else _batch_deviation(stats)
    # Without spread the numerator is zero: 0 / 0 has to be zero too, whatever `eps`.
    return centred / torch.where(spread > 0, spread + eps, 1.0)


def informative(reward: Tensor, group: Tensor) -> Tensor:
    """Return which groups carry signal: bool [G], true where rewards differ.

    An exact comparison: a standard deviation that is zero in theory is 1e-17 in floating
    point (numpy's of three times 0.1), and the group would stay.

    Args:
        reward: float [N]; NaN (missing) does not count. Hand in correctness (0 or 1) for
            DAPO's rule, which drops groups that are all right or all wrong.
        group: int64 [N], numbered from zero.
    """
    return GroupStats(reward, group).spread


class GroupStats:
    """Statistics of rewards by group, missing rewards left out.

    Attributes:
        present: bool [N], samples with a reward.
        size: float [G], how many of them each group has.
        spread: bool [G], whether its rewards differ.
        centred: float [N], reward minus the mean of the group; exactly zero without spread
            and for missing samples.
        deviation: float [G], with n − 1; zero without spread.
    """

    def __init__(self, reward: Tensor, group: Tensor) -> None:
        if reward.ndim != 1 or reward.shape != group.shape:
            raise ValueError(
                "reward and group must both be [N], got "
                f"{tuple(reward.shape)} and {tuple(group.shape)}"
            )
        if group.dtype != torch.int64:
            raise ValueError(f"group must be int64, got {group.dtype}")
        dtype = torch.promote_types(reward.dtype, torch.float32)
        reward = reward.to(dtype)
        first, last = (int(x) for x in group.aminmax()) if len(group) else (0, -1)
        if first < 0:
            raise ValueError(f"group must be numbered from zero, got {first}")
        if reward.isinf().any():
            place = int(reward.isinf().nonzero()[0])
            raise ValueError(
                f"reward must be finite, or NaN where it is missing, got {reward[place].item()} "
                f"at {place}"
            )
        groups = last + 1
        empty = reward.new_zeros(groups)
        self.group = group
        self.present = ~reward.isnan()
        kept = torch.where(self.present, reward, 0.0)
        self.size = empty.index_add(0, group, self.present.to(dtype))
        low = empty.fill_(torch.inf).scatter_reduce(
            0, group, torch.where(self.present, reward, torch.inf), "amin"
        )
        high = torch.full_like(empty, -torch.inf).scatter_reduce(
            0, group, torch.where(self.present, reward, -torch.inf), "amax"
        )
        self.spread = high > low
        mean = torch.zeros_like(low).index_add(0, group, kept) / self.size.clamp(min=1)
        used = self.present & self.spread[group]
        self.centred = torch.where(used, kept - mean[group], 0.0)
        squares = torch.zeros_like(low).index_add(0, group, self.centred.square())
        self.deviation = (squares / (self.size - 1).clamp(min=1)).sqrt()
        self.reward = kept


def _batch_deviation(stats: GroupStats) -> Tensor:
    count = stats.present.sum()
    mean = stats.reward.sum() / count.clamp(min=1)
    squares = torch.where(stats.present, stats.reward - mean, 0.0).square().sum()
    return (squares / (count - 1).clamp(min=1)).sqrt()

"""Further advantages of outcome rewards, beyond `group_advantage`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polopt.losses.advantages import discounted_return
from polopt.losses.checks import check_like, check_weights
from polopt.losses.groups import GroupStats, group_advantage

__all__ = [
    "gdpo_advantage",
    "gpg_advantage",
    "opo_advantage",
    "pass_at_k_advantage",
    "reinforce_pp_advantage",
    "remax_advantage",
]


def reinforce_pp_advantage(token_reward: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Return REINFORCE++'s return to go per token, to be whitened over the batch.

    Goes with `Advantage(whiten=True)`, and with the divergence in the token rewards
    (`subtract_kl`).

    Source: https://arxiv.org/abs/2501.03262.

    Args:
        token_reward: float [N, T].
        mask: bool [N, T]; the return is carried over untrained tokens inside an answer.
        gamma: Discount per token, in [0, 1].

    Returns:
        float [N, T], zero outside the mask.
    """
    check_like("token_reward", token_reward, mask=mask)
    reward = torch.where(mask, token_reward, 0.0)
    if gamma == 1.0:
        ahead = reward.flip(-1).cumsum(-1).flip(-1)
    else:
        if not 0.0 <= gamma <= 1.0:
            raise ValueError(f"gamma must be in [0, 1], got {gamma}")
        discount = torch.ones_like(reward).masked_fill(mask, gamma)
        ahead = discounted_return(reward, torch.zeros_like(mask), gamma=discount)
    return torch.where(mask, ahead, 0.0)


def remax_advantage(reward: Tensor, greedy_reward: Tensor) -> Tensor:
    """Return R − R(greedy answer): the greedy answer of the same prompt is the baseline.

    Source: https://arxiv.org/abs/2310.10505.

    Args:
        reward: float [N]; NaN (missing) gives zero.
        greedy_reward: float [N].
    """
    check_like("reward", reward, greedy_reward=greedy_reward)
    dtype = torch.promote_types(reward.dtype, torch.float32)
    return (reward.to(dtype) - greedy_reward).nan_to_num(nan=0.0)


def opo_advantage(reward: Tensor, group: Tensor, length: Tensor) -> Tensor:
    """Return R − Σ lⱼRⱼ / Σ lⱼ: the baseline weighs the answers of the group by length.

    No division by the standard deviation. For strictly on-policy training.

    Source: https://arxiv.org/abs/2505.23585.

    Args:
        reward: float [N]; NaN (missing) gives zero and is left out.
        group: int64 [N].
        length: int or float [N], tokens of each answer.
    """
    stats = GroupStats(reward, group)
    check_like("reward", reward, length=length)
    if not (length >= 0).all():
        raise ValueError(f"length must not be negative, got {length.min().item()}")
    weight = torch.where(stats.present, length.to(stats.centred.dtype), 0.0)
    empty = torch.zeros_like(stats.size)
    total = empty.index_add(0, group, weight)
    # Relative to the mean, so that equal rewards give exactly zero.
    shift = empty.index_add(0, group, weight * stats.centred) / total.clamp(min=1)
    advantage = stats.centred - shift[group]
    return torch.where(stats.present & stats.spread[group], advantage, 0.0)


def pass_at_k_advantage(
    reward: Tensor, group: Tensor, *, scale: bool = False, eps: float = 1e-6
) -> Tensor:
    """Return R_max − R_second for the best answer of a group, zero for the others.

    A tie for the best gives zero: the group passes without either of them.

    Source: https://arxiv.org/abs/2503.19595.

    Args:
        reward: float [N]; NaN (missing) gives zero and is left out.
        group: int64 [N].
        scale: Divide by the standard deviation of the group.
        eps: Added to it.
    """
    stats = GroupStats(reward, group)
    value = torch.where(stats.present, reward.to(stats.centred.dtype), -torch.inf)
    best = torch.full_like(stats.size, -torch.inf).scatter_reduce(0, group, value, "amax")
    is_best = stats.present & (value == best[group])
    ties = torch.zeros_like(stats.size).index_add(0, group, is_best.to(value.dtype))
    others = torch.where(is_best, -torch.inf, value)
    second = torch.full_like(stats.size, -torch.inf).scatter_reduce(0, group, others, "amax")
    margin = torch.where((ties == 1) & (stats.size > 1), best - second, 0.0)
    if scale:
        margin = margin / (stats.deviation + eps)
    return torch.where(is_best, margin[group], 0.0)


def gdpo_advantage(
    rewards: Tensor,
    group: Tensor,
    *,
    weights: Sequence[float] | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Return the weighted sum of group advantages, normalised reward by reward.

    A reward with a small spread counts as much as one with a large spread. Goes with
    `Advantage(whiten=True)`.

    Source: https://arxiv.org/abs/2601.05242.

    Args:
        rewards: float [N, F]; NaN marks a missing one.
        group: int64 [N].
        weights: F numbers, or None: all one.
        eps: Added to the standard deviations.
    """
    scale = check_weights(rewards, weights)
    parts = [w * group_advantage(r, group, eps=eps) for w, r in zip(scale, rewards.T, strict=True)]
    return torch.stack(parts).sum(0)


def gpg_advantage(reward: Tensor, group: Tensor) -> Tensor:
    """Return α·(R − mean): GPG's advantage, corrected for groups without signal.

    α = G / (G − M) with M of G groups having equal rewards, so that they do not dilute the
    gradient. (verl divides by the number of samples with a reward other than zero instead.)

    Source: https://arxiv.org/abs/2504.02546.

    Args:
        reward: float [N]; NaN (missing) gives zero and is left out.
        group: int64 [N].
    """
    stats = GroupStats(reward, group)
    groups = (stats.size > 0).sum()
    return stats.centred * (groups / stats.spread.sum().clamp(min=1))

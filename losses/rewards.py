"""What is done to rewards before advantages are estimated."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polopt.losses.checks import check_like, check_weights
from polopt.losses.divergences import Kl, kl_estimate
from polopt.losses.numerics import selected, selected_log_prob

__all__ = ["combine_rewards", "last_step_reward", "soft_overlong", "subtract_kl"]


def soft_overlong(length: Tensor, *, limit: int, cache: int) -> Tensor:
    """Return DAPO's soft punishment of long answers, to be added to the reward.

    0 up to limit − cache tokens, then falling in a straight line to −1 at `limit`, and −1
    beyond it.

    Source: https://arxiv.org/abs/2503.14476 eq. 13 (limit 20480, cache 4096).

    Args:
        length: int or float [N], tokens of each answer.
        limit: Longest answer, tokens.
        cache: Width of the slope, tokens, in [1, limit].

    Returns:
        float32 [N], in [−1, 0].
    """
    if not 1 <= cache <= limit:
        raise ValueError(f"cache must be in [1, limit], got cache={cache} limit={limit}")
    return (((limit - cache) - length.float()) / cache).clamp(-1.0, 0.0)


def combine_rewards(rewards: Tensor, weights: Sequence[float] | None = None) -> Tensor:
    """Return the weighted sum of several rewards per sample.

    A reward that is missing (NaN) leaves the others of its sample; a sample without any stays
    NaN, and `group_advantage` leaves it out.

    Args:
        rewards: float [N, F]; NaN marks a missing one.
        weights: F numbers, or None: all one.

    Returns:
        float [N].

    Raises:
        ValueError: If the shapes do not fit, or a weight is not finite.
    """
    total = (rewards * check_weights(rewards, weights)).nansum(1)
    return torch.where(rewards.isnan().all(1), torch.nan, total)


def last_step_reward(reward: Tensor, mask: Tensor) -> Tensor:
    """Return the reward of whole answers at their last trained token, float [N, T].

    Args:
        reward: float [N].
        mask: bool [N, T]. A row without trained tokens gets nothing.

    Raises:
        ValueError: If the shapes do not fit, or the mask is not bool.
    """
    if mask.ndim != 2 or mask.dtype != torch.bool or reward.shape != mask.shape[:1]:
        raise ValueError(
            "reward must be [N] and mask bool [N, T], got "
            f"{tuple(reward.shape)} and {mask.dtype} {tuple(mask.shape)}"
        )
    if not mask.numel():
        return torch.zeros_like(mask, dtype=reward.dtype)
    steps = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, steps, -1).amax(1, keepdim=True)
    return torch.where((steps == last) & mask, reward[:, None], 0.0)


def subtract_kl(
    token_reward: Tensor,
    log_prob: Tensor,
    ref_log_prob: Tensor,
    mask: Tensor,
    *,
    coef: float,
    kind: Kl = "k1",
) -> Tensor:
    """Return token rewards minus the divergence from the reference, without gradient.

    Source: https://arxiv.org/abs/1909.08593.

    Args:
        token_reward: float [N, T], for example from `last_step_reward`.
        log_prob: float [N, T], nats, of the policy that sampled.
        ref_log_prob: float [N, T].
        mask: bool [N, T].
        coef: Weight per nat.
        kind: As in `kl_estimate`.

    Returns:
        float [N, T], zero outside the mask.

    Raises:
        ValueError: If shapes differ, the mask is not bool, or `coef` is negative or not finite.
    """
    check_like(
        "token_reward", token_reward, log_prob=log_prob, ref_log_prob=ref_log_prob, mask=mask
    )
    if not 0.0 <= coef < float("inf"):
        raise ValueError(f"coef must be finite and not negative, got {coef}")
    dtype = torch.promote_types(log_prob.dtype, torch.float32)
    with torch.no_grad():
        divergence = kl_estimate(
            selected_log_prob(log_prob, mask, dtype),
            selected_log_prob(ref_log_prob, mask, dtype),
            kind,
        )
        return selected(token_reward, mask, dtype) - coef * torch.where(mask, divergence, 0.0)

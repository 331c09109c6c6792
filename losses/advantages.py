"""Advantages along trajectories: generalised advantage estimation and whitening."""

import torch
from torch import Tensor

from polopt.losses.checks import check_like
from polopt.losses.schedules import Schedule

__all__ = ["discounted_return", "gae", "length_adaptive_lam", "whiten"]


def gae(
    reward: Tensor,
    value: Tensor,
    next_value: Tensor,
    terminated: Tensor,
    done: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    target_lam: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return generalised advantages and value targets.

    δ_t = r_t + γ·(1 − terminated_t)·V(s_{t+1}) − V(s_t);
    A_t = δ_t + γλ·(1 − done_t)·A_{t+1}; target = A + V.

    A trajectory cut by a time limit is done but not terminated: its last value still counts.
    Passing `done` as `terminated` is the classical bug.

    Evaluated as a scan of logarithmic depth, without a loop over time.

    Source: https://arxiv.org/abs/1506.02438; a separate λ for the target:
    VC-PPO, https://arxiv.org/abs/2503.01491.

    Args:
        reward: float [..., T], of the transition from step t to t + 1.
        value: float [..., T], of the state at t.
        next_value: float [..., T], of the state reached, before any reset.
        terminated: bool [..., T], the state reached is final: its value is not counted.
        done: bool [..., T], the trajectory stops here, final or cut: nothing flows back
            across it. Taken to be true wherever `terminated` is.
        gamma: Discount per step, in [0, 1].
        lam: Mixing parameter in [0, 1], or a tensor [..., 1] with one per trajectory, whose
            values are not checked.
        target_lam: Another λ for the targets; None takes `lam`.

    Returns:
        Advantage and target, float [..., T] each, in units of the reward, float32 at least.

    Raises:
        ValueError: If shapes differ, a flag is not bool, or γ or λ is out of range.
    """
    check_like(
        "reward", reward, value=value, next_value=next_value, terminated=terminated, done=done
    )
    _check_steps(reward)
    _check_unit("gamma", gamma, reward)
    _check_unit("lam", lam, reward)
    if target_lam is not None:
        _check_unit("target_lam", target_lam, reward)
    dtype = torch.promote_types(torch.promote_types(reward.dtype, value.dtype), torch.float32)
    value = value.to(dtype)
    delta = reward + gamma * torch.where(terminated, 0.0, next_value.to(dtype)) - value
    discount = gamma * (~(done | terminated)).to(dtype)
    advantage = _scan(delta, discount * lam)
    if target_lam is None:
        return advantage, advantage + value
    return advantage, _scan(delta, discount * target_lam) + value


def discounted_return(reward: Tensor, done: Tensor, *, gamma: float | Tensor) -> Tensor:
    """Return R_t = r_t + γ·(1 − done_t)·R_{t+1}, float [..., T], without bootstrapping.

    Args:
        reward: float [..., T].
        done: bool [..., T].
        gamma: Discount per step, in [0, 1], or one for each step, float [..., T].
    """
    check_like("reward", reward, done=done)
    _check_steps(reward)
    _check_unit("gamma", gamma, reward)
    dtype = torch.promote_types(reward.dtype, torch.float32)
    return _scan(reward.to(dtype), gamma * (~done).to(dtype))


def length_adaptive_lam(length: Tensor, *, alpha: float = 0.05) -> Tensor:
    """Return VAPO's λ = 1 − 1 / (alpha·length) per trajectory, within [0, 1].

    The paper's formula is negative for lengths under 1 / alpha (20); it does not say what
    then, here λ is 0.

    Source: https://arxiv.org/abs/2504.05118 eq. 5.

    Args:
        length: int or float [...], steps of each trajectory.
        alpha: Positive.
    """
    if not alpha > 0.0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    length = length.to(torch.promote_types(length.dtype, torch.float32))
    return (1.0 - 1.0 / (alpha * length.clamp(min=1))).clamp(0.0, 1.0)


def whiten(
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    moments: tuple[Tensor, Tensor, Tensor] | None = None,
    shift: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Return the advantage with mean zero and standard deviation one over the batch.

    The deviation has n − 1 in its denominator. With fewer than two steps there is no spread
    to divide by, and the advantage is only centred.

    Args:
        advantage: float [...].
        mask: bool [...], steps that count, or None: all. Zero elsewhere in the result.
        moments: Count, sum and sum of squares over the whole batch, from `moments_of` and
            summed over micro-batches and ranks. None takes those of this batch.
        shift: Subtract the mean.
        eps: Added to the variance.

    Returns:
        float [...], float32 at least.
    """
    check_like("advantage", advantage, mask=mask)
    if not eps >= 0.0:
        raise ValueError(f"eps must not be negative, got {eps}")
    dtype = torch.promote_types(advantage.dtype, torch.float32)
    advantage = advantage.to(dtype)
    if mask is not None:
        advantage = torch.where(mask, advantage, 0.0)
    count, total, squares = moments_of(advantage, mask) if moments is None else moments
    mean = total / count.clamp(min=1)
    variance = (squares - count * mean.square()).clamp(min=0.0) / (count - 1).clamp(min=1)
    scale = torch.where(count > 1, torch.rsqrt(variance + eps), torch.ones_like(variance))
    centred = advantage - mean.to(dtype) if shift else advantage
    white = centred * scale.to(dtype)
    return white if mask is None else torch.where(mask, white, 0.0)


def moments_of(x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, sum and sum of squares of `x` within the mask, float64 scalars.

    They add up over micro-batches and ranks, and in float64 the difference of large squares
    keeps its digits.
    """
    x = x.double()
    if mask is None:
        count = torch.tensor(float(x.numel()), dtype=torch.float64, device=x.device)
    else:
        x, count = torch.where(mask, x, 0.0), mask.sum().double()
    return count, x.sum(), x.square().sum()


def _scan(term: Tensor, decay: Tensor) -> Tensor:
    """Return y_t = term_t + decay_t · y_{t+1}, by doubling the reach of each step."""
    result, decay = term.clone(), decay.expand_as(term)
    reach, steps = 1, term.shape[-1]
    while reach < steps:
        left = steps - reach
        # `decay` holds the product over `reach` steps. `narrow` costs a third of an index.
        later = decay.narrow(-1, 0, left) * result.narrow(-1, reach, left)
        result.narrow(-1, 0, left).add_(later)
        left -= reach
        if left > 0:
            decay = decay.narrow(-1, 0, left) * decay.narrow(-1, reach, left)
        reach *= 2
    return result


def _check_steps(reward: Tensor) -> None:
    if not reward.ndim:
        raise ValueError("reward must be [..., T], got a scalar")


def _check_unit(name: str, value: float | Tensor, reward: Tensor) -> None:
    if isinstance(value, Schedule):
        raise ValueError(f"{name} is a schedule: pass resolve(advantage, step) to the loop")
    if isinstance(value, Tensor):
        if value.ndim and value.shape not in (reward.shape, (*reward.shape[:-1], 1)):
            raise ValueError(
                f"{name} must be a number, [..., 1], or of the shape of reward "
                f"{tuple(reward.shape)}, got {tuple(value.shape)}"
            )
    elif not isinstance(value, float | int) or not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must be in [0, 1], got {value!r}")

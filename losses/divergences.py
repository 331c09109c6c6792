"""Divergences of the policy from a reference, estimated per step."""

from typing import Literal, get_args

import torch
from torch import Tensor

from polopt.losses.checks import check_like
from polopt.losses.numerics import MAX_LOG_RATIO

__all__ = ["Kl", "full_kl", "kl_estimate"]

Kl = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "full"]


def kl_estimate(log_prob: Tensor, ref_log_prob: Tensor, kind: Kl) -> Tensor:
    """Return an estimate, per step, of KL(policy ‖ reference) on samples of the policy.

    With d = log_prob − ref_log_prob:

    - `"k1"`: d. Unbiased, can be negative; its gradient is 1 on average zero: use it in the
      reward, not in the loss.
    - `"k2"`: d² / 2 (verl's `mse`). Biased, low variance; the only one here whose expected
      gradient on fresh samples is that of the divergence.
    - `"k3"`: exp(−d) − 1 + d (verl's `low_var_kl`). Unbiased, never negative.
    - `"abs"`: |d|.
    - `"k1+"`, `"k3+"`, `"abs+"`: the value of the first, the gradient of `"k2"`
      (straight-through).

    The argument of `exp` is bounded to ±20 nats and keeps its gradient beyond: a clamp would
    switch the penalty off where the policy has left the reference farthest behind (verl's k3
    has no gradient once π_ref / π > 13.7; TRL's and TorchRL's become infinite).

    Source: http://joschu.net/blog/kl-approx.html.

    Args:
        log_prob: float [...], nats, of samples drawn from the policy.
        ref_log_prob: float [...].
        kind: As above. `"full"` needs whole distributions: see `full_kl`.

    Returns:
        float [...], nats.

    Raises:
        ValueError: If the kind is unknown, or the shapes differ.
    """
    check_like("log_prob", log_prob, ref_log_prob=ref_log_prob)
    difference = log_prob - ref_log_prob.detach()
    if kind.endswith("+") and kind in get_args(Kl):
        through = 0.5 * difference.square()
        value = _estimate(difference.detach(), kind.removesuffix("+"))
        return through + (value - through.detach())
    return _estimate(difference, kind)


def full_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return KL(policy ‖ reference) per step from whole distributions, without estimation.

    Args:
        log_probs: float [..., V], normalised, nats. −inf (an impossible token) is allowed.
        ref_log_probs: float [..., V].

    Returns:
        float [...], nats.
    """
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    check_like("log_probs", log_probs, ref_log_probs=ref_log_probs)
    possible = log_probs != -torch.inf  # NaN stays NaN
    log_probs = torch.where(possible, log_probs.to(dtype), 0.0)
    difference = torch.where(possible, log_probs - ref_log_probs.to(dtype), 0.0)
    return (torch.where(possible, log_probs.exp(), 0.0) * difference).sum(-1)


def _estimate(difference: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        free = difference.detach()
        beyond = free - free.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return torch.expm1(beyond - difference) + difference
    if kind == "abs":
        return difference.abs()
    if kind == "full":
        raise ValueError("kl 'full' needs whole distributions: pass policy_loss(kl=full_kl(…))")
    raise ValueError(f"kl must be one of {get_args(Kl)}, got {kind!r}")

"""Named algorithms for language models whose advantage or surrogate is the new part.

Like `polopt.losses.presets`: each takes the knobs its paper has.
"""

from collections.abc import Sequence

from polopt.losses.algorithm import Advantage, Algorithm
from polopt.losses.covariance import ClipCov, KlCov
from polopt.losses.groups import group_advantage
from polopt.losses.objective import Objective
from polopt.losses.outcomes import (
    gdpo_advantage,
    gpg_advantage,
    opo_advantage,
    pass_at_k_advantage,
    reinforce_pp_advantage,
    remax_advantage,
)
from polopt.losses.schedules import Coefficient, check_unit
from polopt.losses.surrogates import Clip, GeometricClip, Plain

__all__ = [
    "clip_cov",
    "gdpo",
    "gmpo",
    "gpg",
    "kl_cov",
    "opo",
    "pass_at_k",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
]


def gmpo(*, low: Coefficient = 0.4, high: Coefficient = 0.4) -> Algorithm:
    """GMPO, https://arxiv.org/abs/2507.20673: geometric mean of clipped ratios per answer.

    Args:
        low: Bound of the log-ratio of a token from below, nats.
        high: From above, nats.
    """
    return Algorithm(
        objective=Objective(
            surrogate=GeometricClip(low=low, high=high), aggregation="sequence_mean"
        ),
        advantage=Advantage(estimate=group_advantage),
    )


def clip_cov(
    *,
    low: Coefficient = 1.0,
    high: Coefficient = 1.0,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> Algorithm:
    """Clip-Cov, https://arxiv.org/abs/2505.22617: tokens of high covariance lose their gradient.

    Args:
        low: The ratio is clipped from below at 1 − low; 1 as the authors run it: no bound.
        high: From above at 1 + high.
        share: Of tokens to hold back.
        cov_low: Smallest covariance of a candidate.
        cov_high: Largest.
    """
    surrogate = ClipCov(low=low, high=high, share=share, cov_low=cov_low, cov_high=cov_high)
    return Algorithm(
        objective=Objective(surrogate=surrogate), advantage=Advantage(estimate=group_advantage)
    )


def kl_cov(*, coef: Coefficient = 1.0, share: float = 2e-3) -> Algorithm:
    """KL-Cov, https://arxiv.org/abs/2505.22617: tokens of high covariance pay for moving.

    Args:
        coef: Weight of the penalty.
        share: Of tokens to penalise; 2e-3 for 7B, 2e-4 for 32B.
    """
    return Algorithm(
        objective=Objective(surrogate=KlCov(coef=coef, share=share)),
        advantage=Advantage(estimate=group_advantage),
    )


def gpg() -> Algorithm:
    """GPG, https://arxiv.org/abs/2504.02546: the policy gradient of group advantages, no more."""
    return Algorithm(
        objective=Objective(surrogate=Plain(), ratio="none"),
        advantage=Advantage(estimate=gpg_advantage),
    )


def reinforce_pp(
    *, clip: Coefficient = 0.2, kl_coef: Coefficient = 0.001, gamma: float = 1.0
) -> Algorithm:
    """REINFORCE++, https://arxiv.org/abs/2501.03262: PPO without a critic, whitened returns.

    Args:
        clip: The ratio is clipped to 1 ± clip.
        kl_coef: Weight of k1 from the reference, subtracted from the token rewards; verl's
            default.
        gamma: Discount per token.
    """
    check_unit("gamma", gamma)
    return Algorithm(
        objective=Objective(
            surrogate=Clip(low=clip, high=clip), kl_coef=kl_coef, kl="k1", kl_in="reward"
        ),
        advantage=Advantage(
            estimate=reinforce_pp_advantage, settings={"gamma": gamma}, whiten=True
        ),
    )


def reinforce_pp_baseline(*, clip: Coefficient = 0.2, kl_coef: Coefficient = 0.001) -> Algorithm:
    """REINFORCE++-baseline, https://arxiv.org/abs/2501.03262: group mean, then whitened.

    Whitening is over tokens, so a group whose answers all got the same reward does not stay
    at zero when the mean over the batch is not.

    Args:
        clip: The ratio is clipped to 1 ± clip.
        kl_coef: Weight of k2 from the reference, in the loss; verl's default.
    """
    return Algorithm(
        objective=Objective(surrogate=Clip(low=clip, high=clip), kl_coef=kl_coef, kl="k2"),
        advantage=Advantage(estimate=group_advantage, settings={"scale": "none"}, whiten=True),
    )


def remax(*, kl_coef: Coefficient = 0.0) -> Algorithm:
    """ReMax, https://arxiv.org/abs/2310.10505: the greedy answer's reward is the baseline.

    Args:
        kl_coef: Weight of k1 from the reference, subtracted from the reward.
    """
    return Algorithm(
        objective=Objective(
            surrogate=Plain(),
            ratio="none",
            aggregation="sequence_sum",
            kl_coef=kl_coef,
            kl="k1",
            kl_in="reward",
        ),
        advantage=Advantage(estimate=remax_advantage),
    )


def opo() -> Algorithm:
    """OPO, https://arxiv.org/abs/2505.23585: strictly on-policy, length-weighted baseline."""
    return Algorithm(
        objective=Objective(surrogate=Plain(), ratio="none"),
        advantage=Advantage(estimate=opo_advantage),
    )


def pass_at_k(*, clip: Coefficient = 0.2, scale: bool = False) -> Algorithm:
    """Pass@k training, https://arxiv.org/abs/2503.19595: only the best answer of a group learns.

    Args:
        clip: The ratio is clipped to 1 ± clip.
        scale: Divide by the standard deviation of the group.
    """
    return Algorithm(
        objective=Objective(surrogate=Clip(low=clip, high=clip)),
        advantage=Advantage(estimate=pass_at_k_advantage, settings={"scale": scale}),
    )


def gdpo(*, weights: Sequence[float] | None = None, clip: Coefficient = 0.2) -> Algorithm:
    """GDPO, https://arxiv.org/abs/2601.05242: each reward normalised in its group, then summed.

    Args:
        weights: One number per reward, or none: all one.
        clip: The ratio is clipped to 1 ± clip.
    """
    return Algorithm(
        objective=Objective(surrogate=Clip(low=clip, high=clip)),
        advantage=Advantage(estimate=gdpo_advantage, settings={"weights": weights}, whiten=True),
    )

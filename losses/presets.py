"""Named algorithms, with the values of their papers.

Each function takes the knobs its paper has, and no others. For the rest use
`dataclasses.replace(dapo().objective, …)`. Any coefficient may be a schedule.
"""

from typing import Any

from polopt.losses.advantages import gae
from polopt.losses.algorithm import Advantage, Algorithm, Sampling, ValueTerm
from polopt.losses.groups import group_advantage
from polopt.losses.objective import Objective
from polopt.losses.schedules import Coefficient, check_unit
from polopt.losses.surrogates import Cispo, Clip, KlPenalty, Plain, SoftGate

__all__ = [
    "a2c",
    "cispo",
    "dapo",
    "dr_grpo",
    "grpo",
    "gspo",
    "kl_ppo",
    "ppo",
    "reinforce",
    "rloo",
    "sapo",
]


def ppo(
    *,
    clip: Coefficient = 0.2,
    clip_high: Coefficient | None = None,
    dual: Coefficient | None = None,
    entropy_coef: Coefficient = 0.0,
    value_coef: Coefficient = 0.5,
    value_clip: Coefficient | None = None,
    gamma: float = 0.99,
    lam: Coefficient = 0.95,
    whiten: bool = True,
) -> Algorithm:
    """PPO with a critic, https://arxiv.org/abs/1707.06347.

    Args:
        clip: The ratio is clipped to 1 ± clip.
        clip_high: Another bound above (clip-higher, from DAPO).
        dual: Bound on the ratio where the advantage is negative; see `Clip`.
        entropy_coef: Weight of the entropy bonus. 0 to 0.01 in control, 0 for LLMs.
        value_coef: Weight of the value loss.
        value_clip: Largest credited change of the value, in units of the (scaled) return.
        gamma: Discount per step.
        lam: λ of GAE. 1 for sparse rewards at the end, such as answers of an LLM.
        whiten: Normalise advantages over the batch.
    """
    return Algorithm(
        objective=Objective(
            surrogate=Clip(low=clip, high=clip if clip_high is None else clip_high, dual=dual),
            entropy_coef=entropy_coef,
        ),
        advantage=_gae(gamma=gamma, lam=lam, whiten=whiten),
        value=ValueTerm(coef=value_coef, clip=value_clip),
    )


def kl_ppo(
    *,
    coef: Coefficient = 1.0,
    entropy_coef: Coefficient = 0.0,
    value_coef: Coefficient = 0.5,
    gamma: float = 0.99,
    lam: Coefficient = 0.95,
    whiten: bool = True,
) -> Algorithm:
    """PPO with a KL penalty instead of the clip, https://arxiv.org/abs/1707.06347.

    Args:
        coef: Weight of KL(π_old ‖ π); `TargetKl(target=0.01)` makes it the adaptive form.
        entropy_coef: Weight of the entropy bonus.
        value_coef: Weight of the value loss.
        gamma: Discount per step.
        lam: λ of GAE.
        whiten: Normalise advantages over the batch.
    """
    return Algorithm(
        objective=Objective(surrogate=KlPenalty(coef=coef), entropy_coef=entropy_coef),
        advantage=_gae(gamma=gamma, lam=lam, whiten=whiten),
        value=ValueTerm(coef=value_coef),
    )


def a2c(
    *,
    entropy_coef: Coefficient = 0.01,
    value_coef: Coefficient = 0.5,
    gamma: float = 0.99,
    lam: Coefficient = 1.0,
    whiten: bool = False,
) -> Algorithm:
    """A2C, https://arxiv.org/abs/1602.01783: one on-policy step per batch, with a critic.

    Args:
        entropy_coef: Weight of the entropy bonus; the paper's 0.01.
        value_coef: Weight of the value loss.
        gamma: Discount per step.
        lam: λ of GAE; 1 gives the paper's n-step returns.
        whiten: Normalise advantages over the batch.
    """
    return Algorithm(
        objective=Objective(surrogate=Plain(), ratio="none", entropy_coef=entropy_coef),
        advantage=_gae(gamma=gamma, lam=lam, whiten=whiten),
        value=ValueTerm(coef=value_coef),
    )


def reinforce(
    *, entropy_coef: Coefficient = 0.0, value_coef: Coefficient = 0.5, gamma: float = 0.99
) -> Algorithm:
    """REINFORCE with a learned baseline, https://doi.org/10.1007/BF00992696.

    Args:
        entropy_coef: Weight of the entropy bonus.
        value_coef: Weight of the loss of the baseline.
        gamma: Discount per step.
    """
    return a2c(entropy_coef=entropy_coef, value_coef=value_coef, gamma=gamma, whiten=True)


def grpo(*, clip: Coefficient = 0.2, kl_coef: Coefficient = 0.04) -> Algorithm:
    """GRPO, https://arxiv.org/abs/2402.03300: group advantages, mean over each answer, k3.

    Args:
        clip: The ratio is clipped to 1 ± clip.
        kl_coef: Weight of the divergence from the reference; the paper's 0.04. Many later
            recipes use 0, which also saves the reference model.
    """
    return Algorithm(
        objective=Objective(
            surrogate=Clip(low=clip, high=clip), aggregation="sequence_mean", kl_coef=kl_coef
        ),
        advantage=_grouped(),
    )


def dr_grpo(*, horizon: int, clip: Coefficient = 0.2) -> Algorithm:
    """Dr. GRPO, https://arxiv.org/abs/2503.20783: GRPO without its two biases.

    The loss is divided by a constant instead of the length of the answer, and advantages are
    not divided by the standard deviation of their group.

    Args:
        horizon: The constant: the generation budget in tokens.
        clip: The ratio is clipped to 1 ± clip.
    """
    return Algorithm(
        objective=Objective(
            surrogate=Clip(low=clip, high=clip), aggregation="constant", horizon=horizon
        ),
        advantage=_grouped(scale="none"),
    )


def dapo(
    *,
    low: Coefficient = 0.2,
    high: Coefficient = 0.28,
    dual: Coefficient | None = None,
    refill: str | None = "correct",
    max_rounds: int = 8,
    oversample: float = 1.0,
    at_bound: str = "train",
    overlong_cache: int | None = None,
    drop_truncated: bool = False,
) -> Algorithm:
    """DAPO, https://arxiv.org/abs/2503.14476.

    Clip-higher inside PPO's min, the mean over all tokens of the batch, no divergence, and
    groups that are all right or all wrong replaced until the batch is full. (Eq. 8 takes the
    mean within each group; its authors' code takes it over the batch, as here. Aggregation
    `"group_token_mean"` is the former.)

    Args:
        low: The ratio is clipped from below at 1 − low.
        high: From above at 1 + high.
        dual: Bound on the ratio where the advantage is negative; see `Clip`.
        refill: Which groups are replaced: `"correct"`, `"reward"` or none; see `Sampling`.
        max_rounds: Further generation rounds for one batch, at most.
        oversample: A round draws so many times the groups that are expected to be needed.
        at_bound: If groups are still missing then: `"train"` on those found, or also `"stop"`.
        overlong_cache: Width in tokens of the soft punishment of long answers; the paper's is a
            fifth of the limit (4096 of 20480). None punishes nothing.
        drop_truncated: Leave answers cut at the limit out of the loss (overlong filter).
    """
    return Algorithm(
        objective=Objective(surrogate=Clip(low=low, high=high, dual=dual)),
        advantage=_grouped(),
        sampling=Sampling(
            refill=refill,  # type: ignore[arg-type]
            max_rounds=max_rounds,
            oversample=oversample,
            at_bound=at_bound,  # type: ignore[arg-type]
            overlong_cache=overlong_cache,
            drop_truncated=drop_truncated,
        ),
    )


def gspo(*, low: Coefficient = 3e-4, high: Coefficient = 4e-4) -> Algorithm:
    """GSPO, https://arxiv.org/abs/2507.18071: length-normalised ratio of whole answers.

    Args:
        low: The ratio is clipped from below at 1 − low.
        high: From above at 1 + high. The ratio is a mean over many tokens: bounds are small.
    """
    return Algorithm(
        objective=Objective(
            surrogate=Clip(low=low, high=high), ratio="sequence", aggregation="sequence_mean"
        ),
        advantage=_grouped(),
    )


def rloo(*, clip: Coefficient = 0.2, kl_coef: Coefficient = 0.0) -> Algorithm:
    """RLOO, https://arxiv.org/abs/2402.14740: the other answers are the baseline.

    The ratio is that of whole answers, as in TRL's RLOO; on-policy it is one.

    Args:
        clip: The ratio is clipped to 1 ± clip.
        kl_coef: Weight of the divergence from the reference, subtracted from the reward.
    """
    return Algorithm(
        objective=Objective(
            surrogate=Clip(low=clip, high=clip),
            ratio="sequence_sum",
            aggregation="sequence_mean",
            kl_coef=kl_coef,
            kl="k1",
            kl_in="reward",
        ),
        advantage=_grouped(baseline="leave_one_out", scale="none"),
    )


def cispo(*, high: Coefficient = 4.0, low: Coefficient | None = None) -> Algorithm:
    """CISPO, https://arxiv.org/abs/2506.13585: clips the weight, not the gradient.

    Args:
        high: The weight is at most 1 + high. Tuned but not published; 4 (a cap of 5) is the
            value of ScaleRL, https://arxiv.org/abs/2510.13786.
        low: The weight is at least 1 − low; none as in the paper.
    """
    return Algorithm(objective=Objective(surrogate=Cispo(high=high, low=low)), advantage=_grouped())


def sapo(*, tau_positive: Coefficient = 1.0, tau_negative: Coefficient = 1.05) -> Algorithm:
    """SAPO, https://arxiv.org/abs/2511.20347: a soft gate instead of a clip.

    Args:
        tau_positive: Temperature of the gate where the advantage is positive.
        tau_negative: Temperature elsewhere.
    """
    return Algorithm(
        objective=Objective(
            surrogate=SoftGate(tau_positive=tau_positive, tau_negative=tau_negative),
            aggregation="sequence_mean",
        ),
        advantage=_grouped(),
    )


def _grouped(**settings: Any) -> Advantage:  # noqa: ANN401
    return Advantage(estimate=group_advantage, settings=settings)


def _gae(*, whiten: bool, **units: Coefficient) -> Advantage:
    for name, value in units.items():
        check_unit(name, value)
    return Advantage(estimate=gae, settings=units, whiten=whiten)

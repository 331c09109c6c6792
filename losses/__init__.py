"""Losses and advantages as functions of tensors.

Importing this package imports torch and nothing else. `polopt.losses.modules` holds the
TensorDict module.
"""

from polopt.losses.advantages import discounted_return, gae, length_adaptive_lam, moments_of, whiten
from polopt.losses.aggregation import Aggregation, step_weights, unit_count
from polopt.losses.algorithm import Advantage, Algorithm, Sampling, ValueTerm
from polopt.losses.checks import check_finite
from polopt.losses.controllers import (
    AdaptiveKl,
    Controller,
    TargetEntropy,
    TargetKl,
    load_states,
    observe_all,
    states_of,
)
from polopt.losses.corrections import Correction, OffPolicyMask, Reject, Reweight
from polopt.losses.covariance import ClipCov, KlCov
from polopt.losses.divergences import Kl, full_kl, kl_estimate
from polopt.losses.groups import group_advantage, informative
from polopt.losses.objective import Objective, policy_loss, select_steps
from polopt.losses.outcome_presets import (
    clip_cov,
    gdpo,
    gmpo,
    gpg,
    kl_cov,
    opo,
    pass_at_k,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
)
from polopt.losses.outcomes import (
    gdpo_advantage,
    gpg_advantage,
    opo_advantage,
    pass_at_k_advantage,
    reinforce_pp_advantage,
    remax_advantage,
)
from polopt.losses.presets import (
    a2c,
    cispo,
    dapo,
    dr_grpo,
    grpo,
    gspo,
    kl_ppo,
    ppo,
    reinforce,
    rloo,
    sapo,
)
from polopt.losses.rewards import combine_rewards, last_step_reward, soft_overlong, subtract_kl
from polopt.losses.schedules import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    Schedule,
    Warmup,
    resolve,
)
from polopt.losses.selection import (
    drop_small_advantages,
    drop_truncated,
    entropy_threshold,
    top_entropy,
)
from polopt.losses.surrogates import (
    Cispo,
    Clip,
    GeometricClip,
    KlPenalty,
    Plain,
    SelectingSurrogate,
    SoftGate,
    Surrogate,
)
from polopt.losses.values import explained_variance, value_loss

__all__ = [
    "AdaptiveKl",
    "Advantage",
    "Aggregation",
    "Algorithm",
    "Cispo",
    "Clip",
    "ClipCov",
    "Constant",
    "Controller",
    "Correction",
    "Cosine",
    "Exponential",
    "GeometricClip",
    "Kl",
    "KlCov",
    "KlPenalty",
    "Linear",
    "Objective",
    "OffPolicyMask",
    "Plain",
    "Reject",
    "Reweight",
    "Sampling",
    "Schedule",
    "SelectingSurrogate",
    "SoftGate",
    "Surrogate",
    "TargetEntropy",
    "TargetKl",
    "ValueTerm",
    "Warmup",
    "a2c",
    "check_finite",
    "cispo",
    "clip_cov",
    "combine_rewards",
    "dapo",
    "discounted_return",
    "dr_grpo",
    "drop_small_advantages",
    "drop_truncated",
    "entropy_threshold",
    "explained_variance",
    "full_kl",
    "gae",
    "gdpo",
    "gdpo_advantage",
    "gmpo",
    "gpg",
    "gpg_advantage",
    "group_advantage",
    "grpo",
    "gspo",
    "informative",
    "kl_cov",
    "kl_estimate",
    "kl_ppo",
    "last_step_reward",
    "length_adaptive_lam",
    "load_states",
    "moments_of",
    "observe_all",
    "opo",
    "opo_advantage",
    "pass_at_k",
    "pass_at_k_advantage",
    "policy_loss",
    "ppo",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_advantage",
    "reinforce_pp_baseline",
    "remax",
    "remax_advantage",
    "resolve",
    "rloo",
    "sapo",
    "select_steps",
    "soft_overlong",
    "states_of",
    "step_weights",
    "subtract_kl",
    "top_entropy",
    "unit_count",
    "value_loss",
    "whiten",
]

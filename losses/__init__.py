"""Losses and advantages as functions of tensors.

Importing this package imports torch and nothing else. `polopt.losses.modules` holds the
TensorDict module.
"""

from polopt.losses.advantages import discounted_return, gae, length_adaptive_lam, whiten
from polopt.losses.aggregation import Aggregation, step_weights, unit_count
from polopt.losses.algorithm import Advantage, Algorithm, Sampling, ValueTerm
from polopt.losses.corrections import Correction, OffPolicyMask, Reject, Reweight
from polopt.losses.divergences import Kl, full_kl, kl_estimate
from polopt.losses.groups import group_advantage, informative
from polopt.losses.objective import Objective, policy_loss
from polopt.losses.presets import cispo, dapo, dr_grpo, grpo, gspo, ppo, rloo, sapo
from polopt.losses.schedules import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    Schedule,
    Warmup,
    resolve,
)
from polopt.losses.surrogates import (
    Cispo,
    Clip,
    GeometricClip,
    KlPenalty,
    Plain,
    SoftGate,
    Surrogate,
)
from polopt.losses.values import explained_variance, value_loss

__all__ = [
    "Advantage",
    "Aggregation",
    "Algorithm",
    "Cispo",
    "Clip",
    "Constant",
    "Correction",
    "Cosine",
    "Exponential",
    "GeometricClip",
    "Kl",
    "KlPenalty",
    "Linear",
    "Objective",
    "OffPolicyMask",
    "Plain",
    "Reject",
    "Reweight",
    "Sampling",
    "Schedule",
    "SoftGate",
    "Surrogate",
    "ValueTerm",
    "Warmup",
    "cispo",
    "dapo",
    "discounted_return",
    "dr_grpo",
    "explained_variance",
    "full_kl",
    "gae",
    "group_advantage",
    "grpo",
    "gspo",
    "informative",
    "kl_estimate",
    "length_adaptive_lam",
    "policy_loss",
    "ppo",
    "resolve",
    "rloo",
    "sapo",
    "step_weights",
    "unit_count",
    "value_loss",
    "whiten",
]

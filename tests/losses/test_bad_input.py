"""Bad input is one sentence that names the argument, the value and what was expected."""

import math
from dataclasses import replace

import pytest
import torch

import polopt.losses as losses
from polopt.losses import (
    AdaptiveKl,
    Advantage,
    Cispo,
    Clip,
    ClipCov,
    Constant,
    GeometricClip,
    Linear,
    Objective,
    OffPolicyMask,
    Reject,
    RejectDivergent,
    Reweight,
    SoftGate,
    ValueTerm,
    Warmup,
    check_finite,
    dapo,
    gae,
    group_advantage,
    gspo,
    policy_loss,
    select_steps,
    value_loss,
)

B, T = 4, 7
STEP = torch.zeros(B, T)
MASK = torch.ones(B, T, dtype=torch.bool)
GROUP = torch.zeros(B, dtype=torch.long)
GIVEN = {"log_prob": STEP, "old_log_prob": STEP, "advantage": STEP, "mask": MASK}
DAPO = dapo().objective
CLIP_COV = losses.clip_cov().objective
RAMP = Linear(start=1.0, end=0.9, steps=9)
NAN = math.nan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.ones(B, T)}, "mask must be bool, got torch.float32"),
        ({"mask": MASK[:, :6]}, r"mask must have the shape of log_prob \(4, 7\), got \(4, 6\)"),
        ({"old_log_prob": STEP[:3]}, r"old_log_prob must have the shape .*\(4, 7\), got \(3, 7\)"),
        ({"old_log_prob": None}, "ratio 'token' needs old_log_prob, got none"),
        ({"advantage": torch.zeros(B)}, r"advantage must have .*\(4, 7\) or \[B, 1\], got \(4,\)"),
        ({"log_prob": torch.zeros(B, T).long()}, r"log_prob must be float .*got torch.int64"),
        ({"log_prob": torch.zeros(2, 2, 2)}, r"log_prob must be float .*got .*\(2, 2, 2\)"),
        ({"entropy": STEP[:, :1]}, r"entropy must have the shape .*got \(4, 1\)"),
        ({"ref_log_prob": STEP[:, :1]}, r"ref_log_prob must have the shape .*got \(4, 1\)"),
        ({"behavior_log_prob": STEP[:1]}, r"behavior_log_prob must have .*got \(1, 7\)"),
        (
            {"objective": replace(DAPO, kl_coef=0.1)},
            "kl_coef is set, so ref_log_prob is required",
        ),
        (
            {"objective": replace(DAPO, kl_coef=0.1, kl="full")},
            "kl='full' is set, so kl is required",
        ),
        (
            {"objective": replace(DAPO, entropy_coef=0.1)},
            "entropy_coef is set, so entropy is required",
        ),
        (
            {"objective": replace(DAPO, corrections=(Reweight(),))},
            "corrections is set, so behavior_log_prob is required",
        ),
        (
            {"objective": replace(DAPO, aggregation="group_token_mean")},
            "'group_token_mean' needs group_tokens",
        ),
        (
            {"objective": replace(DAPO, entropy_coef=Linear(start=1.0, end=0.0, steps=9)),
             "entropy": STEP},
            "entropy_coef is a schedule: pass resolve",
        ),
        (
            {"objective": dapo(high=Linear(start=0.3, end=0.2, steps=9)).objective},
            "high is a schedule: pass resolve",
        ),
        ({"denominator": 28.0}, "denominator must be a scalar tensor, got 28.0"),
        ({"objective": dapo()}, "objective must be an Objective, got Algorithm: .*pass algorithm"),
        (
            {"objective": replace(DAPO, aggregation="group_token_mean"),
             "group_tokens": torch.ones(1)},
            r"group_tokens must be \[B\] = \(4,\), got \(1,\)",
        ),
    ],
)  # fmt: skip
def test_policy_loss(change, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(**{"objective": DAPO, **GIVEN, **change})


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (gspo().objective, r"'sequence_mean' needs steps \[B, T\], got \(4,\)"),
        (replace(DAPO, ratio="sequence"), r"'sequence' needs steps \[B, T\], got \(4,\)"),
        (replace(DAPO, surrogate=GeometricClip()), r"GeometricClip needs .* got \(4,\)"),
    ],
)
def test_sequences_need_two_dimensions(objective, message):
    step = torch.zeros(B)
    with pytest.raises(ValueError, match=message):
        policy_loss(step, step, step, objective=objective)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Objective(surrogate=Clip(), ratio="word"), "ratio must be one of .*got 'word'"),
        (lambda: Objective(surrogate=Clip(), kl="k4"), "kl must be one of .*got 'k4'"),
        (lambda: Objective(surrogate=Clip(), kl_in="x"), "kl_in must be .*got 'x'"),
        (lambda: Objective(surrogate=Clip(), aggregation="mean"), "aggregation .*got 'mean'"),
        (lambda: Objective(surrogate=Clip(), aggregation="constant"), "horizon .*required"),
        (lambda: Objective(surrogate=Clip(), horizon=4), "horizon is for aggregation 'constant'"),
        (lambda: losses.dr_grpo(horizon=0), "horizon must be at least 1, got 0"),
        (lambda: Objective(surrogate=Clip(), kl_coef=-1.0), "kl_coef must be .* 0, got -1"),
        (lambda: Clip(low=-0.2), r"low must be in \[0, 1\], got -0.2"),
        (lambda: Clip(high=-0.1), "high must be a number of at least 0, got -0.1"),
        (lambda: Clip(dual=0.5), "dual must be more than one, got 0.5"),
        (lambda: losses.ppo(clip=-0.1), r"low must be in \[0, 1\], got -0.1"),
        (lambda: Cispo(low=2.0), r"low must be in \[0, 1\] or none, got 2.0"),
        (lambda: SoftGate(tau_negative=0.0), "tau_negative must be positive and finite, got 0.0"),
        (lambda: GeometricClip(low=-1.0), "low must be positive, got -1.0"),
        (lambda: Clip(low="x"), r"low must be in \[0, 1\], got 'x'"),
        (lambda: Clip(dual="x"), "dual must be more than one, got 'x'"),
        (lambda: Clip(high=Linear(start=0.2, end=-1.0, steps=9)), "high .*at least 0, got -1.0"),
        (lambda: Clip(low=Warmup(steps=9, then=1.2)), r"low must be in \[0, 1\], got 1.2"),
        (lambda: Cispo(high=[1]), r"high must be a number of at least 0, got \[1\]"),
        (lambda: SoftGate(tau_positive=math.inf), "tau_positive .*finite, got inf"),
        (lambda: Objective(surrogate=Clip), "surrogate must be one such as Clip.., got <class"),
        (lambda: Objective(surrogate="clip"), "surrogate must be one such as .*got 'clip'"),
        (lambda: Objective(surrogate=Clip(), corrections=Reweight()), "tuple .*got Reweight"),
        (lambda: Objective(surrogate=Clip(), corrections=("x",)), r"tuple .*got \('x',\)"),
        (lambda: Objective(surrogate=Clip(), entropy_coef=math.inf), "entropy_coef .*got inf"),
        (lambda: Objective(surrogate=Clip(), kl_coef="x"), "kl_coef .*at least 0, got 'x'"),
        (lambda: Objective(surrogate=Clip(), kl_coef=NAN), "kl_coef .*at least 0, got nan"),
        (lambda: Constant(value=NAN), "value must be a finite number, got nan"),
        (lambda: Linear(start="x", end=0.0, steps=9), "start must be a finite number, got 'x'"),
        (lambda: Warmup(steps=9, then=math.inf), "then must be a finite number, got inf"),
        (lambda: AdaptiveKl(target=math.inf), "target must be positive and finite, got inf"),
        (lambda: OffPolicyMask(threshold=NAN), "threshold must be a finite number of .*, got nan"),
        (lambda: ClipCov(share=0.0), r"share must be in \(0, 1\], got 0.0"),
        (lambda: ClipCov(cov_low=6.0), "cov_low must be below cov_high, got 6.0 and 5.0"),
        (lambda: Reweight(level="word"), "level must be one of .*got 'word'"),
        (lambda: Reject(high=0.0), "high must be positive, got 0.0"),
        (lambda: Reject(low=3.0), r"low must be in \[0, high\), got low=3.0 high=2.0"),
        (lambda: OffPolicyMask(threshold=-0.1), "threshold must be a finite .*, got -0.1"),
        (lambda: ValueTerm(coef=-1.0), "coef must be a finite number of .*, got -1.0"),
        (lambda: losses.a2c(value_coef=NAN), "coef must be a finite number of .*, got nan"),
        (lambda: losses.ppo(gamma=1.5), r"gamma must be in \[0, 1\], got 1.5"),
        (lambda: losses.kl_ppo(lam=NAN), r"lam must be in \[0, 1\], got nan"),
        (lambda: losses.reinforce(gamma=-1.0), r"gamma must be in \[0, 1\], got -1.0"),
        (lambda: losses.reinforce_pp(gamma=1.5), r"gamma must be in \[0, 1\], got 1.5"),
        (lambda: ValueTerm(clip=0.0), "clip must be positive or none, got 0.0"),
        (lambda: ValueTerm(loss="l1"), "loss must be 'mse' or 'huber', got 'l1'"),
        (lambda: Advantage(estimate=gae, settings={"gamma": 1.0}), "gae needs the setting 'lam'"),
        (lambda: Advantage(estimate=group_advantage, settings={"scal": 1}), "no setting 'scal'"),
        (lambda: dapo(refill="all"), "refill must be .*got 'all'"),
        (lambda: dapo(max_rounds=0), "max_rounds must be at least 1, got 0"),
        (lambda: dapo(oversample=0.5), "oversample must be at least 1, got 0.5"),
        (lambda: dapo(at_bound="end"), "at_bound must be 'train' or 'stop', got 'end'"),
        (lambda: group_advantage(STEP, GROUP), r"must both be \[N\], got \(4, 7\) and \(4,\)"),
        (lambda: group_advantage(STEP[:, 0], GROUP.int()), "group must be int64, got torch.int32"),
        (lambda: group_advantage(STEP[:, 0], GROUP, scale="std"), "scale .*got 'std'"),
        (lambda: group_advantage(STEP[:, 0], GROUP, baseline="max"), "baseline .*got 'max'"),
        (lambda: group_advantage(STEP[:, 0], GROUP, eps=-1.0), "eps .*negative, got -1.0"),
        (lambda: gae(STEP, STEP, STEP, MASK, MASK, gamma=1.5, lam=1.0), r"gamma .*got 1.5"),
        (lambda: gae(STEP, STEP, STEP, MASK, MASK, gamma=1.0, lam=-1.0), r"lam .*got -1.0"),
        (lambda: gae(STEP, STEP, STEP, STEP, MASK, gamma=1.0, lam=1.0), "terminated must be bool"),
        (lambda: gae(STEP, STEP[:1], STEP, MASK, MASK, gamma=1.0, lam=1.0), r"value .*\(1, 7\)"),
        (lambda: value_loss(STEP, None, STEP, MASK, clip=0.2), "clip is set, so old_value is"),
        (lambda: value_loss(STEP, None, STEP[:1], MASK), r"target must have .*got \(1, 7\)"),
        (lambda: value_loss(STEP, None, STEP, STEP), "mask must be bool, got torch.float32"),
        (lambda: value_loss(STEP, None, STEP, MASK, loss="l1"), "loss must be .*got 'l1'"),
        (lambda: select_steps(STEP, STEP, STEP, objective=DAPO), "Clip selects nothing"),
        (lambda: losses.kl_estimate(STEP, STEP, "k9"), "kl must be one of .*got 'k9'"),
        (lambda: losses.kl_estimate(STEP, STEP, "full"), "'full' needs whole distributions"),
        (lambda: losses.soft_overlong(GROUP, limit=4, cache=5), "cache .*got cache=5 limit=4"),
        (lambda: losses.combine_rewards(STEP, [1.0]), r"weights .*\(7\), got 1"),
        (lambda: losses.gdpo_advantage(STEP, GROUP, weights=[1.0]), r"weights .*\(7\), got 1"),
        (lambda: losses.remax_advantage(STEP[0], STEP[1, :2]), r"greedy_reward .*got \(2,\)"),
        (lambda: losses.length_adaptive_lam(GROUP, alpha=0.0), "alpha must be positive, got 0.0"),
        (lambda: losses.reinforce_pp_advantage(STEP, MASK, gamma=2.0), r"gamma .*got 2.0"),
        (lambda: losses.top_entropy(STEP, MASK, share=0.0), r"share .*got 0.0"),
        (lambda: losses.top_entropy(STEP[:1], MASK), r"mask .*entropy \(1, 7\), got \(4, 7\)"),
        (lambda: losses.entropy_threshold(STEP, STEP, share=0.5), "mask must be bool"),
        (lambda: losses.drop_truncated(MASK, MASK[:, :1]), r"truncated .*got \(4, 1\)"),
        (lambda: losses.drop_truncated(MASK, GROUP), "truncated must be bool, got torch.int64"),
        (lambda: losses.drop_truncated(STEP, MASK[:, 0]), "mask must be bool .*torch.float32"),
        (lambda: losses.drop_small_advantages(STEP[:, 0], MASK, threshold=0.1), r"\(4,\) and"),
        (lambda: losses.drop_small_advantages(STEP, STEP, threshold=0.1), "torch.float32"),
        (lambda: losses.drop_small_advantages(STEP, MASK, threshold=NAN), "threshold .*got nan"),
        (lambda: losses.last_step_reward(STEP[:1, 0], MASK), r"reward must be \[N\].*\(1,\)"),
        (lambda: losses.last_step_reward(STEP[:, 0], STEP), "mask bool .*got .*torch.float32"),
        (lambda: losses.subtract_kl(STEP, STEP, STEP[:1], MASK, coef=0.1), r"ref_.*got \(1, 7\)"),
        (lambda: losses.subtract_kl(STEP, STEP, STEP, MASK, coef=NAN), "coef .*got nan"),
        (lambda: losses.kl_estimate(STEP, STEP[:1], "k3"), r"ref_log_prob .*got \(1, 7\)"),
        (lambda: losses.full_kl(STEP, STEP[:1]), r"ref_log_probs .*got \(1, 7\)"),
        (lambda: losses.combine_rewards(STEP[:, :0]), r"F at least 1, got \(4, 0\)"),
        (lambda: losses.combine_rewards(STEP[:, :1], [NAN]), r"weights .*finite, got \[nan\]"),
        (lambda: losses.gdpo_advantage(STEP[:, :0], GROUP), r"F at least 1, got \(4, 0\)"),
        (lambda: group_advantage(STEP[:, 0], GROUP - 1), "group .*from zero, got -1"),
        (lambda: group_advantage(STEP[:, 0] + math.inf, GROUP), "reward .*finite.* got inf at 0"),
        (lambda: losses.informative(STEP[:, 0] - math.inf, GROUP), "reward .*got -inf at 0"),
        (lambda: losses.opo_advantage(STEP[:, 0], GROUP, GROUP[:1]), r"length .*got \(1,\)"),
        (lambda: losses.opo_advantage(STEP[:, 0], GROUP, GROUP - 1), "length .*negative, got -1"),
        (lambda: losses.reinforce_pp_advantage(STEP, MASK[0]), r"mask .*\(4, 7\), got \(7,\)"),
        (lambda: losses.reinforce_pp_advantage(STEP, STEP), "mask must be bool"),
        (lambda: losses.discounted_return(STEP, MASK[0], gamma=0.9), r"done .*got \(7,\)"),
        (lambda: losses.discounted_return(STEP, STEP, gamma=0.9), "done must be bool"),
        (lambda: losses.discounted_return(STEP[0, 0], MASK[0, 0], gamma=0.9), "got a scalar"),
        (lambda: gae(STEP, STEP, STEP, MASK, MASK, gamma=NAN, lam=1.0), "gamma .*got nan"),
        (lambda: gae(STEP, STEP, STEP, MASK, MASK, gamma=1.0, lam="1"), "lam .*got '1'"),
        (lambda: gae(STEP, STEP, STEP, MASK, MASK, gamma=1.0, lam=RAMP), "lam is a schedule"),
        (lambda: gae(STEP, STEP, STEP, MASK, MASK, gamma=1.0, lam=STEP[:, 0]), r"lam .*\(4,\)"),
        (lambda: losses.whiten(STEP, MASK[:, :1]), r"mask .*\(4, 7\), got \(4, 1\)"),
        (lambda: losses.whiten(STEP, STEP), "mask must be bool"),
        (lambda: losses.whiten(STEP, eps=-1.0), "eps must not be negative, got -1.0"),
        (lambda: value_loss(STEP, STEP, STEP, clip=-1.0), "clip must be positive .*got -1.0"),
        (lambda: value_loss(STEP, STEP, STEP, clip=NAN), "clip must be positive .*got nan"),
        (lambda: value_loss(STEP, None, STEP, scale=0.0), "scale must be positive, got 0.0"),
        (lambda: value_loss(GROUP, None, GROUP), "value must be float .*got torch.int64"),
        (lambda: value_loss(STEP, None, STEP, aggregation="constant"), "horizon .*required"),
        (lambda: value_loss(STEP, None, STEP, denominator=2), "a scalar tensor, got 2"),
        (lambda: losses.explained_variance(STEP, STEP[0]), r"value .*\(7,\), got \(4, 7\)"),
        (lambda: select_steps(STEP, STEP[:1], STEP, objective=CLIP_COV), r"old_.*got \(1, 7\)"),
        (lambda: select_steps(STEP, STEP, STEP, STEP, objective=CLIP_COV), "mask must be bool"),
        (lambda: select_steps(STEP, STEP, STEP, objective=dapo()), "got Algorithm"),
    ],
)  # fmt: skip
def test_errors_name_argument_value_and_expectation(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_values_are_checked_once_per_batch_not_in_the_loss():
    bad = STEP.clone()
    bad[2, 3] = torch.nan
    check_finite(MASK, advantage=STEP, reward=None)
    check_finite(torch.zeros_like(MASK), advantage=bad)
    with pytest.raises(ValueError, match=r"advantage must be finite .*1 values .*\(2, 3\)"):
        check_finite(MASK, advantage=bad)


def test_a_final_state_ends_its_trajectory_without_done():
    reward, value = torch.ones(1, 3), torch.zeros(1, 3)
    final = torch.tensor([[False, True, False]])
    none = torch.zeros_like(final)
    settings = {"gamma": 0.9, "lam": 0.5}
    with_done = gae(reward, value, value, final, final, **settings)
    without = gae(reward, value, value, final, none, **settings)
    assert torch.equal(with_done[0], without[0])


def test_nan_is_not_hidden():
    assert losses.full_kl(torch.tensor([[math.nan, 0.0]]), torch.zeros(1, 2)).isnan().all()


def test_whole_numbers_keep_their_fractions():
    whole = torch.tensor([[1, 2], [3, 4]])
    assert losses.combine_rewards(whole, [0.5, 0.25]).tolist() == [1.0, 2.5]
    assert losses.remax_advantage(whole[0], whole[1]).dtype == torch.float32
    assert losses.explained_variance(whole[0], whole[1]).item() == 1.0


def test_nothing_to_reward():
    empty = torch.zeros(2, 0, dtype=torch.bool)
    assert losses.last_step_reward(torch.ones(2), empty).shape == (2, 0)
    assert losses.drop_truncated(empty, torch.zeros(2, dtype=torch.bool)).shape == (2, 0)
    assert losses.explained_variance(torch.zeros(0), torch.zeros(0)).isnan()


def test_a_controller_never_turns_the_penalty_round():
    controller = AdaptiveKl(value=1.0, target=0.1, horizon=100)
    controller.observe(0.0, 10_000)
    assert controller.value == 0.5


def test_the_state_of_another_controller_is_refused():
    algorithm = losses.grpo(kl_coef=AdaptiveKl())
    with pytest.raises(ValueError, match=r"saved state \['value'\] of .*kl_coef .*AdaptiveKl"):
        losses.load_states(algorithm, {"objective.kl_coef": {"value": 0.1}})


@pytest.mark.parametrize(
    "rule",
    [
        Reweight(level="sequence"),
        Reject(level="geometric"),
        RejectDivergent(limit=0.1),
        OffPolicyMask(threshold=0.1),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_corrections_by_sequence_need_sequences(rule):
    """On [B] they would pool over the batch."""
    step = torch.zeros(4)
    with pytest.raises(ValueError, match=r"needs steps \[B, T\], got log_prob \(4,\)"):
        policy_loss(
            step,
            step,
            step,
            behavior_log_prob=step,
            objective=Objective(surrogate=Clip(), corrections=(rule,)),
        )

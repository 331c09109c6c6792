"""Tiny inputs on which other libraries return NaN, infinity or no gradient."""

import math
from dataclasses import replace

import pytest
import torch
from golden import load
from parity.values import Fixed
from tensordict import TensorDict

from polopt.losses import (
    Clip,
    Objective,
    Plain,
    Reject,
    group_advantage,
    gspo,
    informative,
    kl_estimate,
    length_adaptive_lam,
    opo_advantage,
    policy_loss,
    ppo,
    whiten,
)
from polopt.losses.modules import PolicyLoss

TRAPS = load("traps")["traps"]
TITLES = [trap["title"] for trap in TRAPS]
LOSSES = [t for t in TRAPS if "inputs" in t]
DIVERGENCES = [t for t in TRAPS if t["title"].startswith("k3")]
CONSTANT = [t for t in TRAPS if t["title"].startswith("zero variance")]
WHITENING = [t for t in TRAPS if t["title"].startswith("advantage whitening")]
ENTROPIES = [t for t in TRAPS if t["title"].startswith("entropy")]
SINGLE = (
    "group of 1",
    "how many of the 99 rewards",
    "one NaN reward",
    "verl's DAPO filter",
    "verl IcePop",
    "verl RS token_k1",
    "VAPO lambda",
)


def by_title(start: str):
    return next(t for t in TRAPS if t["title"].startswith(start))


def test_every_trap_is_here():
    groups = [LOSSES, DIVERGENCES, CONSTANT, WHITENING, ENTROPIES, [by_title(s) for s in SINGLE]]
    assert sorted(t["title"] for group in groups for t in group) == sorted(TITLES)


def ids(traps):
    return [t["title"].split(":")[0] for t in traps]


# --- policy losses ----------------------------------------------------------
FAR = math.exp(20.0)
# Loss and gradient of PPO's clip at 0.2, by hand: three steps, the first of ratio e^±100.
BY_HAND = {
    "ratio overflow, A>0": (-(1.2 + 2) / 3, [0.0, -1 / 3, -1 / 3]),
    "ratio overflow, A<0": ((FAR + 2) / 3, [FAR / 3, 1 / 3, 1 / 3]),
    "ratio overflow, A=0": (0.0, [0.0, 0.0, 0.0]),
    "log-ratio -100": ((0.8 + 2) / 3, [0.0, 1 / 3, 1 / 3]),
    "NaN": (-(math.exp(0.1) + 1) / 2, [-math.exp(0.1) / 2, -1 / 2, 0.0]),
    "-inf log-prob at a masked": (-(math.exp(0.1) + 1) / 2, [-math.exp(0.1) / 2, -1 / 2, 0.0]),
    "-inf CURRENT": ((math.exp(0.1) + 1 + 0.8) / 3, [math.exp(0.1) / 3, 1 / 3, 0.0]),
    "same in fp32": (-0.995252669, [-0.333233386, -0.332002699, -0.330016613]),
    "bf16": (-(2 + math.exp(-1 / 64)) / 3, [-1 / 3, -1 / 3, -math.exp(-1 / 64) / 3]),
}


@pytest.mark.parametrize("trap", LOSSES, ids=ids(LOSSES))
def test_loss_and_gradient_are_finite_and_right(trap):
    expected, gradient = next(v for k, v in BY_HAND.items() if trap["title"].startswith(k))
    x = {k: v if k == "mask" else v.to(getattr(torch, trap["dtype"])) for k, v in
         trap["inputs"].items()}  # fmt: skip
    log_prob = x.pop("log_prob").requires_grad_()
    # One sequence: its mean is that over steps.
    for aggregation in ("token_mean", "sequence_mean"):
        objective = Objective(surrogate=Clip(low=0.2, high=0.2), aggregation=aggregation)
        out = policy_loss(log_prob, **x, objective=objective)
        (grad,) = torch.autograd.grad(out["loss_objective"], log_prob)
        assert all(v.isfinite() for v in out.values()), out
        assert out["loss_objective"].item() == pytest.approx(expected, rel=1e-5)
        tolerance = (
            {"rtol": 1e-2, "atol": 0.0}
            if grad.dtype == torch.bfloat16
            else {"rtol": 1e-5, "atol": 1e-7}
        )
        torch.testing.assert_close(grad.float(), torch.tensor([gradient]), **tolerance)


@pytest.mark.parametrize("trap", LOSSES[:3], ids=ids(LOSSES[:3]))
def test_dual_clip_bounds_the_loss(trap):
    log_prob = trap["inputs"]["log_prob"].clone().requires_grad_()
    x = {k: v for k, v in trap["inputs"].items() if k != "log_prob"}
    out = policy_loss(log_prob, **x, objective=ppo(dual=3.0).objective)
    assert out["loss_objective"].abs() <= (3.0 + 2.0) / 3 + 1e-6


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_sum"])
def test_far_step_of_negative_advantage_is_pulled_back(level):
    """Log-ratio 25: the bounded ratio, and a gradient that is not zero."""
    log_prob = torch.full((1, 2), -1.0, requires_grad=True)
    old = torch.full((1, 2), -26.0)
    objective = Objective(surrogate=Clip(), ratio=level, aggregation="sequence_mean")
    out = policy_loss(log_prob, old, -torch.ones(1, 2), objective=objective)
    (grad,) = torch.autograd.grad(out["loss_objective"], log_prob)
    assert out["loss_objective"].item() == pytest.approx(FAR, rel=1e-4)
    share = 1.0 if level == "sequence_sum" else 0.5
    torch.testing.assert_close(grad, torch.full((1, 2), FAR * share), rtol=1e-4, atol=0.0)
    assert out["kl_approx"].item() == pytest.approx(FAR - 21, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ratios_of_whole_answers_keep_their_digits(dtype):
    """A thousand tokens, ratios near one: sums of log-probabilities must not cancel."""
    g = torch.Generator().manual_seed(0)
    old = (-3.0 * torch.rand(2, 1000, generator=g)).to(dtype)
    new = old + (1e-2 * torch.randn(2, 1000, generator=g)).to(dtype)
    exact = (new.double() - old.double()).sum(-1).exp().mean()
    for level, expected in [("sequence_sum", exact), ("sequence", None)]:
        objective = replace(gspo().objective, ratio=level)
        out = policy_loss(new, old, torch.ones_like(new), torch.ones(2, 1000, dtype=torch.bool),
                          objective=objective)  # fmt: skip
        if expected is None:
            expected = (new.double() - old.double()).mean(-1).exp().mean()
        assert out["ratio_mean"].item() == pytest.approx(expected.item(), rel=1e-5)


# --- divergences ------------------------------------------------------------
@pytest.mark.parametrize("trap", DIVERGENCES, ids=[t["title"] for t in DIVERGENCES])
def test_k3_is_finite_and_its_gradient_lives(trap):
    gap = float(trap["title"].partition("=")[2])
    log_prob = torch.zeros(1, requires_grad=True)
    kl = kl_estimate(log_prob, torch.tensor([gap]), "k3")
    (grad,) = torch.autograd.grad(kl.sum(), log_prob)
    bounded = math.exp(min(gap, 20.0))
    torch.testing.assert_close(kl.detach(), torch.tensor([bounded - 1.0 - gap]))
    torch.testing.assert_close(grad, torch.tensor([1.0 - bounded]))
    # Straight-through: the value of k3, the gradient of k2.
    (grad,) = torch.autograd.grad(kl_estimate(log_prob, torch.tensor([gap]), "k3+").sum(), log_prob)
    torch.testing.assert_close(grad, torch.tensor([-gap]))


# --- advantages -------------------------------------------------------------
@pytest.mark.parametrize("settings", [
    {}, {"scale": "none"}, {"scale": "batch"}, {"baseline": "leave_one_out", "scale": "none"},
    {"eps": 0.0}, {"scale": "batch", "eps": 0.0},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equal_rewards_give_exactly_zero(settings, dtype):
    rewards = {"1.0 x4": [1.0] * 4, "0.85 x3": [0.85] * 3, "0.35 x13": [0.35] * 13,
               "1e4+0.1 x6": [1e4 + 0.1] * 6}  # fmt: skip
    assert all(any(name in t["title"] for t in CONSTANT) for name in rewards)
    for reward in rewards.values():
        reward = torch.tensor(reward, dtype=dtype)
        group = torch.zeros(len(reward), dtype=torch.long)
        assert group_advantage(reward, group, **settings).tolist() == [0.0] * len(reward)
        length = torch.arange(1, len(reward) + 1)
        assert opo_advantage(reward, group, length).tolist() == [0.0] * len(reward)
        assert informative(reward, group).tolist() == [False]


@pytest.mark.parametrize(
    "size", [int(n) for n in by_title("how many of the 99 rewards")["results"]]
)
def test_no_reward_rounds_into_signal(size):
    reward = (torch.arange(1, 100) / 100).repeat_interleave(size)
    group = torch.arange(99).repeat_interleave(size)
    assert not group_advantage(reward, group).any()
    assert not informative(reward, group).any()


def test_group_of_one_has_nothing_to_compare_with():
    reward, group = torch.tensor([1.0, 0.0]), torch.tensor([0, 1])
    for settings in ({}, {"scale": "none"}, {"baseline": "leave_one_out", "scale": "none"}):
        assert group_advantage(reward, group, **settings).tolist() == [0.0, 0.0]


def test_missing_reward_leaves_its_group_whole():
    trap = by_title("one NaN reward")["results"]["TRL grpo group (its expression)"]["adv"]
    reward, group = torch.tensor([1.0, torch.nan, 0.0, 1.0]), torch.zeros(4, dtype=torch.long)
    torch.testing.assert_close(group_advantage(reward, group, eps=1e-4), trap)
    others = group_advantage(reward[[0, 2, 3]], group[:3])
    assert group_advantage(reward, group)[[0, 2, 3]].tolist() == others.tolist()
    gone = torch.full((3,), torch.nan)
    assert group_advantage(gone, group[:3]).tolist() == [0.0, 0.0, 0.0]


def test_dynamic_sampling_compares_exactly():
    for text in by_title("verl's DAPO filter")["results"]:
        reward = torch.tensor(eval(text, {}), dtype=torch.float64)
        assert not informative(reward, torch.zeros(len(reward), dtype=torch.long)).any()
    assert informative(torch.tensor([0.1, 0.1, 0.2]), torch.zeros(3, dtype=torch.long)).all()


@pytest.mark.parametrize("trap", WHITENING, ids=[t["title"] for t in WHITENING])
def test_whitening(trap):
    count = int(trap["title"].split(" ")[3])
    x, mask = torch.tensor([[1.0, 2.0, 4.0, 6.0]]), (torch.arange(4) < count)[None]
    white = whiten(x, mask)
    assert not white[~mask].any()
    if count > 1:
        torch.testing.assert_close(white[mask], trap["results"]["verl"]["y"][mask])
    else:
        assert white.tolist() == [[0.0] * 4]


def test_lambda_stays_in_the_unit_interval():
    for length, expected in by_title("VAPO lambda")["results"].items():
        got = length_adaptive_lam(torch.tensor([int(length)]), alpha=0.05).item()
        assert got == pytest.approx(max(expected, 0.0), abs=1e-6)
    assert length_adaptive_lam(torch.tensor([0])).item() == 0.0


# --- entropies and corrections ----------------------------------------------
@pytest.mark.parametrize("trap", ENTROPIES, ids=[t["peer"] for t in ENTROPIES])
def test_entropy_with_an_impossible_action(trap):
    logits = torch.tensor([[0.0, 1.0, -torch.inf]], requires_grad=True)
    loss = PolicyLoss(Objective(surrogate=Plain(), ratio="none", entropy_coef=1.0), Fixed())
    inputs = {"logits": logits, "action": torch.tensor([1]), "advantage": torch.zeros(1)}
    out = loss(TensorDict(inputs, batch_size=[1]))
    (grad,) = torch.autograd.grad(-out["loss_entropy"], logits)
    assert out["entropy"].item() == pytest.approx(0.5822031, rel=1e-6)
    torch.testing.assert_close(grad, torch.tensor([[0.196611926, -0.196611941, 0.0]]))


def test_everything_rejected_is_zero_not_an_error():
    log_prob = torch.full((2, 3), -1.0, requires_grad=True)
    objective = Objective(surrogate=Clip(), corrections=(Reject(low=0.9, high=1.1),))
    out = policy_loss(log_prob, torch.full((2, 3), -1.0), torch.ones(2, 3), objective=objective,
                      behavior_log_prob=torch.full((2, 3), -3.0))  # fmt: skip
    (grad,) = torch.autograd.grad(out["loss_objective"], log_prob)
    assert out["loss_objective"].item() == out["correction_mean"].item() == 0.0
    assert not grad.any()


def test_rejection_bounds_are_on_the_ratio_itself():
    ratio = torch.tensor([[3.0, 0.25]])
    rule = Reject(low=0.5, high=5.0, weigh=False)
    zero = torch.zeros(1, 2)
    keep = rule(zero, ratio.log(), zero, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
    assert keep.tolist() == [[1.0, 0.0]]  # verl's are the inverse: [[0, 1]]

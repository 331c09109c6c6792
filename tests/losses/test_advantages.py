"""Advantages: definitions, order, groups, missing rewards, and batches that are cut."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polopt.losses import (
    discounted_return,
    gae,
    gdpo_advantage,
    gpg_advantage,
    group_advantage,
    last_step_reward,
    moments_of,
    opo_advantage,
    pass_at_k_advantage,
    reinforce_pp_advantage,
    remax_advantage,
    subtract_kl,
    whiten,
)

F64 = torch.float64


def tensor(*values, dtype=F64):
    return torch.tensor(values, dtype=dtype)


# --- along time -------------------------------------------------------------
def gae_by_loop(reward, value, following, terminated, done, gamma, lam):
    """The definition, step by step."""
    advantage = torch.zeros_like(reward)
    ahead = reward.new_zeros(reward.shape[:-1])
    for t in reversed(range(reward.shape[-1])):
        delta = reward[..., t] + gamma * following[..., t] * ~terminated[..., t] - value[..., t]
        ahead = delta + gamma * lam * ahead * ~done[..., t]
        advantage[..., t] = ahead
    return advantage


@given(
    rows=st.integers(1, 4), steps=st.integers(0, 40), seed=st.integers(0, 2**31),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]), lam=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
)  # fmt: skip
def test_gae_is_its_definition(rows, steps, seed, gamma, lam):
    g = torch.Generator().manual_seed(seed)
    reward, value, following = torch.randn(3, rows, steps, generator=g, dtype=F64)
    done = torch.rand(rows, steps, generator=g) < 0.2
    terminated = done & (torch.rand(rows, steps, generator=g) < 0.5)
    following[terminated] = torch.nan  # the value of a final state is never looked at
    args = (reward, value, following, terminated, done)
    expected = gae_by_loop(
        *(a.nan_to_num() if a.is_floating_point() else a for a in args), gamma, lam
    )
    advantage, target = gae(*args, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantage, expected)
    torch.testing.assert_close(target, expected + value)
    other, target = gae(*args, gamma=gamma, lam=lam, target_lam=1.0)
    assert torch.equal(other, advantage)
    whole = gae_by_loop(*(a.nan_to_num() if a.is_floating_point() else a for a in args), gamma, 1.0)
    torch.testing.assert_close(target, whole + value)
    per_row = torch.rand(rows, 1, generator=g, dtype=F64)
    advantage, _ = gae(*args, gamma=gamma, lam=per_row)
    for i in range(rows):
        one, _ = gae(*(a[i] for a in args), gamma=gamma, lam=per_row[i].item())
        torch.testing.assert_close(advantage[i], one)


def test_truncation_bootstraps_and_termination_does_not():
    reward, value = torch.ones(1, 4), torch.full((1, 4), 10.0)
    cut = torch.tensor([[False, True, False, False]])
    never = torch.zeros_like(cut)
    advantage, _ = gae(reward, value, value, never, cut, gamma=1.0, lam=1.0)
    assert advantage.tolist() == [[2.0, 1.0, 2.0, 1.0]]
    advantage, _ = gae(reward, value, value, cut, cut, gamma=1.0, lam=1.0)
    assert advantage.tolist() == [[-8.0, -9.0, 2.0, 1.0]]


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_types_of_results(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    x = torch.ones(2, 3, dtype=dtype)
    flag = torch.zeros(2, 3, dtype=torch.bool)
    group = torch.tensor([0, 0])
    results = [
        *gae(x, x, x, flag, flag, gamma=0.9, lam=0.9),
        discounted_return(x, flag, gamma=0.9),
        whiten(x),
        group_advantage(x[:, 0], group),
        group_advantage(x[:, 0], group, scale="batch"),
        opo_advantage(x[:, 0], group, torch.tensor([1, 2])),
        pass_at_k_advantage(x[:, 0], group, scale=True),
        gdpo_advantage(x, group),
        gpg_advantage(x[:, 0], group),
        subtract_kl(x, x, x, ~flag, coef=0.1),
    ]
    assert {r.dtype for r in results} == {wide}


@given(cuts=st.lists(st.integers(0, 12), max_size=3), seed=st.integers(0, 2**31))
def test_whitening_is_that_of_the_whole(cuts, seed):
    """Moments add up over micro-batches and ranks; padding does not count."""
    g = torch.Generator().manual_seed(seed)
    x = 5.0 + torch.randn(12, 4, generator=g, dtype=F64)
    mask = torch.rand(12, 4, generator=g) < 0.7
    x = torch.where(mask, x, torch.nan)
    edges = [0, *sorted(cuts), 12]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    total = [sum(m) for m in zip(*(moments_of(x[p], mask[p]) for p in parts), strict=True)]
    white = torch.cat([whiten(x[p], mask[p], moments=tuple(total)) for p in parts])
    torch.testing.assert_close(white, whiten(x, mask))
    inside = white[mask]
    if len(inside) > 1:
        assert inside.mean().item() == pytest.approx(0.0, abs=1e-9)
        assert inside.std().item() == pytest.approx(1.0, rel=1e-6)


# --- groups -----------------------------------------------------------------
LENGTHS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
ESTIMATORS = {
    "grpo": lambda r, g, n: group_advantage(r, g),
    "dr_grpo": lambda r, g, n: group_advantage(r, g, scale="none"),
    "batch": lambda r, g, n: group_advantage(r, g, scale="batch"),
    "rloo": lambda r, g, n: group_advantage(r, g, baseline="leave_one_out", scale="none"),
    "opo": lambda r, g, n: opo_advantage(r, g, n),
    "pass_at_k": lambda r, g, n: pass_at_k_advantage(r, g),
    "pass_at_k scaled": lambda r, g, n: pass_at_k_advantage(r, g, scale=True),
    "gdpo": lambda r, g, n: gdpo_advantage(torch.stack([r, r.flip(0)], 1), g),
    "gpg": lambda r, g, n: gpg_advantage(r, g),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@given(
    reward=st.lists(st.sampled_from([0.0, 1.0, 0.85, -2.5, float("nan")]), min_size=8, max_size=8),
    group=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    order=st.permutations(range(8)),
)
def test_order_and_group_numbers_do_not_matter(name, reward, group, order):
    reward, group = torch.tensor(reward, dtype=F64), torch.tensor(group)
    if name == "gdpo":
        order = list(range(8))  # its second reward follows the order of the first
    estimate = ESTIMATORS[name]
    advantage = estimate(reward, group, LENGTHS)
    assert advantage.isfinite().all()
    assert not advantage[reward.isnan()].any() or name == "gdpo"
    shuffled = estimate(reward[order], group[order], LENGTHS[order])
    torch.testing.assert_close(shuffled, advantage[order])
    renamed = torch.tensor([2, 0, 3, 1])[group]
    torch.testing.assert_close(estimate(reward, renamed, LENGTHS), advantage)


@given(
    reward=st.lists(st.sampled_from([0.0, 1.0, 0.85, -2.5]), min_size=4, max_size=4),
    others=st.lists(st.sampled_from([0.0, 1.0, float("nan")]), min_size=4, max_size=4),
)
def test_groups_do_not_see_each_other(reward, others):
    """But for batch scale, which is meant to."""
    group = torch.tensor([0] * 4 + [1] * 4)
    for name in ("grpo", "dr_grpo", "rloo", "opo", "pass_at_k"):
        alone = ESTIMATORS[name](torch.tensor(reward, dtype=F64), group[:4], LENGTHS[:4])
        both = ESTIMATORS[name](torch.tensor(reward + others, dtype=F64), group, LENGTHS)
        torch.testing.assert_close(both[:4], alone, msg=lambda m, n=name: f"{n}: {m}")


def test_by_hand():
    reward, group = tensor(1.0, 0.0, 0.0, 5.0), torch.tensor([0, 0, 0, 1])
    third = 1 / 3
    torch.testing.assert_close(
        group_advantage(reward, group, scale="none"), tensor(2 * third, -third, -third, 0.0)
    )
    torch.testing.assert_close(
        group_advantage(reward, group, baseline="leave_one_out", scale="none"),
        tensor(1.0, -0.5, -0.5, 0.0),
    )
    deviation = (1.0 / 3.0) ** 0.5  # with n − 1
    torch.testing.assert_close(
        group_advantage(reward, group, eps=0.0)[:3],
        tensor(2 * third, -third, -third) / deviation,
    )
    # (1·2 + 0·1 + 0·1) / 4 = ½.
    opo = opo_advantage(reward, group, torch.tensor([2, 1, 1, 7]))
    torch.testing.assert_close(opo, tensor(0.5, -0.5, -0.5, 0.0))
    best = pass_at_k_advantage(tensor(3.0, 1.0, 0.0, 2.0, 2.0), torch.tensor([0, 0, 0, 1, 1]))
    assert best.tolist() == [2.0, 0.0, 0.0, 0.0, 0.0]
    assert remax_advantage(tensor(1.0, 0.0), tensor(0.25, 0.25)).tolist() == [0.75, -0.25]
    # Two groups, one without signal: α = 2.
    gpg = gpg_advantage(tensor(1.0, 0.0, 1.0, 1.0), torch.tensor([0, 0, 1, 1]))
    assert gpg.tolist() == [1.0, -1.0, 0.0, 0.0]
    both = gdpo_advantage(tensor(0.0, 2.0, 0.0, 20.0).view(2, 2), torch.zeros(2).long(), eps=0.0)
    scaled = 1 / 2**0.5
    torch.testing.assert_close(both, tensor(0.0, 0.0) + tensor(-scaled, scaled))


def test_return_to_go_is_carried_over_untrained_tokens():
    mask = torch.tensor([[1, 0, 0, 1, 1, 0]]).bool()
    reward = last_step_reward(tensor(8.0), mask)
    assert reward.tolist() == [[0.0, 0.0, 0.0, 0.0, 8.0, 0.0]]
    ahead = reinforce_pp_advantage(reward, mask, gamma=0.5)
    assert ahead.tolist() == [[2.0, 0.0, 0.0, 4.0, 8.0, 0.0]]
    poisoned = torch.where(mask, reward, torch.nan)
    assert torch.equal(reinforce_pp_advantage(poisoned, mask, gamma=0.5), ahead)
    assert torch.equal(reinforce_pp_advantage(poisoned, mask), (ahead > 0) * 8.0)


def test_divergence_in_the_reward_ignores_padding():
    mask = torch.tensor([[True, True, False]])
    poison = tensor(torch.nan)
    new = torch.cat([tensor(-1.0, -2.0), poison])[None]
    ref = torch.cat([tensor(-1.5, -2.0), poison])[None]
    reward = torch.cat([tensor(0.0, 1.0), poison])[None]
    out = subtract_kl(reward, new, ref, mask, coef=0.1)
    torch.testing.assert_close(out, tensor(-0.05, 1.0, 0.0)[None])

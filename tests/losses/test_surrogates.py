"""Surrogates, values and corrections by hand, on the steps where a rule changes its mind."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polopt.losses import (
    Cispo,
    Clip,
    ClipCov,
    GeometricClip,
    KlCov,
    KlPenalty,
    Linear,
    OffPolicyMask,
    Plain,
    Reject,
    RejectDivergent,
    Reweight,
    SoftGate,
    drop_small_advantages,
    drop_truncated,
    entropy_threshold,
    explained_variance,
    ppo,
    resolve,
    top_entropy,
    value_loss,
)

LOG_PROB = -0.7


def by_ratio(surrogate, ratio, advantage):
    """Return loss, gradient in the log-probability, and whether it was clipped."""
    log_prob = torch.tensor([LOG_PROB], dtype=torch.float64, requires_grad=True)
    log_ratio = log_prob - (LOG_PROB - math.log(ratio))
    args = (log_ratio, torch.tensor([advantage], dtype=torch.float64), log_prob, None)
    loss, clipped = surrogate(*args)
    (grad,) = torch.autograd.grad(loss.sum(), log_prob)
    return loss.item(), grad.item(), clipped.item()


def sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


HIGHER = Clip(low=0.2, high=0.28)
DUAL = Clip(low=0.2, high=0.28, dual=3.0)
GATE = math.exp(0.7)


@pytest.mark.parametrize(
    ("surrogate", "ratio", "advantage", "expected"),
    [
        (HIGHER, 1.0, 2.0, (-2.0, -2.0, False)),
        (HIGHER, 1.5, 1.0, (-1.28, 0.0, True)),
        (HIGHER, 0.5, 1.0, (-0.5, -0.5, False)),  # moved the wrong way: pulled back
        (HIGHER, 1.5, -1.0, (1.5, 1.5, False)),  # likewise
        (HIGHER, 0.5, -1.0, (0.8, 0.0, True)),
        (HIGHER, 1.25, 1.0, (-1.25, -1.25, False)),
        (DUAL, 5.0, -1.0, (3.0, 0.0, True)),
        (DUAL, 2.0, -1.0, (2.0, 2.0, False)),
        (DUAL, 5.0, 1.0, (-1.28, 0.0, True)),
        (Cispo(high=0.28), 1.5, 1.0, (-1.28 * LOG_PROB, -1.28, True)),
        (Cispo(high=0.28), 1.2, -1.0, (1.2 * LOG_PROB, 1.2, False)),
        (Cispo(high=0.28), 0.1, 1.0, (-0.1 * LOG_PROB, -0.1, False)),
        (Cispo(low=0.2, high=0.28), 0.1, 1.0, (-0.8 * LOG_PROB, -0.8, True)),
        (SoftGate(), 1.0, 1.0, (-2.0, -1.0, False)),
        (SoftGate(), 1.5, 1.0, (-4 * sigmoid(0.5), -4 * sigmoid(0.5) * sigmoid(-0.5) * 1.5, False)),
        (
            SoftGate(tau_negative=2.0),
            1.5,
            -1.0,
            (2 * sigmoid(1.0), 4 * sigmoid(1.0) * sigmoid(-1.0) * 1.5, False),
        ),
        (KlPenalty(coef=0.5), 1.5, 1.0, (-1.5 + 0.5 * (0.5 - math.log(1.5)), -1.5 + 0.25, False)),
        (Plain(), 1.0, 2.0, (-2.0 * LOG_PROB, -2.0, False)),
    ],
)
def test_by_hand(surrogate, ratio, advantage, expected):
    assert by_ratio(surrogate, ratio, advantage) == pytest.approx(expected)


def test_geometric_mean_clips_each_token_first():
    """Log-ratios 1 and −0.1 under A > 0: the first counts as 0.4."""
    log_ratio = torch.tensor([[1.0, -0.1, 9.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    advantage = torch.full((1, 3), 2.0, dtype=torch.float64)
    loss, clipped = GeometricClip(low=0.4, high=0.4)(log_ratio, advantage, log_ratio, mask)
    mean = math.exp((0.4 - 0.1) / 2)
    assert loss[0, :2].tolist() == pytest.approx([-2.0 * mean] * 2)
    assert clipped[0, :2].tolist() == [True, False]
    (grad,) = torch.autograd.grad(loss[0, 0], log_ratio)
    assert grad[0].tolist() == pytest.approx([0.0, -2.0 * mean / 2, 0.0])


def test_covariance_rules_pick_what_they_say():
    log_prob = torch.tensor([[0.0, -1.0, -2.0, -3.0]], dtype=torch.float64)
    advantage = torch.tensor([[3.0, 1.0, -1.0, -3.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, True]])
    zero = torch.zeros_like(log_prob)
    # (log π − mean)·(A − mean): 1.5·3, 0.5·1, 0.5·1, 1.5·3.
    args = (zero, advantage, log_prob, mask)
    assert ClipCov(share=1.0, cov_low=1.0, cov_high=5.0).select(*args).tolist() == [
        [True, False, False, True]
    ]
    assert ClipCov(share=0.25, cov_low=1.0, cov_high=5.0).select(*args).sum() == 1
    assert ClipCov(share=1e-6, cov_low=1.0, cov_high=5.0).select(*args).sum() == 1
    assert not ClipCov(share=1.0, cov_low=5.0, cov_high=9.0).select(*args).any()
    chosen = KlCov(share=0.5).select(*args)
    assert chosen.tolist() == [[True, False, False, True]]
    loss, _ = KlCov(coef=2.0)(zero + 0.1, advantage, log_prob, mask, chosen)
    expected = -advantage * math.exp(0.1) + 0.2 * chosen
    torch.testing.assert_close(loss, expected)


# --- corrections ------------------------------------------------------------
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Reweight(high=2.0), [2.0, 0.5, 1.0]),
        (Reweight(high=2.0, low=0.8), [2.0, 0.8, 1.0]),
        (Reweight(level="sequence", high=9.0), [2.0] * 3),
        (Reweight(level="geometric", high=9.0), [2.0 ** (1 / 3)] * 3),
        (Reject(high=2.0), [0.0, 0.5, 1.0]),
        (Reject(high=5.0, low=0.6), [4.0, 0.0, 1.0]),
        (Reject(high=5.0, low=0.6, weigh=False), [1.0, 0.0, 1.0]),
        (Reject(level="sequence", high=1.5), [0.0] * 3),
        (Reject(level="geometric", high=1.5, weigh=False), [1.0] * 3),
        # k2 is log² / 2 (0.96, 0.24, 0), k3 is r − 1 − log r (1.61, 0.19, 0).
        (RejectDivergent(limit=0.9, kl="k2", pool="token"), [0.0, 1.0, 1.0]),
        (RejectDivergent(limit=1.7, kl="k3", pool="token"), [1.0, 1.0, 1.0]),
        (RejectDivergent(limit=1.7, kl="k3", pool="sum"), [0.0] * 3),
        (RejectDivergent(limit=0.61, kl="k3", pool="mean"), [1.0] * 3),
        (RejectDivergent(limit=0.59, kl="k3", pool="mean"), [0.0] * 3),
        (RejectDivergent(limit=1.6, kl="k3", pool="max"), [0.0] * 3),
    ],
)
def test_corrections_by_hand(rule, expected):
    """Ratios 4, ½ and 1."""
    old = torch.tensor([[4.0, 0.5, 1.0]], dtype=torch.float64).log()
    zero, mask = torch.zeros_like(old), torch.ones_like(old, dtype=torch.bool)
    got = rule(zero, old, zero, zero, mask).expand_as(old)
    assert got[0].tolist() == pytest.approx(expected)


def test_off_policy_mask_by_hand():
    behavior = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    log_prob = torch.tensor([[-0.3, -0.1], [-0.3, -0.1], [-0.1, -0.1]])
    advantage = torch.tensor([[-1.0], [1.0], [-1.0]])
    mask = torch.ones_like(log_prob, dtype=torch.bool)
    weight = OffPolicyMask(threshold=0.15)(log_prob, log_prob, behavior, advantage, mask)
    assert weight.expand_as(mask).tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


# --- values -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "settings", "loss", "gradient", "clipped"),
    [
        (2.0, {}, 0.5, 1.0, None),  # target 1, old 0
        (2.0, {"clip": 0.5}, 0.5, 1.0, 0.0),  # far beyond the target: the free error is larger
        (0.9, {"clip": 0.5}, 0.125, 0.0, 1.0),  # only a change of 0.5 is credited
        (0.4, {"clip": 0.5}, 0.18, -0.6, 0.0),
        (4.0, {"loss": "huber"}, 2.5, 1.0, None),
        (3.0, {"scale": 2.0}, 0.5, 0.5, None),
    ],
)
def test_value_loss_by_hand(value, settings, loss, gradient, clipped):
    value = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    out = value_loss(value, 0.0 * one, one, **settings)
    (grad,) = torch.autograd.grad(out["loss_critic"], value)
    assert out["loss_critic"].item() == pytest.approx(loss)
    assert grad.item() == pytest.approx(gradient)
    assert (out["value_clip_fraction"].item() if clipped is not None else None) == clipped


@given(
    seed=st.integers(0, 2**31), cut=st.integers(0, 5), right=st.integers(0, 2),
    aggregation=st.sampled_from(["token_mean", "sequence_mean"]),
    clip=st.sampled_from([None, 0.2]), loss=st.sampled_from(["mse", "huber"]),
)  # fmt: skip
def test_value_loss_is_invariant(seed, cut, right, aggregation, clip, loss):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(5, 4, generator=g) < 0.6
    x = torch.randn(3, 5, 4, generator=g, dtype=torch.float64)
    rows = mask.sum() if aggregation == "token_mean" else mask.any(-1).sum()

    def run(x, mask, denominator=None):
        value = x[0].clone().requires_grad_()
        out = value_loss(value, x[1], x[2], mask, clip=clip, loss=loss, aggregation=aggregation,
                         denominator=denominator)  # fmt: skip
        (grad,) = torch.autograd.grad(out["loss_critic"], value)
        return out["loss_critic"], grad

    whole, grad = run(x, mask)
    poisoned = torch.where(mask, x, torch.nan)
    wide = torch.nn.functional.pad(poisoned, (0, right), value=torch.inf)
    same, wide_grad = run(wide, torch.nn.functional.pad(mask, (0, right)))
    torch.testing.assert_close(same, whole)
    torch.testing.assert_close(wide_grad, torch.nn.functional.pad(grad, (0, right)))
    parts = [run(x[:, s], mask[s], rows) for s in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole)
    torch.testing.assert_close(torch.cat([g for _, g in parts]), grad)
    for dtype, rtol in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        low, low_grad = run(x.to(dtype), mask)
        exact, exact_grad = run(x.to(dtype).double(), mask)
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), exact, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(low_grad.double(), exact_grad, rtol=rtol, atol=rtol * 0.1)


def test_explained_variance():
    target = torch.tensor([1.0, 2.0, 3.0])
    assert explained_variance(target, target).item() == 1.0
    assert explained_variance(torch.full((3,), 2.0), target).item() == 0.0
    assert explained_variance(-target, target).item() == -3.0
    assert explained_variance(target, torch.ones(3)).isnan()
    mask = torch.tensor([True, True, False])
    poisoned = torch.tensor([1.0, 2.0, torch.nan])
    assert explained_variance(poisoned, target, mask).item() == 1.0


# --- selections -------------------------------------------------------------
def test_selections_become_part_of_the_mask():
    entropy = torch.tensor([[0.1, 0.9, 0.5, torch.nan], [0.7, 0.3, torch.nan, torch.nan]])
    mask = entropy.isfinite()
    assert entropy_threshold(entropy, mask, share=0.4).item() == pytest.approx(0.58)
    kept = top_entropy(entropy, mask, share=0.4)
    assert kept.tolist() == [[False, True, False, False], [True, False, False, False]]
    assert torch.equal(top_entropy(entropy, mask, share=1.0), mask)
    # A part of the batch with the threshold of the whole.
    threshold = entropy_threshold(entropy, mask, share=0.4)
    part = top_entropy(entropy[1:], mask[1:], share=0.4, threshold=threshold)
    assert torch.equal(part, kept[1:])
    assert not top_entropy(entropy, torch.zeros_like(mask)).any()
    cut = drop_truncated(mask, torch.tensor([True, False]))
    assert cut.sum(-1).tolist() == [0, 2]
    small = drop_small_advantages(torch.tensor([[0.0], [0.5]]), mask, threshold=0.1)
    assert small.sum(-1).tolist() == [0, 2]


def test_a_clip_may_end_at_zero():
    falling = ppo(clip=Linear(start=0.2, end=0.0, steps=10)).objective.surrogate
    log_ratio = torch.tensor([0.0, 0.1, -0.1], requires_grad=True)
    advantage = torch.ones(3)
    loss, clipped = resolve(falling, 10)(log_ratio, advantage, log_ratio, None)
    assert clipped.tolist() == [False, True, False]
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    # From an unmoved policy it learns, a gain is not credited, a loss is pulled back.
    torch.testing.assert_close(gradient, -torch.tensor([1.0, 0.0, math.exp(-0.1)]))

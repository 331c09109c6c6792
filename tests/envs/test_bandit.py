"""Bandits: what arms pay, and what a wrong one costs."""

import math

import pytest
import torch

from polopt.envs.bandit import bandit


@pytest.mark.parametrize(
    ("task", "deviation"),
    [
        (bandit(means=(0.2, 0.9)), (0.4, 0.3)),
        (bandit(means=(0.2, -3.0), reward="gaussian", deviation=2.0), (2.0, 2.0)),
    ],
)
def test_arms_pay_what_they_say(task, deviation):
    arms = torch.arange(2).repeat(20_000)
    paid = task.pull(arms, torch.Generator().manual_seed(0)).reshape(-1, 2)
    torch.testing.assert_close(paid.mean(0), torch.tensor(task.means), atol=0.05, rtol=0)
    torch.testing.assert_close(paid.std(0), torch.tensor(deviation), atol=0.03, rtol=0)


def test_gaps_and_the_bound_of_the_theorem():
    task = bandit(means=(0.5, 0.7, 0.7, 0.4))
    torch.testing.assert_close(task.gaps, torch.tensor([0.2, 0, 0, 0.3], dtype=torch.float64))
    wanted = 8 * math.log(100) * (1 / 0.2 + 1 / 0.3) + (1 + math.pi**2 / 3) * 0.5
    assert task.ucb1_bound(100) == pytest.approx(wanted)
    with pytest.raises(ValueError, match=r"the bound is for rewards within \[0, 1\]"):
        bandit(means=(0.1, 0.2), reward="gaussian").ucb1_bound(100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"means": (0.5,)}, r"means must name at least two arms, got \[0.5\]"),
        (
            {"means": (0.5, 1.5)},
            r"means of Bernoulli rewards must be in \[0, 1\], got \[0.5, 1.5\]",
        ),
        ({"means": (0.5, math.nan), "reward": "gaussian"}, "means must be finite"),
        ({"means": (0.5, 0.6), "deviation": 0.0}, "deviation must be positive and finite, got 0.0"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        bandit(**arguments)

"""The worked example of CONTRIBUTING.md works as it says."""

from pathlib import Path

import pytest
import torch

from polopt.launch.recipe import RecipeError, build
from polopt.losses import Algorithm, policy_loss

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def make(monkeypatch):
    """What `algorithm: {use: spo:spo, …}` builds in a recipe started in the folder."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return lambda **arguments: build({"use": "spo:spo", **arguments}, {}, "algorithm")


def gradient(objective, log_ratio, advantage):
    log_prob = torch.tensor([-1.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    terms = policy_loss(
        log_prob,
        torch.tensor([-1.0], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        objective=objective,
    )
    (slope,) = torch.autograd.grad(terms["loss_objective"], log_prob)
    return slope.item(), terms["loss_objective"].item()


def test_recipe_builds_it(make):
    algorithm = make(epsilon=0.1, gamma=0.9)
    assert isinstance(algorithm, Algorithm)
    assert algorithm.objective.surrogate.epsilon == 0.1
    assert algorithm.advantage.settings["gamma"] == 0.9
    assert algorithm.value is not None


@pytest.mark.parametrize("advantage", [1.5, -0.5])
def test_gradient(make, advantage):
    objective = make(epsilon=0.2).objective
    # On policy: the policy gradient, −A.
    assert gradient(objective, 0.0, advantage) == pytest.approx((-advantage, -advantage))
    # By hand: d/dlog r of |A|/(2ε)·(r − 1)² − r·A = r·(|A|/ε·(r − 1) − A).
    for log_ratio in (-0.5, 0.3):
        ratio = torch.tensor(log_ratio, dtype=torch.float64).exp().item()
        slope = ratio * (abs(advantage) / 0.2 * (ratio - 1.0) - advantage)
        assert gradient(objective, log_ratio, advantage)[0] == pytest.approx(slope)
    # Still at r = 1 ± ε, pulled back beyond.
    best = torch.tensor(1.2 if advantage > 0 else 0.8, dtype=torch.float64).log().item()
    assert gradient(objective, best, advantage)[0] == pytest.approx(0.0, abs=1e-12)
    outside = best * 3.0
    assert gradient(objective, outside, advantage)[0] * outside > 0.1


def test_messages(make):
    with pytest.raises(RecipeError, match=r"algorithm.*epsilon must be positive, got -1"):
        make(epsilon=-1.0)
    with pytest.raises(RecipeError, match=r"epsilom.*epsilon"):
        make(epsilom=0.1)

"""Actors that are normalising flows."""

import pytest
import torch

pytest.importorskip("torchrl")
pytest.importorskip("zuko")
from torchrl.envs.utils import ExplorationType, set_exploration_type

from polopt.envs.control import cartpole, mountain_car_continuous, pendulum
from polopt.ext.torchrl.flows import make_flow_actor
from polopt.ext.torchrl.networks import distribution_of


@pytest.fixture
def actor():
    torch.manual_seed(0)
    return make_flow_actor(pendulum().make(2, seed=0), hidden=(8,))


def bent(actor):
    """The actor with weights that bend the flow far from a normal distribution."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.7 * torch.randn_like(parameter))
    return actor


def test_it_begins_near_a_normal_distribution_over_the_range(actor) -> None:
    distribution = distribution_of(actor)(torch.randn(5, 3))
    actions = torch.linspace(-4.0, 4.0, 9).reshape(9, 1, 1).expand(9, 5, 1)
    normal = torch.distributions.Normal(0.0, 1.0).log_prob(actions).squeeze(-1)
    torch.testing.assert_close(distribution.log_prob(actions), normal, atol=0.1, rtol=0)
    assert distribution.mode.abs().max() < 0.1


def test_densities_integrate_to_one_and_match_the_draws(actor) -> None:
    observation = torch.randn(3, 3)
    distribution = distribution_of(bent(actor))(observation)
    grid = torch.linspace(-20.0, 20.0, 20_001)
    with torch.no_grad():
        density = distribution.log_prob(grid.reshape(-1, 1, 1).expand(-1, 3, 1)).exp()
    torch.testing.assert_close(
        torch.trapezoid(density, grid, dim=0), torch.ones(3), atol=2e-3, rtol=0
    )
    draws = distribution.sample((20_000,)).squeeze(-1)
    for level in (-1.0, 0.0, 1.0):
        below = torch.where(grid.unsqueeze(-1) <= level, density, 0.0).sum(0) * (grid[1] - grid[0])
        torch.testing.assert_close((draws <= level).float().mean(0), below, atol=0.02, rtol=0)
    # Not a normal distribution any more, and not the same one everywhere.
    deviation = draws.std(0)
    skewness = ((draws - draws.mean(0)) / deviation).pow(3).mean(0)
    assert skewness.abs().max() > 0.2
    # Half of the draws lie below the greedy action.
    half = (draws <= distribution.mode.squeeze(-1)).float().mean(0)
    torch.testing.assert_close(half, torch.full((3,), 0.5), atol=0.02, rtol=0)


def test_the_entropy_and_its_gradient_are_estimated_without_bias(actor) -> None:
    of, weights = distribution_of(bent(actor)), list(actor.parameters())
    observation = torch.tensor([[0.3, -0.8, 1.0]])
    grid = torch.linspace(-20.0, 20.0, 4001).reshape(-1, 1, 1)
    log_density = of(observation).log_prob(grid)
    exact = -torch.trapezoid(log_density.exp() * log_density, grid[:, 0], dim=0).sum()
    estimate = of(observation.expand(100_000, 3)).entropy().mean()
    torch.testing.assert_close(estimate, exact, atol=0.01, rtol=0)
    wanted, found = (
        torch.cat([g.flatten() for g in torch.autograd.grad(entropy, weights)])
        for entropy in (exact, estimate)
    )
    assert torch.nn.functional.cosine_similarity(wanted, found, dim=0) > 0.99
    assert (wanted - found).norm() < 0.1 * wanted.norm()


def test_actor_and_direct_path_agree(actor) -> None:
    env = pendulum().make(4, seed=0)
    start = env.reset()
    torch.manual_seed(5)
    with set_exploration_type(ExplorationType.RANDOM):
        out = actor(start.clone())
    torch.manual_seed(5)
    distribution = distribution_of(actor)(start["observation"])
    action = distribution.sample()
    torch.testing.assert_close(out["action"], action)
    torch.testing.assert_close(out["action_log_prob"], distribution.log_prob(action))


def test_every_weight_learns() -> None:
    actor = make_flow_actor(mountain_car_continuous().make(2, seed=0))
    distribution_of(actor)(torch.randn(7, 2)).log_prob(torch.full((7, 1), 0.5)).sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in actor.parameters())


def test_discrete_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="policy 'flow' needs bounded continuous actions"):
        make_flow_actor(cartpole().make(1, seed=0))

"""Exploration: the distribution of what is tried, its schedules, its range and its state."""

import math

import pytest
import torch

pytest.importorskip("torchrl")
from tensordict import TensorDict
from torchrl.data import Bounded
from torchrl.modules import AdditiveGaussianModule, EGreedyModule, OrnsteinUhlenbeckProcessModule

from polopt.ext.torchrl.exploration import (
    Boltzmann,
    EpsilonGreedy,
    Explorer,
    GaussianNoise,
    GumbelSoftmax,
    OrnsteinUhlenbeck,
    Ucb,
)
from polopt.losses import Exponential, Linear

LOW, HIGH = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 1.0])
N = 20_000


def noisy(rule, seed=0, **bounds):
    return Explorer(rule, **{"low": LOW, "high": HIGH, "seed": seed, **bounds})


def shares(actions, count):
    return actions.bincount(minlength=count) / len(actions)


@pytest.mark.parametrize(
    ("epsilon", "frames", "chance"),
    [
        (0.3, 0, 0.3),
        (Linear(start=1.0, end=0.1, steps=100), 50, 0.55),
        (Linear(start=1.0, end=0.1, steps=100), 500, 0.1),
        (Exponential(start=1.0, end=0.01, steps=100), 50, 0.1),
    ],
)
def test_epsilon_greedy_tries_any_action_with_probability_epsilon(epsilon, frames, chance):
    values = torch.tensor([0.0, 2.0, 1.0]).expand(N, 3)
    found = shares(Explorer(EpsilonGreedy(epsilon=epsilon), seed=0)(values, frames), 3)
    wanted = torch.full((3,), chance / 3)
    wanted[1] += 1 - chance
    torch.testing.assert_close(found, wanted, atol=0.012, rtol=0)


def test_boltzmann_follows_the_softmax_of_values():
    values, schedule = torch.tensor([0.0, 2.0, 1.0]), Linear(start=2.0, end=0.5, steps=100)
    explorer = Explorer(Boltzmann(temperature=schedule), seed=0)
    for frames, temperature in ((0, 2.0), (100, 0.5)):
        found = shares(explorer(values.expand(N, 3), frames), 3)
        torch.testing.assert_close(found, (values / temperature).softmax(0), atol=0.012, rtol=0)


def test_boltzmann_survives_large_values_and_low_temperatures():
    values = torch.tensor([1e30, -1e30, 9e29]).expand(50, 3)
    for temperature in (1e-30, 1e-300):  # which a float32 does not hold
        assert Explorer(Boltzmann(temperature=temperature), seed=0)(values, 0).eq(0).all()


def test_ucb_is_the_formula_of_the_paper_in_each_row():
    explorer = Explorer(Ucb())
    means = torch.tensor([[0.2, 0.5, 0.4], [0.9, 0.1, 0.1]])
    first = torch.stack([explorer(means, 0) for _ in range(3)])
    assert first.tolist() == [[0, 0], [1, 1], [2, 2]]  # everything once
    counts = [[1, 1, 1], [1, 1, 1]]
    for plays in range(3, 40):
        chosen = explorer(means, 0).tolist()
        for row in range(2):
            bounds = [
                means[row, a].item() + math.sqrt(2 * math.log(plays) / counts[row][a])
                for a in range(3)
            ]
            assert bounds[chosen[row]] == pytest.approx(max(bounds))
            counts[row][chosen[row]] += 1
    assert counts[0] != counts[1]


def test_gaussian_noise_is_measured_in_half_the_range():
    explorer = noisy(GaussianNoise(sigma=Linear(start=0.2, end=0.1, steps=100)))
    middle = torch.tensor([0.0, 0.5]).expand(N, 2)
    for frames, sigma in ((0, 0.2), (100, 0.1)):
        noise = explorer(middle, frames) - middle
        torch.testing.assert_close(noise.std(0), sigma * (HIGH - LOW) / 2, rtol=0.03, atol=0)
        torch.testing.assert_close(noise.mean(0), torch.zeros(2), atol=0.01, rtol=0)


@pytest.mark.parametrize("rule", [GaussianNoise(sigma=2.0), OrnsteinUhlenbeck(sigma=2.0)])
def test_noisy_actions_stay_in_the_range(rule):
    actions = noisy(rule)(HIGH.expand(1000, 2), 0)
    assert (actions >= LOW).all()
    assert (actions <= HIGH).all()
    assert (actions == HIGH).any(0).all()
    assert (actions == LOW).any(0).all()


def test_ou_noise_settles_and_remembers_as_the_formula_says():
    rule = OrnsteinUhlenbeck(sigma=0.1, theta=0.2, dt=0.5)
    explorer = noisy(rule, low=torch.tensor([-1.0]), high=torch.tensor([1.0]))
    still = torch.zeros(N, 1)
    for _ in range(100):
        before = explorer(still, 0)
    after = explorer(still, 0)
    decay = 1 - 0.2 * 0.5
    deviation = 0.1 * math.sqrt(0.5 / (1 - decay**2))
    assert float(after.std()) == pytest.approx(deviation, rel=0.03)
    assert float((before * after).mean() / before.var()) == pytest.approx(decay, abs=0.02)


def test_ou_noise_begins_anew_where_an_episode_ended_and_only_there():
    explorer = noisy(OrnsteinUhlenbeck(sigma=0.05))
    actions = torch.zeros(4, 2)
    explorer.restart(torch.ones(4, dtype=torch.bool))  # before the first call
    for _ in range(50):
        explorer(actions, 0)
    before = explorer.state_dict()["noise"]
    done = torch.tensor([True, False, False, True])
    explorer.restart(done)
    after = explorer.state_dict()["noise"]
    assert after[done].eq(0).all()
    assert torch.equal(after[~done], before[~done])
    assert before.ne(0).all()


def test_ou_noise_is_that_of_torchrl():
    spec = Bounded(-torch.ones(3), torch.ones(3))
    settings = {"theta": 0.3, "sigma": 0.4, "dt": 0.05}
    theirs = OrnsteinUhlenbeckProcessModule(spec, eps_init=1.0, eps_end=1.0, **settings)
    ours = Explorer(OrnsteinUhlenbeck(**settings), low=spec.low, high=spec.high, seed=3)
    torch.manual_seed(3)
    data = TensorDict({"is_init": torch.ones(5, 1, dtype=torch.bool)}, [5])
    for step in range(30):
        actions = torch.full((5, 3), 0.2)
        done = torch.arange(5) % (step + 2) == 1
        wanted = theirs(data.set("action", actions))["action"]
        torch.testing.assert_close(ours(actions, 0), wanted)
        data["is_init"] = done.unsqueeze(-1)
        ours.restart(done)


def test_torchrl_anneals_the_sigma_of_its_ou_noise_anew_in_each_episode():
    """Why ours is not theirs: `n_steps_annealing` longer than an episode never gets anywhere."""
    spec = Bounded(-torch.ones(1), torch.ones(1))
    theirs = OrnsteinUhlenbeckProcessModule(spec, sigma=0.5, sigma_min=0.0, n_steps_annealing=100)
    data = TensorDict({"is_init": torch.zeros(1, 1, dtype=torch.bool)}, [1])
    for step in range(90):
        data["is_init"] = torch.full((1, 1), step % 10 == 0)
        theirs(data.set("action", torch.zeros(1, 1)))
    assert data["_ou_steps"] == 10
    assert not any("noise" in name for name in theirs.state_dict())  # and is not saved


def test_gaussian_noise_is_that_of_torchrl_for_a_range_of_two():
    spec = Bounded(-torch.ones(3), torch.ones(3))
    theirs = AdditiveGaussianModule(spec, sigma_init=0.7, sigma_end=0.7)
    ours = Explorer(GaussianNoise(sigma=0.7), low=spec.low, high=spec.high, seed=3)
    torch.manual_seed(3)
    for _ in range(5):
        actions = torch.full((50, 3), 0.2)
        wanted = theirs(TensorDict({"action": actions}, [50]))["action"]
        torch.testing.assert_close(ours(actions, 0), wanted)


def test_epsilon_follows_the_line_of_torchrl():
    from torchrl.data import Categorical

    theirs = EGreedyModule(Categorical(3), eps_init=1.0, eps_end=0.1, annealing_num_steps=50)
    ours = Linear(start=1.0, end=0.1, steps=50)
    for frames in range(60):
        assert ours(frames) == pytest.approx(float(theirs.eps), abs=1e-5)
        theirs.step(1)


RULES = [
    EpsilonGreedy(epsilon=0.5),
    Boltzmann(temperature=1.0),
    Ucb(),
    GaussianNoise(),
    OrnsteinUhlenbeck(),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
def test_a_restored_explorer_continues_exactly(rule):
    inputs = torch.rand(20, 6, 2, generator=torch.Generator().manual_seed(1))
    first, second = noisy(rule), noisy(rule, seed=9)
    for x in inputs[:10]:
        first(x, 0)
    second(inputs[0], 0)
    state = first.state_dict()
    wanted = [first(x, 0) for x in inputs[10:]]
    second.load_state_dict(state)
    assert all(torch.equal(second(x, 0), y) for x, y in zip(inputs[10:], wanted, strict=True))


def test_a_state_from_before_the_first_call_is_restored():
    first, second = noisy(OrnsteinUhlenbeck()), noisy(OrnsteinUhlenbeck(), seed=9)
    second(torch.zeros(3, 2), 0)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(torch.zeros(4, 2), 0), second(torch.zeros(4, 2), 0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EpsilonGreedy(epsilon=1.2), r"epsilon must be in \[0, 1\], got 1.2"),
        (lambda: Boltzmann(temperature=0.0), "temperature must be positive and finite, got 0.0"),
        (
            lambda: Boltzmann(temperature=Linear(start=1.0, end=0.0, steps=5)),
            "temperature must be positive and finite, got 0.0",
        ),
        (lambda: Ucb(c=-1.0), "c must be a finite number of at least 0, got -1.0"),
        (lambda: GaussianNoise(sigma=-0.1), "sigma must be a finite number of at least 0"),
        (lambda: OrnsteinUhlenbeck(theta=0.0), "theta must be positive and finite, got 0.0"),
        (lambda: OrnsteinUhlenbeck(dt=20.0), "theta times dt must be below 2"),
        (lambda: Explorer(GaussianNoise()), "must be bounded, got low=None high=None"),
        (
            lambda: noisy(GaussianNoise(), high=torch.tensor([1.0, torch.inf])),
            "GaussianNoise measures noise in the range of actions",
        ),
        (lambda: GumbelSoftmax(temperature=-1.0), "temperature must be positive and finite"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_gumbel_softmax_draws_one_hot_actions_from_the_policy():
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0, -1.0])
    for temperature in (0.1, 5.0):  # the forward pass does not depend on it
        actions = GumbelSoftmax(temperature)(logits.expand(N, 3))
        assert actions.sum(-1).allclose(torch.ones(N))
        assert ((actions > 0.5).sum(-1) == 1).all()
        torch.testing.assert_close(actions.mean(0), logits.softmax(0), atol=0.012, rtol=0)
    head = GumbelSoftmax(1.0).eval()
    assert head(logits.expand(10, 3)).tolist() == [[0, 1, 0]] * 10


def test_gumbel_softmax_has_the_gradient_of_its_soft_sample():
    logits = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(6, 3, dtype=torch.float64)
    head = GumbelSoftmax(Linear(start=1.0, end=0.5, steps=10))
    for step, temperature in ((0, 1.0), (10, 0.5)):
        head.anneal(step)
        torch.manual_seed(1)
        (found,) = torch.autograd.grad((head(logits) * weights).sum(), logits)
        torch.manual_seed(1)
        noise = -torch.empty_like(logits).exponential_().log()
        soft = ((logits + noise) / temperature).softmax(-1)
        (wanted,) = torch.autograd.grad((soft * weights).sum(), logits)
        torch.testing.assert_close(found, wanted)


def test_a_policy_learns_through_the_gumbel_softmax_head():
    torch.manual_seed(0)
    head, logits = GumbelSoftmax(1.0), torch.zeros(3, requires_grad=True)
    worth = torch.tensor([0.1, 0.3, 0.9])
    optimizer = torch.optim.SGD([logits], lr=1.0)
    for _ in range(200):
        optimizer.zero_grad()
        (-(head(logits.expand(32, 3)) * worth).sum(-1).mean()).backward()
        optimizer.step()
    assert logits.softmax(0)[2] > 0.9

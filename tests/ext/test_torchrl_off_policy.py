"""TorchRL's off-policy losses as they are wired: every number that is learnt from, by hand."""

import copy
import math

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict
from torch import nn
from torch.nn import functional as F
from torchrl.modules import TanhNormal as TorchRLTanhNormal

from polopt.envs.control import cartpole, pendulum
from polopt.ext.torchrl.distributions import TanhNormal
from polopt.ext.torchrl.off_policy import OffPolicyUpdate
from polopt.ext.torchrl.off_policy_networks import Mlp
from polopt.ext.torchrl.transitions import NStep, TransitionCollector
from polopt.losses import ddpg, discrete_sac, double_dqn, dqn, sac, td3

GAMMA = 0.9
DISCRETE = [dqn, double_dqn, discrete_sac]
CONTINUOUS = [sac, td3, ddpg]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # networks this small only lose by sharing work
    yield
    torch.set_num_threads(threads)


def update(preset, lr=1e-2, **settings):
    torch.manual_seed(0)
    env = (cartpole if preset in DISCRETE else pendulum)().make(4, seed=0)
    made = OffPolicyUpdate(preset(**{"gamma": GAMMA, **settings}), env, hidden=(16, 16))
    made.set_lr(lr)
    return made


def batch(preset, n=8, seed=1):
    torch.manual_seed(seed)
    wide = 4 if preset in DISCRETE else 3
    action = torch.randint(2, (n,)) if preset in DISCRETE else torch.rand(n, 1) * 4 - 2
    terminated = torch.arange(n).view(n, 1) % 4 == 0
    truncated = torch.arange(n).view(n, 1) % 4 == 1
    reached = {
        "observation": torch.randn(n, wide),
        "reward": 3 * torch.randn(n, 1),
        "terminated": terminated,
        "done": terminated | truncated,
    }
    return TensorDict({"observation": torch.randn(n, wide), "action": action, "next": reached}, [n])


def q(made, params, observation, action):
    """Values [2, n] of both critics."""
    net = copy.deepcopy(made.loss.qvalue_network)
    values = []
    for weights in params["net"]["weights"].detach():
        net.net.weights = nn.Parameter(weights.clone())
        values.append(net.net(observation, action).squeeze(-1))
    return torch.stack(values).detach()


def alive(data):
    return (~data["next", "terminated"]).squeeze(-1).float()


@pytest.mark.parametrize("preset", [dqn, double_dqn])
def test_dqn_bootstraps_at_truncation_and_writes_absolute_errors(preset):
    made, data = update(preset), batch(preset)
    for _ in range(3):  # so that online and target network differ
        made(batch(preset, seed=5), 8)
    online = made.loss.value_network.net
    target = copy.deepcopy(online)
    target.weights = nn.Parameter(made.loss.target_value_network_params["net"]["weights"].clone())
    later = target(data["next", "observation"])
    chosen = online(data["next", "observation"]).argmax(-1, keepdim=True)
    best = later.gather(-1, chosen).squeeze(-1) if preset is double_dqn else later.amax(-1)
    y = data["next", "reward"].squeeze(-1) + GAMMA * alive(data) * best
    value = online(data["observation"]).gather(-1, data["action"].unsqueeze(-1)).squeeze(-1)
    error = (value - y).detach()
    expected = F.smooth_l1_loss(value, y).item()
    metrics = made(data, 8)
    assert metrics["loss_critic"].item() == pytest.approx(expected, rel=1e-5)
    assert torch.allclose(data["td_error"], error.abs(), atol=1e-5)


@pytest.mark.parametrize("preset", [dqn, double_dqn])
@pytest.mark.parametrize("value_loss", ["l2", "smooth_l1"])
@pytest.mark.parametrize("steps", [None, torch.arange(8) % 3 + 1])
def test_dqn_is_torchrls(preset, value_loss, steps):
    made, data = update(preset, value_loss=value_loss), batch(preset)
    made(batch(preset, seed=5), 8)  # so that online and target network differ
    if steps is not None:
        data["steps_to_next_obs"] = steps
    theirs, weights = data.clone(), made.loss.value_network.net.weights
    expected = made.loss(theirs)["loss"].mean()
    (gradient,) = torch.autograd.grad(expected, weights)
    metrics = made(data, 8)
    assert torch.allclose(metrics["loss_critic"], expected.detach(), rtol=1e-6)
    assert torch.allclose(weights.grad, gradient, rtol=1e-5, atol=1e-7)
    assert torch.allclose(data["td_error"], theirs["td_error"].squeeze(-1).sqrt(), rtol=1e-6)
    assert metrics["td_error"].item() == pytest.approx(data["td_error"].mean().item())


def test_td3_smoothing_is_scaled_to_the_range_of_actions(monkeypatch):
    data = batch(td3)
    # A draw of one deviation is 0.2 of half the range ±2; a hundred are clipped at 0.5 of it.
    for draw, noise in ((1.0, 0.4), (-100.0, -1.0)):
        monkeypatch.setattr(torch, "randn_like", lambda x, d=draw: torch.full_like(x, d))
        fresh, seen = update(td3, smoothing_noise=0.2, smoothing_clip=0.5), data.clone()
        action = fresh.act(seen["next", "observation"]) + noise  # targets equal at the start
        later = q(fresh, fresh.loss.target_qvalue_network_params, seen["next", "observation"],
                  action.clamp(-2.0, 2.0)).amin(0)  # fmt: skip
        y = seen["next", "reward"].squeeze(-1) + GAMMA * alive(seen) * later
        error = q(fresh, fresh.loss.qvalue_network_params, seen["observation"], seen["action"]) - y
        metrics = fresh(seen, 8)
        assert metrics["loss_critic"].item() == pytest.approx(
            error.square().sum(0).mean().item(), rel=1e-4
        )
        assert torch.allclose(seen["td_error"], error.abs().amax(0), atol=1e-5)


def test_td3_policy_and_targets_wait_for_the_delay():
    made = update(td3, policy_delay=3)
    actor, targets = made.loss.actor_network_params, made.loss.target_qvalue_network_params
    moved = []
    for _ in range(6):
        before = actor.clone(), targets.clone()
        metrics = made(batch(td3), 8)
        moved.append((bool((actor != before[0]).any()), bool((targets != before[1]).any())))
        assert ("loss_actor" in metrics) == moved[-1][0]
    assert moved == [(False, False)] * 2 + [(True, True)] + [(False, False)] * 2 + [(True, True)]


def test_ddpg_by_hand():
    made, data = update(ddpg), batch(ddpg)
    critic, observation = made.loss.value_network.net, data["next", "observation"]
    later = critic(observation, made.act(observation)).squeeze(-1)
    y = data["next", "reward"].squeeze(-1) + GAMMA * alive(data) * later
    error = critic(data["observation"], data["action"]).squeeze(-1) - y
    expected = error.square().mean().item()
    policy = -critic(data["observation"], made.act(data["observation"])).mean().item()
    metrics = made(data, 8)
    assert metrics["loss_critic"].item() == pytest.approx(expected, rel=1e-5)
    assert metrics["loss_actor"].item() == pytest.approx(policy, rel=1e-5)
    assert torch.allclose(data["td_error"], error.abs(), atol=1e-5)


def test_sac_by_hand():
    made, data = update(sac, alpha=0.3), batch(sac)
    target = math.log(2.0) - 1.0  # −1 for actions in half their range ±2
    assert made.loss.target_entropy.item() == pytest.approx(target)
    state = torch.get_rng_state()
    actor = made.loss.actor_network
    entries = TensorDict({"observation": data["next", "observation"]}, [8])
    policy = actor.get_dist(entries)
    action = policy.rsample()
    later = q(made, made.loss.target_qvalue_network_params, entries["observation"], action)
    soft = later.amin(0) - 0.3 * policy.log_prob(action)
    y = data["next", "reward"].squeeze(-1) + GAMMA * alive(data) * soft
    error = q(made, made.loss.qvalue_network_params, data["observation"], data["action"]) - y
    now = actor.get_dist(TensorDict({"observation": data["observation"]}, [8]))
    action = now.rsample()
    log_prob = now.log_prob(action)
    least = q(made, made.loss.qvalue_network_params, data["observation"], action).amin(0)
    torch.set_rng_state(state)
    metrics = made(data, 8)
    assert metrics["loss_critic"].item() == pytest.approx(
        error.square().sum(0).mean().item(), rel=1e-4
    )
    assert metrics["loss_actor"].item() == pytest.approx((0.3 * log_prob - least).mean().item())
    alpha = -(torch.tensor(0.3).log() * (log_prob + target)).mean().item()
    assert metrics["loss_alpha"].item() == pytest.approx(alpha, rel=1e-4)
    assert metrics["entropy"].item() == pytest.approx(-log_prob.mean().item(), rel=1e-5)
    assert torch.allclose(data["td_error"], error.abs().amax(0).detach(), atol=1e-4)


def test_discrete_sac_by_hand():
    made, data = update(discrete_sac, alpha=0.3, target_entropy=0.4), batch(discrete_sac)

    def values(params, observation):
        net = copy.deepcopy(made.loss.qvalue_network.net)
        out = []
        for weights in params["net"]["weights"].detach():
            net.weights = nn.Parameter(weights.clone())
            out.append(net(observation))
        return torch.stack(out).detach()

    def policy(observation):
        return made.loss.actor_network.net(observation).log_softmax(-1)

    log_p = policy(data["next", "observation"])
    later = values(made.loss.target_qvalue_network_params, data["next", "observation"]).amin(0)
    soft = (log_p.exp() * (later - 0.3 * log_p)).sum(-1)
    y = data["next", "reward"].squeeze(-1) + GAMMA * alive(data) * soft
    index = data["action"].expand(2, -1).unsqueeze(-1)
    taken = values(made.loss.qvalue_network_params, data["observation"]).gather(-1, index)
    error = (taken.squeeze(-1) - y).detach()
    log_p = policy(data["observation"])
    entropy = -(log_p.exp() * log_p).sum(-1).mean().item()
    metrics = made(data, 8)
    assert metrics["loss_critic"].item() == pytest.approx(
        error.square().sum(0).mean().item(), rel=1e-4
    )
    assert metrics["entropy"].item() == pytest.approx(entropy, rel=1e-5)
    alpha = -(torch.tensor(0.3).log() * (-entropy + 0.4)).item()
    assert metrics["loss_alpha"].item() == pytest.approx(alpha, rel=1e-4)
    assert torch.allclose(data["td_error"], error.abs().amax(0), atol=1e-4)


@pytest.mark.parametrize("preset", [*DISCRETE, *CONTINUOUS])
def test_importance_weights_scale_the_critic_alone(preset):
    settings = {"policy_delay": 1} if preset is td3 else {}
    plain, weighted = update(preset, **settings), update(preset, **settings)
    data = batch(preset)
    other = data.clone()
    other["priority_weight"] = torch.full((8,), 0.25)
    torch.manual_seed(3)
    first = plain(data, 8)
    torch.manual_seed(3)
    second = weighted(other, 8)
    ratio = second["loss_critic"] / first["loss_critic"]
    assert ratio.item() == pytest.approx(0.25, rel=1e-5)
    for name in ("loss_actor", "loss_alpha"):
        if name in first:
            assert second[name].item() == pytest.approx(first[name].item(), rel=1e-5)


@pytest.mark.parametrize("preset", [*DISCRETE, *CONTINUOUS])
def test_policies_find_the_best_action_of_a_bandit(preset):
    entropy = {"alpha": 0.05} if preset in (sac, discrete_sac) else {}
    made, best = update(preset, lr=3e-3, **entropy), 0.0 if preset in DISCRETE else 2.0
    torch.manual_seed(0)
    for _ in range(100):
        data = batch(preset, n=32, seed=int(torch.randint(2**31, ())))
        action = data["action"].float().view(32, 1)
        data["next", "reward"] = -(action - best).abs()
        data["next", "terminated"][:] = True
        made(data, 32)
    observation = torch.randn(64, 4 if preset in DISCRETE else 3)
    action = made.act(observation)
    assert (action.float() - best).abs().mean() < 0.3
    assert made.explore(observation).abs().max() <= 2.0


@pytest.mark.parametrize("preset", [dqn, double_dqn])
def test_minibatches_at_once_are_the_minibatches_one_by_one(preset):
    many, single = (update(preset, target_every=3) for _ in range(2))
    data = batch(preset, n=80)
    many(data, 8)
    for minibatch in data.split(8):
        single(minibatch.clone(), 8)
    assert torch.allclose(
        many.loss.value_network.net.weights, single.loss.value_network.net.weights, atol=1e-6
    )
    with pytest.raises(ValueError, match="size must divide the 80 transitions, got 7"):
        many(data, 7)


@pytest.mark.parametrize("tau", [1.0, 0.3])
def test_target_follows_after_the_interval(tau):
    made = update(dqn, target_every=2, tau=tau)
    online, target = made.loss.value_network.net.weights, made.loss.target_value_network_params
    start = online.detach().clone()
    made(batch(dqn), 8)
    assert torch.equal(target["net"]["weights"], start)
    made(batch(dqn), 8)
    expected = start + tau * (online.detach() - start)
    assert torch.allclose(target["net"]["weights"], expected, atol=1e-7)


def test_gradients_are_scaled_down():
    made = update(dqn, lr=1.0)
    made.max_grad_norm = 0.1
    made.optimizer = torch.optim.SGD(made.optimizer.param_groups[0]["params"], lr=1.0)
    before = made.loss.value_network.net.weights.detach().clone()
    made(batch(dqn), 8)
    step = made.loss.value_network.net.weights.detach() - before
    assert step.norm().item() == pytest.approx(0.1, rel=1e-3)


def test_n_step_transitions_by_hand():
    collector = TransitionCollector(cartpole().make(3, seed=0))
    torch.manual_seed(0)
    data = collector.collect(lambda o: torch.randint(2, (3,)), 60)
    assert data["next", "terminated"].sum() > 3
    n, join = 4, NStep(4, gamma=GAMMA)
    parts = [join(part) for part in data.split([1, 1, 2, 10, 20, 26], 1)]
    joined = torch.cat([part for part in parts if part.shape[1]], 1)
    assert joined.shape == (3, 60 - (n - 1))
    reached = data["next"]
    for row in range(3):
        for t in range(joined.shape[1]):
            total, k = 0.0, 0
            for k in range(n):
                total += GAMMA**k * reached["reward"][row, t + k].item()
                if reached["done"][row, t + k]:
                    break
            one = joined[row, t]
            assert one["next", "reward"].item() == pytest.approx(total)
            assert one["steps_to_next_obs"] == k + 1
            for name in ("observation", "terminated", "done"):
                assert torch.equal(one["next", name], reached[name][row, t + k])
            assert torch.equal(one["observation"], data["observation"][row, t])


@pytest.mark.parametrize("preset", [*DISCRETE, *CONTINUOUS])
def test_several_steps_discount_by_their_number(preset):
    steps, gammas = torch.arange(8) % 3 + 1, (GAMMA, GAMMA**2, GAMMA**3)

    def errors(gamma, steps=None):
        made, data = update(preset, gamma=gamma), batch(preset)
        data["next", "terminated"][:] = False
        if steps is not None:
            data["steps_to_next_obs"] = steps
        torch.manual_seed(3)  # of the draws of the next action
        made(data, 8)
        return data["td_error"]

    single = torch.stack([errors(gamma) for gamma in gammas])
    found = errors(GAMMA, steps)
    assert torch.allclose(found, single.gather(0, (steps - 1).unsqueeze(0))[0], atol=1e-5)
    assert not torch.allclose(found, single[0], atol=1e-3)


def test_collector_keeps_final_observations_and_counts_returns():
    env = cartpole().make(4, seed=0)
    collector = TransitionCollector(env)
    ended = []
    data = collector.collect(lambda o: torch.zeros(4, dtype=torch.int64), 30, ended.append)
    done = data["next", "done"].squeeze(-1)
    assert sum(int(d.sum()) for d in ended) == done.sum() > 4
    same = (data["next", "observation"][:, :-1] == data["observation"][:, 1:]).all(-1)
    assert torch.equal(same, ~done[:, :-1])
    returns = collector.returns(data)
    lengths = []  # reward 1 a step: returns are lengths
    for row in done:
        ends = row.nonzero().flatten().tolist()
        lengths += [b - a for a, b in zip([-1, *ends], ends, strict=False)]
    assert returns["return_mean"].item() == pytest.approx(sum(lengths) / len(lengths))


def test_tanh_normal_agrees_with_torchrl():
    torch.manual_seed(0)
    loc, scale = torch.randn(64, 2), torch.rand(64, 2) + 0.1
    low, high = torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 5.0])
    ours = TanhNormal(loc, scale, low, high)
    theirs = TorchRLTanhNormal(loc, scale, low=low, high=high, tanh_loc=False)
    action = ours.sample()
    assert ((action > low) & (action < high)).all()
    inside = ((action - low) / (high - low) - 0.5).abs().amax(-1) < 0.49
    assert torch.allclose(
        ours.log_prob(action.clone())[inside], theirs.log_prob(action)[inside], atol=1e-3
    )
    assert torch.allclose(
        ours.log_prob(action)[inside], ours.log_prob(action.clone())[inside], atol=1e-3
    )
    # Far out, where atanh of the action is infinite, the sample before tanh is still known.
    far = TanhNormal(torch.full((4, 2), 30.0), scale[:4], low, high)
    action = far.sample()
    assert torch.equal(action, high.expand(4, 2))
    assert torch.isfinite(far.log_prob(action)).all()


def test_mlp_is_the_usual_one():
    torch.manual_seed(0)
    net = Mlp((3, 8, 5, 2))
    layers = [nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2)]
    usual, start = nn.Sequential(*layers), 0
    for parameter in usual.parameters():
        count = parameter.numel()
        parameter.data = net.weights.data[start : start + count].view_as(parameter)
        start += count
    x = torch.randn(7, 3)
    assert torch.allclose(net(x), usual(x), atol=1e-6)
    assert torch.equal(net(x[:, :1], x[:, 1:]), net(x))
    assert net.weights[: 3 * 8].abs().max() <= 3**-0.5


@pytest.mark.parametrize("preset", [sac, td3, discrete_sac])
def test_twins_begin_as_two_usual_networks(preset):
    made = update(preset)
    first, second = made.loss.qvalue_network_params["net", "weights"]
    wide = 4 if preset in DISCRETE else 3 + 1
    assert (first != second).any()
    for weights in (first, second):  # bounds of the first layer and of the second, 16 inputs
        assert 0.9 * wide**-0.5 < weights[: 16 * wide].abs().max() <= wide**-0.5
        layer = weights[16 * (wide + 1) : 16 * (wide + 1) + 256]
        assert 0.9 / 4 < layer.abs().max() <= 1 / 4
    target = made.loss.target_qvalue_network_params["net", "weights"]
    assert torch.equal(target, torch.stack((first, second)))

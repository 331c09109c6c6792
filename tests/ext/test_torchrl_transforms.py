"""Reward scaling, advantages, and the mistakes of layout that they refuse."""

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict
from torchrl.objectives.value import GAE

from polopt.envs.control import cartpole, pendulum
from polopt.ext.torchrl.collector import BatchedCollector
from polopt.ext.torchrl.networks import make_actor, make_critic
from polopt.ext.torchrl.transforms import GAEAdvantage, RewardScaling, running_return


@pytest.fixture
def batch():
    return collected(cartpole())


def collected(task, envs=4, steps=50):
    torch.manual_seed(0)
    env = task.make(envs, seed=0)
    env.max_steps = 30
    frames = envs * steps
    return BatchedCollector(
        env, make_actor(env), frames_per_batch=frames, total_frames=frames
    ).collect()


def critic():
    torch.manual_seed(1)
    return make_critic(cartpole().make(1))


def test_advantage_equals_torchrl_s(batch):
    assert batch["next", "terminated"].any()
    assert (batch["next", "truncated"] & ~batch["next", "terminated"]).any()
    value = critic()
    expected = GAE(gamma=0.9, lmbda=0.8, value_network=value, vectorized=False)(batch.clone())
    GAEAdvantage(value, gamma=0.9, lam=0.8)(batch)
    for key in ("state_value", "advantage", "value_target"):
        torch.testing.assert_close(batch[key], expected[key], atol=1e-5, rtol=1e-5)


def test_advantage_can_be_whitened_and_read_another_reward(batch):
    batch["next", "half"] = batch["next", "reward"] / 2
    GAEAdvantage(critic(), gamma=0.9, lam=0.8, whiten=True, reward=("next", "half"))(batch)
    assert abs(float(batch["advantage"].mean())) < 1e-5
    assert float(batch["advantage"].std()) == pytest.approx(1.0, abs=1e-3)
    assert float(batch["value_target"].max()) < 6.0  # half the reward, so below 0.5 / (1 - 0.9)


def test_time_that_is_not_last_is_refused(batch):
    compute = GAEAdvantage(critic())
    with pytest.raises(ValueError, match="time must be the last batch dimension"):
        compute(batch.transpose(0, 1))
    unnamed = TensorDict(batch.to_dict(), batch.batch_size)
    compute(unnamed.clone())
    with pytest.raises(ValueError, match=r"looks \[T, N\]"):
        compute(unnamed.transpose(0, 1))
    order = torch.randperm(batch.shape[1])
    with pytest.raises(ValueError, match="looks shuffled"):
        compute(unnamed[:, order])
    with pytest.raises(ValueError, match=r"shape \[N, T, 1\]"):
        compute(unnamed.reshape(-1))


def test_done_in_the_place_of_terminated_is_refused():
    batch = collected(pendulum())
    torch.manual_seed(0)
    compute = GAEAdvantage(make_critic(pendulum().make(1)))
    compute(batch.clone())
    batch["next", "terminated"] = batch["next", "done"].clone()
    with pytest.raises(ValueError, match="every truncated step is also terminated"):
        compute(batch)


@pytest.mark.parametrize("name", ["gamma", "lam", "target_lam"])
def test_a_discount_out_of_range_is_refused(name):
    value = critic()
    for number in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\], got {number}"):
            GAEAdvantage(value, **{name: number})
    with pytest.raises(ValueError, match=r"gamma must be in \[0, 1\], got 1.5"):
        RewardScaling(2, gamma=1.5)


def test_scaling_of_another_number_of_environments_is_refused(batch):
    with pytest.raises(ValueError, match=r"of \d+ environments, the scaling was made for 77: make"):
        RewardScaling(77, gamma=0.9)(batch)


def test_flags_that_are_missing_or_mixed_up_are_refused(batch):
    compute = GAEAdvantage(critic())
    mixed = batch.clone()
    mixed["next", "done"] = torch.zeros_like(mixed["next", "done"])
    with pytest.raises(ValueError, match="terminated but not done"):
        compute(mixed)
    del batch["next", "terminated"]
    with pytest.raises(ValueError, match="terminated"):
        compute(batch)


def steps(reward, done):
    return TensorDict(
        {"next": {"reward": reward.unsqueeze(-1), "done": done.unsqueeze(-1)}}, reward.shape
    )


def test_scaling_follows_the_order_of_stable_baselines3():
    torch.manual_seed(0)
    envs, time, gamma = 3, 40, 0.9
    scaling = RewardScaling(envs, gamma=gamma, clamp=None)
    earned, seen = torch.zeros(envs), []
    for _ in range(3):
        reward, done = torch.randn(envs, time) + 1, torch.rand(envs, time) < 0.1
        scaled = scaling(steps(reward, done))["next", "scaled_reward"].squeeze(-1)
        for t in range(time):
            earned = gamma * earned + reward[:, t]
            seen.append(earned)
            earned = torch.where(done[:, t], 0.0, earned)
        deviation = torch.cat(seen).double().std(unbiased=False)
        torch.testing.assert_close(scaled, reward / deviation.float(), rtol=1e-5, atol=1e-5)


def test_scaling_is_frozen_for_evaluation_and_saved():
    torch.manual_seed(0)
    data = [steps(torch.randn(2, 9), torch.rand(2, 9) < 0.2) for _ in range(3)]
    scaling = RewardScaling(2, gamma=0.9)
    scaling(data[0])
    scale = scaling.scale
    scaling.eval()
    scaling(data[1])
    assert torch.equal(scaling.scale, scale)
    copy = RewardScaling(2, gamma=0.9)
    copy.load_state_dict(scaling.state_dict())
    scaling.train()
    for other in (scaling, copy):
        other(data[2])
    assert torch.equal(copy.scale, scaling.scale)
    assert not torch.equal(copy.scale, scale)


def test_constant_scale_and_clamp():
    data = steps(torch.tensor([[1.0, -50.0]]), torch.zeros(1, 2, dtype=torch.bool))
    scaled = RewardScaling(1, gamma=0.9, constant=2.0, clamp=5.0)(data)["next", "scaled_reward"]
    assert scaled.flatten().tolist() == [0.5, -5.0]
    with pytest.raises(ValueError, match="clamp must be positive or none, got 0"):
        RewardScaling(1, gamma=0.9, clamp=0.0)


def test_running_return_carries_over():
    reward = torch.ones(1, 4)
    done = torch.tensor([[False, True, False, False]])
    earned = running_return(reward, done, torch.tensor([10.0]), gamma=0.5)
    assert earned.tolist() == [[6.0, 4.0, 1.0, 1.5]]

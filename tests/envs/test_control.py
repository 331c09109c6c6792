"""The batched tasks against gymnasium, and against TorchRL's own checks."""

import math

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("torchrl")

from torchrl.collectors import Collector
from torchrl.envs import check_env_specs

from polopt.envs.control import (
    acrobot,
    cartpole,
    mountain_car,
    mountain_car_continuous,
    pendulum,
)

TASKS = [cartpole(), pendulum(), acrobot(), mountain_car(), mountain_car_continuous()]
each_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def random_states(task, n):
    """States all over the space, more of them near where episodes end."""
    draw = torch.Generator().manual_seed(1)
    high = {
        "CartPole-v1": (2.5, 3.0, 0.22, 3.0),
        "Pendulum-v1": (3 * math.pi, 8.0),
        "Acrobot-v1": (math.pi, math.pi, 4 * math.pi, 9 * math.pi),
        "MountainCar-v0": (0.9, 0.07),
        "MountainCarContinuous-v0": (0.9, 0.07),
    }[task.name]
    states = torch.rand(n, len(high), generator=draw, dtype=torch.float64) * 2 - 1
    states = states * torch.tensor(high, dtype=torch.float64)
    if task.name.startswith("MountainCar"):
        states[:, 0] -= 0.3
    return states


def random_actions(task, n):
    draw = torch.Generator().manual_seed(2)
    if isinstance(task.physics.actions, int):
        return torch.randint(task.physics.actions, (n,), generator=draw)
    # Beyond the bounds too: gymnasium clips the motor, not the action.
    return (torch.rand(n, 1, generator=draw) * 2 - 1) * task.physics.actions[1] * 1.2


def as_gymnasium(action):
    return action.numpy() if action.ndim else int(action)


@each_task
def test_one_step_equals_gymnasium(task):
    n = 10_000
    states, actions = random_states(task, n), random_actions(task, n)
    reference = gymnasium.make(task.name).unwrapped
    reference.reset(seed=0)
    env = task.make(n)
    env.restore({"state": states, "steps": torch.zeros(n, dtype=torch.int64)})
    observation, reward, terminated, _ = env.advance(actions)
    ended = 0
    for i in range(n):
        state = states[i].numpy().copy()
        reference.state = tuple(state) if task.name == "MountainCar-v0" else state
        reference.steps_beyond_terminated = None
        expected, expected_reward, end, _, _ = reference.step(as_gymnasium(actions[i]))
        np.testing.assert_allclose(observation[i].numpy(), expected, rtol=1e-6, atol=1e-6)
        assert float(reward[i]) == pytest.approx(float(expected_reward), rel=1e-6, abs=1e-6)
        assert bool(terminated[i]) == end
        ended += end
    assert (ended > 0) == (task.name != "Pendulum-v1")


@each_task
def test_whole_episode_equals_gymnasium(task):
    reference = gymnasium.make(task.name)
    reference.reset(seed=3)
    state = torch.as_tensor(np.asarray(reference.unwrapped.state, dtype=np.float64))
    env = task.make(1)
    env.restore({"state": state.reshape(1, -1), "steps": torch.zeros(1, dtype=torch.int64)})
    for action in random_actions(task, task.max_steps):
        if action.ndim:
            action = action.clamp(*task.physics.actions)
        expected, expected_reward, end, cut, _ = reference.step(as_gymnasium(action))
        observation, reward, terminated, truncated = env.advance(action.unsqueeze(0))
        np.testing.assert_allclose(observation[0].numpy(), expected, rtol=1e-4, atol=1e-4)
        assert float(reward[0]) == pytest.approx(float(expected_reward), rel=1e-4, abs=1e-4)
        assert (bool(terminated[0]), bool(truncated[0])) == (end, cut)
        if end or cut:
            return
    pytest.fail("no end of the episode within the time limit")


@each_task
def test_bounds_are_gymnasium_s(task):
    reference = gymnasium.make(task.name)
    env = task.make(2)
    space = env.observation_spec["observation"].space
    np.testing.assert_array_equal(space.low[0].numpy(), reference.observation_space.low)
    np.testing.assert_array_equal(space.high[0].numpy(), reference.observation_space.high)
    assert task.max_steps == reference.spec.max_episode_steps
    assert task.bar == (reference.spec.reward_threshold or -300.0)
    if isinstance(task.physics.actions, int):
        assert env.action_spec.space.n == reference.action_space.n
    else:
        assert task.physics.actions == (reference.action_space.low, reference.action_space.high)


@each_task
def test_starts_are_distributed_as_in_gymnasium(task):
    n = 4000
    reference = gymnasium.make(task.name)
    reference.reset(seed=0)
    expected = np.stack([reference.reset()[0] for _ in range(n)])
    starts = task.make(n, seed=0).restart().numpy()
    spread = expected.std(0) + 1e-9
    np.testing.assert_array_less(np.abs(starts.mean(0) - expected.mean(0)), 5 * spread / n**0.5)
    for quantile in (0.01, 0.25, 0.75, 0.99):
        gap = np.quantile(starts, quantile, 0) - np.quantile(expected, quantile, 0)
        np.testing.assert_array_less(np.abs(gap), 0.15 * spread)


@each_task
def test_specs_hold(task):
    check_env_specs(task.make(3))


def test_final_observations_are_kept_and_ends_kept_apart():
    task = cartpole()
    env = task.make(4, seed=0)
    env.max_steps = 12  # below the shortest falls, so that both kinds of end occur
    rollout = env.rollout(200, break_when_any_done=False)
    step = rollout["next"]
    terminated, truncated = step["terminated"][..., 0], step["truncated"][..., 0]
    assert terminated.any()
    assert (truncated & ~terminated).any()
    assert torch.equal(step["done"], step["terminated"] | step["truncated"])
    # The final observation is where the dynamics lead, the next row is a fresh start.
    observation, reward, _ = task.physics.step(rollout["observation"].double(), rollout["action"])
    torch.testing.assert_close(step["observation"], observation.float(), atol=1e-5, rtol=1e-5)
    assert torch.equal(step["reward"][..., 0], reward.float())
    done = step["done"][:, :-1, 0]
    assert (rollout["observation"][:, 1:][done].abs() <= 0.05).all()
    same = rollout["observation"][:, 1:] == step["observation"][:, :-1]
    assert same[~done].all()


def test_works_with_the_stock_collector():
    collector = Collector(cartpole().make(4, seed=0), frames_per_batch=64, total_frames=128)
    batches = list(collector)
    assert [batch.shape for batch in batches] == [(4, 16), (4, 16)]
    first, second = batches
    done = first["next", "done"][:, -1, 0]
    carried = first["next", "observation"][:, -1] == second["observation"][:, 0]
    assert carried[~done].all()


@each_task
def test_a_restored_environment_repeats_itself(task):
    env = task.make(5, seed=0)
    env.rollout(30, break_when_any_done=False)
    saved = env.snapshot()
    actions = [env.action_spec.rand() for _ in range(task.max_steps)]

    def play():
        rows = []
        for action in actions:
            observation, reward, terminated, truncated = env.advance(action)
            rows.append(torch.cat((observation, reward.unsqueeze(-1)), -1))
            env.restart(terminated | truncated)
        return torch.stack(rows)

    first = play()
    env.restore(saved)
    assert torch.equal(play(), first)


def test_reset_after_restore_continues_once():
    env = cartpole().make(3, seed=0)
    env.rollout(5)
    observation = env.restore(env.snapshot())
    assert torch.equal(env.reset()["observation"], observation)
    assert not torch.equal(env.reset()["observation"], observation)


def test_same_seed_same_starts():
    starts = [cartpole().make(6, seed=seed).restart() for seed in (7, 7, 8)]
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="num_envs must be at least 1, got 0"):
        cartpole().make(0)
    env = cartpole().make(3)
    snapshot = cartpole().make(4).snapshot()
    with pytest.raises(ValueError, match=r"state of the snapshot must have shape \[3, 4\]"):
        env.restore(snapshot)


@pytest.mark.parametrize("action", [[0, 2], [-1, 0], [[1, 0], [0, 1]]])
def test_actions_that_do_not_fit_are_refused_at_the_first_step(action):
    env = cartpole().make(2, seed=0)
    with pytest.raises(
        ValueError, match=r"actions must be whole numbers from 0 to 1 of shape \[2\]"
    ):
        env.advance(torch.tensor(action))
    env.advance(torch.tensor([0, 1]))

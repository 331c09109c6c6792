"""Environments of gymnasium: the same numbers as gymnasium's own, whole transitions, refusals."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("torchrl")
gymnasium = pytest.importorskip("gymnasium")

from torchrl.envs.utils import check_env_specs

from polopt.envs.control import cartpole
from polopt.envs.control import gymnasium as task_of
from polopt.envs.finite import EnvError
from polopt.ext.torchrl.collector import BatchedCollector
from polopt.ext.torchrl.evaluate import greedy_returns
from polopt.ext.torchrl.networks import distribution_of, make_actor
from polopt.launch.control import prepare
from polopt.launch.off_policy import prepare as prepare_off_policy
from polopt.launch.recipe import RecipeError, load
from polopt.launch.record import read_metrics
from polopt.launch.run import Run
from polopt.launch.train import find_recipe

SCALED = {"gravity": 9.0}  # for Pendulum: an argument of the environment itself


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0"])
def test_specs_hold(name):
    check_env_specs(task_of(name=name).make(3, seed=0))


def test_equals_gymnasium_and_takes_its_arguments():
    env = task_of(name="Pendulum-v1", arguments={"g": 3.0}).make(2, seed=5)
    reference = gymnasium.make("Pendulum-v1", g=3.0)
    first = env.restart()
    # The same seed as the first row: the state behind the observation.
    reference.reset()
    cosine, sine, spin = first[0].double().tolist()
    reference.unwrapped.state = [torch.atan2(torch.tensor(sine), torch.tensor(cosine)).item(), spin]
    for torque in (0.5, -2.0, 5.0):  # the last one is clipped
        observation, reward, terminated, truncated = env.advance(torch.full((2, 1), torque))
        expected, paid, *_ = reference.step([max(-2.0, min(2.0, torque))])
        torch.testing.assert_close(observation[0], torch.tensor(expected), atol=1e-5, rtol=1e-5)
        assert reward[0] == pytest.approx(paid, abs=1e-5)
        assert not terminated.any()
        assert not truncated.any()


def test_collected_transitions_obey_the_dynamics():
    env = task_of(name="CartPole-v1", max_steps=13).make(4, seed=0)
    torch.manual_seed(0)
    batch = BatchedCollector(env, make_actor(env), frames_per_batch=400, total_frames=400).collect()
    reached, reward, terminated = cartpole().physics.step(
        batch["observation"].double(), batch["action"]
    )
    torch.testing.assert_close(batch["next", "observation"].double(), reached, atol=1e-5, rtol=0)
    assert (batch["next", "reward"].squeeze(-1) == reward).all()
    assert torch.equal(batch["next", "terminated"].squeeze(-1), terminated)
    ended = batch["next", "done"].squeeze(-1)
    assert (batch["next", "truncated"].squeeze(-1) & ~terminated).any()
    assert terminated.any()
    after = batch["observation"][:, 1:][ended[:, :-1]]
    assert (after.abs() <= 0.05).all()  # a new start follows each end
    going_on = ~ended[:, :-1]
    assert torch.equal(
        batch["observation"][:, 1:][going_on], batch["next", "observation"][:, :-1][going_on]
    )


def test_a_row_that_ended_waits():
    env = task_of(name="CartPole-v1").make(2, seed=1)
    env.restart()
    rewards = []
    for _ in range(30):
        observation, reward, terminated, _ = env.advance(torch.tensor([1, 0]))
        rewards.append(reward)
    assert terminated.all()
    assert rewards[0].tolist() == [1.0, 1.0]
    assert rewards[-1].tolist() == [0.0, 0.0]
    again = env.restart(torch.tensor([True, False]))
    assert (again[0].abs() <= 0.05).all()
    assert torch.equal(again[1], observation[1])


def test_seeds_fix_a_run():
    def returns(seed):
        env = task_of(name="CartPole-v1").make(5, seed=seed)
        torch.manual_seed(0)
        return greedy_returns(env, distribution_of(make_actor(env)))

    assert torch.equal(returns(3), returns(3))
    assert not torch.equal(returns(3), returns(4))


def test_refusals():
    with pytest.raises(ValueError, match=r"no environment 'CartPol-v1', did you mean 'CartPole-v"):
        task_of(name="CartPol-v1")
    with pytest.raises(ValueError, match=r"observes Discrete.* need a Box of one dimension"):
        task_of(name="FrozenLake-v1")
    with pytest.raises(ValueError, match=r"cannot make 'CartPole-v1' with \{'gravity'"):
        task_of(name="CartPole-v1", arguments=SCALED)
    with pytest.raises(ValueError, match=r"cannot make 'Two-v0' with \{'high': 0.0\}: too low"):
        task_of(name="Two-v0", arguments={"high": 0.0})
    with pytest.raises(ValueError, match=r"observes Box.* a Box of one dimension, not empty"):
        task_of(name="Two-v0", arguments={"width": 0})
    with pytest.raises(ValueError, match=r"takes whole numbers, Box.*int64.* make its action_sp"):
        task_of(name="Two-v0", arguments={"dtype": "int64"})


class Two(gymnasium.Env):
    """Observes two numbers, or `seen` of them, and takes an action of at least −1."""

    def __init__(self, high=1.0, seen=2, first=2, width=2, dtype="float32", reward=0.0):
        assert high > 0, "too low"
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (width,))
        self.action_space = gymnasium.spaces.Box(-1, high, (1,), np.dtype(dtype))
        self.seen, self.first, self.reward = seen, first, reward

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.first, np.float32), {}

    def step(self, action):
        return np.zeros(self.seen, np.float32), self.reward, False, False, {}


gymnasium.register("Two-v0", Two, max_episode_steps=5)


@pytest.mark.parametrize("length", [1, 3])
def test_an_observation_of_another_shape_is_refused(length):
    env = task_of(name="Two-v0", arguments={"seen": length}).make(2)
    env.restart()
    with pytest.raises(EnvError, match=rf"shape \[{length}\], its observation_space declares \[2"):
        env.advance(torch.zeros(2, 1))
    with pytest.raises(EnvError, match="environment 0 of Two-v0 gave an observation of shape"):
        task_of(name="Two-v0", arguments={"first": length}).make(2).restart()


def test_a_reward_that_is_no_number_is_refused():
    env = task_of(name="Two-v0", arguments={"reward": [1.0, 2.0]}).make(2)
    env.restart()
    with pytest.raises(
        EnvError, match=r"0 of Two-v0 gave the reward \[1.0, 2.0\].* each must be one number"
    ):
        env.advance(torch.zeros(2, 1))


def test_actions_without_bounds_are_refused_off_policy():
    tree = load(find_recipe("pendulum-sac"))
    prepare_off_policy(tree | {"task": {"use": "gymnasium", "name": "Two-v0"}}, name="test")
    tree["task"] = {"use": "gymnasium", "name": "Two-v0", "arguments": {"high": math.inf}}
    with pytest.raises(RecipeError, match=r"actions between two finite bounds.*\[inf\]: give"):
        prepare_off_policy(tree, name="test")


def test_a_recipe_trains_and_resumes(tmp_path):
    def job(frames):
        tree = {
            "project": "polopt",
            "seed": 0,
            "task": {"use": "gymnasium", "name": "CartPole-v1", "max_steps": 50},
            "algorithm": {"use": "ppo"},
            "collector": {"num_envs": 4, "frames_per_batch": 64, "total_frames": frames},
            "update": {"epochs": 1, "minibatch_size": 64},
            "evaluation": {"every": 64, "episodes": 3, "stop_at": None},
        }
        return prepare(tree, name="test")

    for frames, resume in ((128, False), (256, True)):
        prepared = job(frames)
        run = Run(tmp_path, None if resume else prepared.tree)
        summary = run.finish(prepared.train(run))
    assert summary["frames"] == 256
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [m["step"] for m in lines if "greedy_return" in m] == [0, 64, 128, 192, 256]
    assert all(m["return_mean"] <= 50 for m in lines if "return_mean" in m)


@pytest.mark.slow
def test_lunar_lander():
    pytest.importorskip("Box2D")
    env = task_of(name="LunarLander-v3").make(2, seed=0)
    check_env_specs(env)
    assert task_of(name="LunarLander-v3").bar == 200

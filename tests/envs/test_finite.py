"""Numbers that are not finite: found where they come up, and said or dropped."""

import pytest
import torch

pytest.importorskip("torchrl")

from torchrl.envs import GymEnv, check_env_specs

from polopt.envs.control import cartpole, gymnasium, pendulum
from polopt.envs.finite import EnvError, FiniteEnv


def broken(env, entry, *, row=1, value=float("nan")):
    """Let one row give a number that is not finite, from its second step on."""
    advance, count = env.advance, []

    def step(action):
        outcome = [e.clone() for e in advance(action)]
        count.append(0)
        if len(count) > 1:
            outcome[entry][row] = value
        return tuple(outcome)

    env.advance = step
    return env


@pytest.mark.parametrize("task", [cartpole(), pendulum(), gymnasium(name="CartPole-v1")])
def test_a_sound_environment_is_passed_on(task):
    plain, watched = task.make(3, seed=0), FiniteEnv(task.make(3, seed=0))
    assert torch.equal(plain.restart(), watched.restart())
    torch.manual_seed(0)
    for _ in range(20):
        action = plain.action_spec.rand()
        for one, other in zip(plain.advance(action), watched.advance(action), strict=True):
            assert torch.equal(one, other)
        done = one | other
        if done.any():
            assert torch.equal(plain.restart(done), watched.restart(done))
    assert not watched.broken.any()
    assert watched.exact is plain.exact
    saved = watched.snapshot()
    assert saved.keys() == plain.snapshot().keys()
    check_env_specs(watched)
    watched.restore(saved)
    if plain.exact:
        assert torch.equal(watched.reset()["observation"], plain._observe())
    watched.close()


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        (0, float("nan"), r"the observation of environment 1 is \[nan, .*\] at step 1 of a test"),
        (1, float("-inf"), r"the reward of environment 1 is -inf at step 1 of a test"),
    ],
)
def test_the_environment_and_the_step_are_named(entry, value, message):
    env = FiniteEnv(broken(pendulum().make(3, seed=0), entry, value=value))
    env.restart()
    env.begin("a test")
    env.advance(torch.zeros(3, 1))
    with pytest.raises(FloatingPointError, match=message):
        env.advance(torch.zeros(3, 1))


def test_dropped_environments_end_their_episode_and_are_remembered():
    env = FiniteEnv(broken(pendulum().make(3, seed=0), 0), drop=True)
    env.restart()
    env.advance(torch.zeros(3, 1))
    assert not env.broken.any()
    observation, reward, terminated, truncated = env.advance(torch.zeros(3, 1))
    assert observation[1].tolist() == [0.0, 0.0, 0.0]
    assert reward[1] == 0.0
    assert not terminated.any()
    assert truncated.tolist() == [False, True, False]
    assert env.broken.tolist() == [False, True, False]
    assert observation[[0, 2]].abs().sum(-1).all()
    env.begin("what follows")
    assert not env.broken.any()


def test_large_numbers_whose_sum_overflows_are_sound():
    env = pendulum().make(2, seed=0)
    flag = torch.zeros(2, dtype=torch.bool)
    env.advance = lambda action: (torch.full((2, 3), 3e38), torch.zeros(2), flag, flag)
    env = FiniteEnv(env)
    assert env.advance(torch.zeros(2, 1))[0].isfinite().all()


@pytest.mark.parametrize("drop", [False, True])
def test_an_episode_that_begins_so_is_an_error(drop):
    env = FiniteEnv(pendulum().make(2, seed=0), drop=drop)
    env.env.restart = lambda mask=None: torch.tensor([[0.0, 0.0, 0.0], [0.0, float("nan"), 0.0]])
    with pytest.raises(FloatingPointError, match=r"first observation .* of environment 1 is"):
        env.restart()


def test_a_reward_with_another_shape_is_refused():
    env = pendulum().make(4, seed=0)
    advance = env.advance
    env.advance = lambda action: [
        e.unsqueeze(-1) if i == 1 else e for i, e in enumerate(advance(action))
    ]
    env = FiniteEnv(env)
    with pytest.raises(EnvError, match=r"must have shape \[4\], got \[4, 1\], \[4\], \[4\]"):
        env.advance(torch.zeros(4, 1))


def test_other_environments_are_refused():
    with pytest.raises(EnvError, match=r"must make a polopt.envs.batched.VectorEnv, got a GymEnv"):
        FiniteEnv(GymEnv("CartPole-v1"))
    resetting = GymEnv("CartPole-v1", num_envs=2)
    with pytest.raises(ValueError, match="resets by itself"):
        FiniteEnv(resetting)
    resetting.close()

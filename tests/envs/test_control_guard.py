"""Environments that corrupt transitions are refused, sound ones are not."""

import pytest

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("torchrl")

from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import GymEnv, GymWrapper, RewardSum, TransformedEnv

from polopt.envs.control import cartpole
from polopt.envs.guard import check_transitions


def make():
    return gymnasium.make("CartPole-v1")


def test_gymenv_with_num_envs_is_refused():
    env = GymEnv("CartPole-v1", num_envs=2)
    try:
        with pytest.raises(ValueError, match="NEXT_STEP"):
            check_transitions(env)
        with pytest.raises(ValueError, match="NEXT_STEP"):
            check_transitions(TransformedEnv(env, RewardSum()))
    finally:
        env.close()


def test_vector_environment_with_a_patched_mode_is_refused():
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point")
    vector.unwrapped.autoreset_mode = AutoresetMode.DISABLED
    with pytest.raises(ValueError, match="NEXT_STEP"):
        check_transitions(GymWrapper(vector))


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, AutoresetMode.SAME_STEP])
def test_sound_vector_environments_pass(mode):
    check_transitions(GymWrapper(SyncVectorEnv([make] * 2, autoreset_mode=mode)))


def test_single_and_batched_environments_pass(monkeypatch):
    single = GymEnv("CartPole-v1")
    check_transitions(single)
    # What a vector environment of gymnasium 1.1 leaves behind in what its copies share.
    monkeypatch.setitem(single.metadata, "autoreset_mode", AutoresetMode.NEXT_STEP)
    check_transitions(single)
    check_transitions(cartpole().make(2))

"""BatchedCollector against TorchRL's own collector."""

import pytest
import torch

pytest.importorskip("torchrl")

from torchrl.collectors import Collector
from torchrl.envs import GymEnv

from polopt.envs.control import cartpole, pendulum
from polopt.ext.torchrl.collector import BatchedCollector
from polopt.ext.torchrl.networks import make_actor


def layout(batch):
    keys = batch.keys(include_nested=True, leaves_only=True)
    return {key: (tuple(batch[key].shape), batch[key].dtype) for key in keys}


@pytest.mark.parametrize("task", [cartpole(), pendulum()], ids=lambda task: task.name)
def test_same_layout_and_same_data_as_the_stock_collector(task):
    torch.manual_seed(0)
    actor = make_actor(task.make(1, seed=0))
    batches = []
    for kind in (Collector, BatchedCollector):
        env = task.make(4, seed=1)
        collector = kind(env, actor, frames_per_batch=4 * 60, total_frames=4 * 180)
        torch.manual_seed(2)
        batches.append(list(collector))
    for stock, ours in zip(*batches, strict=True):
        parameters = {"logits", "loc", "scale"}
        expected = {k: v for k, v in layout(stock).items() if k not in parameters}
        assert layout(ours) == expected
        assert ours.names == stock.names
        for key in expected:
            torch.testing.assert_close(ours[key], stock[key], msg=str(key))


def test_a_loaded_collector_continues():
    task = cartpole()
    actor = make_actor(task.make(1))

    def collector():
        return BatchedCollector(task.make(3, seed=0), actor, frames_per_batch=90, total_frames=360)

    torch.manual_seed(0)
    first = collector()
    first.collect()
    state, generator = first.state_dict(), torch.get_rng_state()
    expected = list(first)
    second = collector()
    second.load_state_dict(state)
    torch.set_rng_state(generator)
    batches = list(second)
    assert len(batches) == len(expected) == 3
    for ours, theirs in zip(batches, expected, strict=True):
        assert (ours == theirs).all()


def test_bad_input_is_named():
    task = cartpole()
    env = task.make(3)
    actor = make_actor(env)
    with pytest.raises(ValueError, match="multiple of the 3 environments, got 32"):
        BatchedCollector(env, actor, frames_per_batch=32, total_frames=64)
    with pytest.raises(ValueError, match="got a GymEnv: use torchrl"):
        BatchedCollector(GymEnv("CartPole-v1"), actor, frames_per_batch=32, total_frames=64)
    corrupting = GymEnv("CartPole-v1", num_envs=2)
    try:
        with pytest.raises(ValueError, match="NEXT_STEP"):
            BatchedCollector(corrupting, actor, frames_per_batch=32, total_frames=64)
    finally:
        corrupting.close()

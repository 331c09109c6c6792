"""Prioritised replay in TorchRL's buffers."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("torchrl")
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer

from polopt.ext.torchrl.replay import PrioritizedReplayBuffer, PrioritizedSampler


def items(count: int, start: int = 0) -> TensorDict:
    return TensorDict({"x": torch.arange(start, start + count).float().unsqueeze(-1)}, [count])


def make(kind: type[ReplayBuffer], capacity: int = 50, **settings) -> ReplayBuffer:
    sampler = PrioritizedSampler(capacity, **{"alpha": 1.0, "eps": 0.5, "seed": 0, **settings})
    named = {} if kind is ReplayBuffer else {"priority_key": "td_error"}
    storage = LazyTensorStorage(capacity)
    return kind(storage=storage, sampler=sampler, batch_size=16, **named)


@pytest.mark.parametrize("kind", [TensorDictReplayBuffer, PrioritizedReplayBuffer])
@pytest.mark.parametrize("shape", [(16,), (16, 1)])
def test_errors_in_a_sample_become_priorities(
    kind: type[TensorDictReplayBuffer], shape: tuple[int, ...]
) -> None:
    buffer = make(kind)
    buffer.extend(items(30))
    sample = buffer.sample()
    assert sample["priority_weight"].eq(1.0).all()
    assert torch.equal(sample["x"].squeeze(-1).long(), sample["index"])
    sample["td_error"] = torch.linspace(-3, 3, 16).reshape(shape)
    buffer.update_tensordict_priority(sample)
    values = buffer.sampler.priorities.tree.values
    index = sample["index"]
    assert torch.equal(index, index.unique())
    torch.testing.assert_close(values[index], torch.linspace(-3, 3, 16).double().abs() + 0.5)
    assert values[30:].eq(0).all()


def test_the_plain_buffer_takes_errors_by_index() -> None:
    buffer = make(ReplayBuffer)
    buffer.extend(items(30))
    _, info = buffer.sample(return_info=True)
    buffer.update_priority(info["index"], torch.full((16,), 2.0))
    assert buffer.sampler.priorities.tree.values[info["index"]].eq(2.5).all()


def test_squared_errors_lose_their_square() -> None:
    buffer = make(PrioritizedReplayBuffer, squared=True)
    buffer.extend(items(30))
    sample = buffer.sample()
    sample["td_error"] = torch.full((16,), 9.0)
    buffer.update_tensordict_priority(sample)
    assert buffer.sampler.priorities.tree.values[sample["index"]].eq(3.5).all()


@pytest.mark.parametrize("kind", [TensorDictReplayBuffer, PrioritizedReplayBuffer])
def test_single_items_take_the_largest_priority(kind: type[TensorDictReplayBuffer]) -> None:
    buffer = make(kind, squared=True)
    buffer.extend(items(20))
    sample = buffer.sample()
    sample["td_error"] = torch.full((16,), 16.0)
    buffer.update_tensordict_priority(sample)
    for i in range(5):
        buffer.add(items(1, 20 + i)[0])
    values = buffer.sampler.priorities.tree.values
    torch.testing.assert_close(values[20:25], torch.full((5,), 4.5).double())
    assert buffer.sampler.priorities.highest == pytest.approx(4.5)


def test_late_updates_for_overwritten_items_are_ignored() -> None:
    buffer = make(PrioritizedReplayBuffer, capacity=20)
    buffer.extend(items(20))
    sample = buffer.sample()
    buffer.extend(items(10, 20))  # slots 0 to 9 again
    sample["td_error"] = torch.full((16,), 4.0)
    buffer.update_tensordict_priority(sample)
    values = buffer.sampler.priorities.tree.values
    assert values[:10].eq(1.0).all()
    assert values[sample["index"][sample["index"] >= 10]].eq(4.5).all()


def test_torchrl_losses_find_the_weights() -> None:
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss

    buffer = make(PrioritizedReplayBuffer, squared=True, beta=1.0)
    data = items(30)
    flags = {k: torch.zeros(30, 1, dtype=torch.bool) for k in ("done", "terminated")}
    data["next"] = TensorDict({"x": data["x"] + 1, "reward": data["x"], **flags}, [30])
    data["action"] = torch.zeros(30, dtype=torch.int64)
    buffer.extend(data)
    torch.manual_seed(0)
    net = torch.nn.Linear(1, 2)
    actor = QValueActor(net, in_keys=["x"], action_space="categorical")
    loss = DQNLoss(actor, action_space="categorical", reduction="none")
    for _ in range(2):
        sample = buffer.sample()
        with torch.no_grad():
            after = net(sample["next", "x"]).max(-1).values
            target = sample["next", "reward"].squeeze(-1) + 0.99 * after
            error = net(sample["x"])[:, 0] - target
        found = loss(sample)["loss"]
        wanted = sample["priority_weight"] * error**2
        torch.testing.assert_close(found.flatten(), wanted, rtol=1e-4, atol=1e-4)
        buffer.update_tensordict_priority(sample)
        values = buffer.sampler.priorities.tree.values[sample["index"]]
        torch.testing.assert_close(values.float(), error.abs() + 0.5, rtol=1e-4, atol=1e-4)
    assert sample["priority_weight"].unique().numel() > 1


def test_a_saved_buffer_continues_exactly(tmp_path: Path) -> None:
    first, second, third = (make(PrioritizedReplayBuffer, seed=None) for _ in range(3))
    first.extend(items(30))
    sample = first.sample()
    sample["td_error"] = torch.rand(16)
    first.update_tensordict_priority(sample)
    first.dumps(tmp_path)
    second.loads(tmp_path)
    third.load_state_dict(first.state_dict())
    for _ in range(3):
        wanted = first.sample()
        for other in (second, third):
            assert (other.sample() == wanted).all()


def test_the_buffers_generator_is_used() -> None:
    buffers = [make(PrioritizedReplayBuffer, seed=s) for s in (1, 2)]
    for buffer in buffers:
        buffer.set_rng(torch.Generator().manual_seed(7))
        buffer.extend(items(30))
    assert torch.equal(buffers[0].sample()["index"], buffers[1].sample()["index"])


def test_emptied_it_starts_anew() -> None:
    buffer = make(PrioritizedReplayBuffer)
    buffer.extend(items(30))
    buffer.empty()
    buffer.extend(items(20))
    assert buffer.sample()["index"].max() < 20


def test_what_it_cannot_serve_is_refused() -> None:
    sampler = PrioritizedSampler(40)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(20, ndim=2), sampler=sampler, batch_size=4
    )
    buffer.extend(TensorDict({"x": torch.zeros(5, 2, 1)}, [5, 2]))
    with pytest.raises(ValueError, match="storage must have one dimension, got 2"):
        buffer.sample()
    buffer = make(PrioritizedReplayBuffer)
    buffer.extend(items(30))
    with pytest.raises(ValueError, match="the storage holds 30 items and the sampler knows 0"):
        PrioritizedSampler(50).sample(buffer.storage, 4)
    with pytest.raises(ValueError, match="number of stored items 30, got 40"):
        buffer.sample(40)

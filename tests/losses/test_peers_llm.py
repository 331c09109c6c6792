"""TorchRL's losses for language models on the same inputs: an upstream change shows here."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase

from polopt.losses import cispo, dapo, policy_loss

llm = pytest.importorskip("torchrl.objectives.llm")


def batch():
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(7) < torch.tensor([[7], [3], [1], [5]])
    old = -torch.rand(4, 7, generator=g)
    new = old + 0.5 * torch.randn(4, 7, generator=g)
    return new, old, torch.randn(4, 1, generator=g), mask


def theirs(kind, new, old, advantage, mask, **settings):
    """Return TorchRL's loss and its gradient with respect to the log-probabilities."""
    new = new.clone().requires_grad_()

    class Given(TensorDictModuleBase):
        in_keys = ("tokens",)
        out_keys = ("log_probs",)

        def get_dist(self, tensordict, **_):
            return SimpleNamespace(log_prob=lambda action: new, mask=mask)

    loss = kind(actor_network=Given(), entropy_bonus=False, **settings)
    keys, data = loss.tensor_keys, TensorDict({}, [len(new)])
    data.set(keys.action, torch.zeros(new.shape, dtype=torch.long))
    data.set(keys.sample_log_prob, old)
    data.set(keys.advantage, advantage[..., None].expand(*new.shape, 1))
    value = loss(data).loss_objective
    return value, torch.autograd.grad(value, new)[0]


def ours(objective, new, old, advantage, mask):
    new = new.clone().requires_grad_()
    value = policy_loss(new, old, advantage, mask, objective=objective)["loss_objective"]
    return value, torch.autograd.grad(value, new)[0]


@pytest.mark.parametrize("high", [0.2, 0.28])
def test_grpo_agrees(high):
    pytest.importorskip("torchrl", minversion="0.14", reason="two bounds came with 0.14")
    expected = theirs(llm.GRPOLoss, *batch(), clip_epsilon=(0.2, high))
    torch.testing.assert_close(ours(dapo(high=high).objective, *batch()), expected)


def test_cispo_still_drops_the_gradient_that_cispo_keeps():
    """If this fails, TorchRL has mended it: say so in docs/algorithms.md and docs/parity.md."""
    pytest.importorskip("torchrl", minversion="0.14", reason="two bounds came with 0.14")
    new, old, advantage, mask = batch()
    clipped = mask & ((new - old).exp() > 1.28)
    assert clipped.any()
    _, lost = theirs(llm.CISPOLoss, new, old, advantage, mask, clip_epsilon=(0.2, 0.28))
    _, kept = ours(cispo(high=0.28).objective, new, old, advantage, mask)
    assert (lost[clipped & (advantage > 0)] == 0).all()
    assert (kept[clipped] != 0).all()

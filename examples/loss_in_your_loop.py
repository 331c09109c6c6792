"""Your own TorchRL loop, in which only the loss is polopt's.

Networks, collector, advantage, replay buffer and optimizer are TorchRL's and torch's; the line that
differs from TorchRL's own PPO is `loss = PolicyLoss(…)`, here with DAPO's clip-higher. (The
environment is a batched CartPole, so that this takes seconds; any of TorchRL's will do.)

    python examples/loss_in_your_loop.py
"""

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives.value import GAE

from polopt.envs.control import cartpole
from polopt.losses import ppo
from polopt.losses.modules import PolicyLoss


def layers(outputs: int) -> nn.Module:
    """Build a network for CartPole's four observations."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, outputs))


def train(env: EnvBase, frames: int = 12_288) -> list[float]:
    """Train, and return the steps per episode of each batch."""
    actor = ProbabilisticActor(
        TensorDictModule(layers(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(layers(1), in_keys=["observation"])
    advantage = GAE(gamma=0.98, lmbda=0.9, value_network=critic, average_gae=True)
    loss = PolicyLoss(ppo(clip=0.2, clip_high=0.28), actor, critic)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1024), sampler=SamplerWithoutReplacement(), batch_size=256
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=4e-3)
    lengths = []
    for batch in Collector(env, actor, frames_per_batch=1024, total_frames=frames):
        with torch.no_grad():
            advantage(batch)
        buffer.extend(batch.reshape(-1))
        for _ in range(8):
            for minibatch in buffer:
                terms = loss(minibatch)
                sum(term for name, term in terms.items() if name.startswith("loss_")).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        buffer.empty()
        lengths.append(batch.numel() / max(int(batch["next", "done"].sum()), 1))
    return lengths


if __name__ == "__main__":
    torch.manual_seed(0)
    print("steps per episode:", *(f"{length:.0f}" for length in train(cartpole().make(16, seed=0))))

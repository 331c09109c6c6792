"""TorchRL's PPO, in which only the advantage is polopt's.

`GAEAdvantage` takes the place of TorchRL's `GAE`, and fills in the same entries for `ClipPPOLoss`.
It is quicker, and refuses batches whose layout would give wrong advantages in silence: time on
the first axis, or a time limit passed as an end.

    python examples/advantage_in_your_loop.py
"""

import torch
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from torchrl.objectives import ClipPPOLoss

from polopt.envs.control import cartpole
from polopt.ext.torchrl.networks import make_actor, make_critic
from polopt.ext.torchrl.transforms import GAEAdvantage


def train(env: EnvBase, frames: int = 12_288) -> list[float]:
    """Train, and return the steps per episode of each batch."""
    actor, critic = make_actor(env), make_critic(env)
    advantage = GAEAdvantage(critic, gamma=0.98, lam=0.9, whiten=True)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.0, loss_critic_type="l2")
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
    lengths = []
    for batch in Collector(env, actor, frames_per_batch=1024, total_frames=frames):
        flat = advantage(batch).reshape(-1)
        for _ in range(6):
            for index in torch.randperm(len(flat)).split(256):
                terms = loss(flat[index])
                sum(term for name, term in terms.items() if name.startswith("loss_")).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        lengths.append(batch.numel() / max(int(batch["next", "done"].sum()), 1))
    return lengths


if __name__ == "__main__":
    torch.manual_seed(0)
    print("steps per episode:", *(f"{length:.0f}" for length in train(cartpole().make(16, seed=0))))

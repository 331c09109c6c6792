"""polopt's loss in TorchRL's `Trainer`.

`PolicyLoss` names its terms as TorchRL's losses do (`loss_*` is summed and differentiated, the rest
is logged), so the trainer takes it as it is.

    python examples/loss_in_torchrl_trainer.py
"""

import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import EnvBase
from torchrl.trainers import ReplayBufferTrainer, Trainer

from polopt.envs.control import cartpole
from polopt.ext.torchrl.networks import make_actor, make_critic
from polopt.ext.torchrl.transforms import GAEAdvantage
from polopt.losses import ppo
from polopt.losses.modules import PolicyLoss


def train(env: EnvBase, frames: int = 12_288) -> list[float]:
    """Train, and return the steps per episode of each batch."""
    actor, critic = make_actor(env), make_critic(env)
    loss = PolicyLoss(ppo(clip=0.2), actor, critic)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(1024), sampler=SamplerWithoutReplacement(), batch_size=256
    )
    trainer = Trainer(
        collector=Collector(env, actor, frames_per_batch=1024, total_frames=frames),
        total_frames=frames,
        frame_skip=1,
        optim_steps_per_batch=24,  # six passes of four minibatches
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=3e-3),
        clip_norm=0.5,
        progress_bar=False,
    )
    trainer.register_op("batch_process", GAEAdvantage(critic, gamma=0.98, lam=0.9, whiten=True))
    ReplayBufferTrainer(buffer, flatten_tensordicts=True).register(trainer)
    lengths = []

    def note(batch: TensorDictBase) -> None:
        lengths.append(batch.numel() / max(int(batch["next", "done"].sum()), 1))

    trainer.register_op("pre_steps_log", note)
    trainer.train()
    return lengths


if __name__ == "__main__":
    torch.manual_seed(0)
    print("steps per episode:", *(f"{length:.0f}" for length in train(cartpole().make(16, seed=0))))

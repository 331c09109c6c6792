"""TorchRL's own PPO, with the values of its example for MuJoCo."""

from collections.abc import Iterator
from typing import Any

import torch
from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs import (
    ClipTransform,
    DoubleToFloat,
    GymEnv,
    RewardSum,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, group_optimizers
from torchrl.objectives.value import GAE

from polopt.launch.bench_meter import TASKS, Meter
from polopt.launch.bench_table import Trial

__all__ = ["ppo"]


def ppo(trial: Trial) -> dict[str, Any]:
    """Train it with `Collector`, `GAE` and `ClipPPOLoss`."""
    task = trial.task
    gamma, lr, bonus = {"pendulum": (0.9, 1e-3, 0.0), "acrobot": (0.99, 3e-4, 0.01)}.get(
        task, (0.99, 3e-4, 0.0)
    )
    size, total, epochs, piece = 2048, 1_000_000, 10, 64
    torch.manual_seed(trial.seed)
    discrete = task != "pendulum"
    base = GymEnv(TASKS[task]().name, **({"categorical_action_encoding": True} if discrete else {}))
    norm: Any = VecNorm(in_keys=["observation"], decay=0.99999, eps=1e-2)
    env = TransformedEnv(base)
    for transform in (norm, ClipTransform(in_keys=["observation"], low=-10, high=10), RewardSum(),
                      StepCounter(), DoubleToFloat()):  # fmt: skip
        env.append_transform(transform)
    env.set_seed(trial.seed)
    width = env.observation_spec["observation"].shape[-1]
    net, critic_net = (
        MLP(in_features=width, out_features=outputs, num_cells=[64, 64], activation_class=nn.Tanh)
        for outputs in (base.action_spec.space.n if discrete else 1, 1)  # type: ignore[union-attr]
    )  # fmt: skip
    for layer in (*net.modules(), *critic_net.modules()):
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, 1.0)
            nn.init.zeros_(layer.bias)
    keys, head = ["logits"], net
    if not discrete:
        keys = ["loc", "scale"]
        head = nn.Sequential(net, AddStateIndependentNormalScale(1, scale_lb=1e-8))  # type: ignore[arg-type]
    bounds = {} if discrete else {"low": -2.0, "high": 2.0, "tanh_loc": False}
    actor = ProbabilisticActor(
        TensorDictModule(head, in_keys=["observation"], out_keys=keys),  # type: ignore[arg-type]
        in_keys=keys,
        distribution_class=Categorical if discrete else TanhNormal,
        distribution_kwargs=bounds,
        return_log_prob=True,
    )
    critic = ValueOperator(critic_net, in_keys=["observation"])
    collector = Collector(env, actor, frames_per_batch=size, total_frames=total)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=SamplerWithoutReplacement(), batch_size=piece
    )
    gae = GAE(gamma=gamma, lmbda=0.95, value_network=critic, average_gae=False)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, loss_critic_type="l2",
                       entropy_coeff=bonus, critic_coeff=0.25,
                       normalize_advantage=True)  # fmt: skip
    optimizer = group_optimizers(
        *(torch.optim.Adam(part.parameters(), lr=lr, eps=1e-5) for part in (actor, critic))
    )

    @torch.no_grad()
    def act(observation: Tensor) -> Tensor:
        shift, scale = norm.loc["observation"], norm.scale["observation"]
        scaled = ((observation - shift) / scale).clamp(-10, 10).float()
        out = net(scaled)
        return out.argmax(-1) if discrete else 2.0 * out.tanh()

    meter, done = Meter(trial, most=total), 0
    batches: Iterator[Any] = iter(collector)
    while True:
        batch = next(batches)
        for _ in range(epochs):
            with torch.no_grad():
                batch = gae(batch)
            buffer.extend(batch.reshape(-1))
            for sample in buffer:
                for group in optimizer.param_groups:
                    group["lr"] = lr if task == "pendulum" else lr * (1 - done / total)
                terms = loss(sample)
                optimizer.zero_grad()
                sum(v for k, v in terms.items() if k.startswith("loss_")).backward()  # type: ignore[union-attr]
                optimizer.step()
        done += size
        collector.update_policy_weights_()
        if meter.ends(done, act):
            collector.shutdown()
            return meter.result()

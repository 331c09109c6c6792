"""TorchRL's own PPO, with the values of its example for MuJoCo or of rl-zoo3."""

from collections.abc import Iterator
from dataclasses import dataclass
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
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNorm,
)
from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss, group_optimizers
from torchrl.objectives.value import GAE

from polopt.launch.bench.meter import TASKS, Meter
from polopt.launch.bench.table import Trial

__all__ = ["ppo", "zoo"]


@dataclass(frozen=True, kw_only=True)
class _Values:
    """Of a run; by default those of TorchRL's example."""

    copies: int = 1
    batch: int = 2048
    minibatch: int = 64
    epochs: int = 10
    frames: int = 1_000_000
    lr: float = 3e-4
    lr_falls: bool = True
    clip_falls: bool = False
    gamma: float = 0.99
    lam: float = 0.95
    entropy: float = 0.0
    critic: float = 0.25
    normalised: bool = True


_EXAMPLE = {
    "cartpole": _Values(),
    "acrobot": _Values(entropy=0.01),
    "pendulum": _Values(gamma=0.9, lr=1e-3, lr_falls=False),
}
_ZOO = _Values(
    copies=8, batch=256, minibatch=256, epochs=20, frames=100_000, lr=1e-3, clip_falls=True,
    gamma=0.98, lam=0.8, critic=0.5, normalised=False,
)  # fmt: skip


def ppo(trial: Trial) -> dict[str, Any]:
    """Train it with `Collector`, `GAE` and `ClipPPOLoss`."""
    return _train(trial, _EXAMPLE[trial.task])


def zoo(trial: Trial) -> dict[str, Any]:
    """Train it on CartPole with the values of rl-zoo3."""
    return _train(trial, _ZOO)


def _train(trial: Trial, values: _Values) -> dict[str, Any]:
    torch.manual_seed(trial.seed)
    discrete = trial.task != "pendulum"
    env, norm = _environment(trial, values, discrete=discrete)
    width = env.observation_spec["observation"].shape[-1]
    actions = env.action_spec_unbatched.space.n if discrete else 1  # type: ignore[union-attr]
    net, critic_net = (
        MLP(in_features=width, out_features=outputs, num_cells=[64, 64], activation_class=nn.Tanh)
        for outputs in (actions, 1)
    )
    for layer in (*net.modules(), *critic_net.modules()):
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight, 1.0)
            nn.init.zeros_(layer.bias)
    actor, critic = _actor(net, discrete), ValueOperator(critic_net, in_keys=["observation"])
    collector = Collector(
        env,
        actor,
        frames_per_batch=values.batch,
        total_frames=values.frames // values.batch * values.batch,
    )
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(values.batch),
        sampler=SamplerWithoutReplacement(),
        batch_size=values.minibatch,
    )
    gae = GAE(gamma=values.gamma, lmbda=values.lam, value_network=critic, average_gae=False)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, loss_critic_type="l2",
                       entropy_coeff=values.entropy, critic_coeff=values.critic,
                       normalize_advantage=True)  # fmt: skip
    optimizer = group_optimizers(
        *(torch.optim.Adam(part.parameters(), lr=values.lr, eps=1e-5) for part in (actor, critic))
    )

    @torch.no_grad()
    def act(observation: Tensor) -> Tensor:
        if norm is not None:
            shift, scale = norm.loc["observation"], norm.scale["observation"]
            observation = ((observation - shift) / scale).clamp(-10, 10).float()
        out = net(observation)
        return out.argmax(-1) if discrete else 2.0 * out.tanh()

    meter, done = Meter(trial, most=values.frames), 0
    batches: Iterator[Any] = iter(collector)
    while True:
        batch = next(batches)
        rest = 1 - done / values.frames
        for group in optimizer.param_groups:
            group["lr"] = values.lr * (rest if values.lr_falls else 1.0)
        if values.clip_falls:
            clip: Any = loss.clip_epsilon
            clip.fill_(0.2 * rest)
        for _ in range(values.epochs):
            with torch.no_grad():
                batch = gae(batch)
            buffer.extend(batch.reshape(-1))
            for sample in buffer:
                terms = loss(sample)
                optimizer.zero_grad()
                sum(v for k, v in terms.items() if k.startswith("loss_")).backward()  # type: ignore[union-attr]
                optimizer.step()
        done += values.batch
        collector.update_policy_weights_()
        if meter.ends(done, act):
            collector.shutdown()
            return meter.result()


def _environment(trial: Trial, values: _Values, *, discrete: bool) -> tuple[Any, Any]:
    """Return the environment, and what scales its observations or None."""
    settings = {"categorical_action_encoding": True} if discrete else {}

    def make() -> GymEnv:
        return GymEnv(TASKS[trial.task]().name, **settings)

    env = TransformedEnv(make() if values.copies == 1 else SerialEnv(values.copies, make))
    norm = None
    if values.normalised:
        norm = VecNorm(in_keys=["observation"], decay=0.99999, eps=1e-2)
        env.append_transform(norm)
        env.append_transform(ClipTransform(in_keys=["observation"], low=-10, high=10))
    for transform in (RewardSum(), StepCounter(), DoubleToFloat()):
        env.append_transform(transform)
    env.set_seed(trial.seed)
    return env, norm


def _actor(net: nn.Module, discrete: bool) -> ProbabilisticActor:
    keys, head = ["logits"], net
    if not discrete:
        keys = ["loc", "scale"]
        head = nn.Sequential(net, AddStateIndependentNormalScale(1, scale_lb=1e-8))  # type: ignore[arg-type]
    return ProbabilisticActor(
        TensorDictModule(head, in_keys=["observation"], out_keys=keys),  # type: ignore[arg-type]
        in_keys=keys,
        distribution_class=Categorical if discrete else TanhNormal,
        distribution_kwargs={} if discrete else {"low": -2.0, "high": 2.0, "tanh_loc": False},
        return_log_prob=True,
    )

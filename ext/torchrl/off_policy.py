"""TorchRL's off-policy losses, wired: what they leave to their user is done here.

- Losses are taken per transition, so that importance weights count where prioritised replay puts
  them, in the mean over the critic's losses. (Handed to TorchRL, they would also weigh the policy
  and the temperature, and divide by their sum, which undoes that they are at most one.)
- Priorities are |δ|, the larger one of twin critics. (TorchRL writes δ² for DQN, DDPG and TD3.)
- TD3's policy and all targets wait for `policy_every`; TorchRL's loss has no delay. Its smoothing
  is scaled to the range of each action.
- The loss of the TD error is stated; TorchRL's default differs between losses.
- SAC's target entropy follows the range of actions; TorchRL's is the same for ±0.01 and ±100.
- Episodes that were cut short bootstrap, those that terminated do not.
- DQN's loss is three tensor operations, which cost less than the copies of the batch and the
  swaps of parameters in `DQNLoss.forward`. They are done here, on `DQNLoss`'s parameters and
  targets, and give its numbers.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives import (
    DDPGLoss,
    DiscreteSACLoss,
    DQNLoss,
    HardUpdate,
    LossModule,
    SACLoss,
    SoftUpdate,
    TD3Loss,
    distance_loss,
)

from polopt.envs.batched import VectorEnv
from polopt.ext.metrics import Stopwatch
from polopt.ext.torchrl.off_policy_networks import (
    DeterministicPolicy,
    GaussianPolicy,
    LogitPolicy,
    QOfActions,
    QOfStateAction,
    widths_of,
    with_twins,
)
from polopt.losses import OffPolicy

__all__ = ["OffPolicyUpdate"]

Entries = TensorDictBase | dict[str, Tensor]

_SHARED = {"reduction": "none", "use_prioritized_weights": False}


class OffPolicyUpdate:
    """The networks of an off-policy algorithm, and optimizer steps on replayed transitions.

    Nothing is read back from the device between steps.

    Args:
        algorithm: Which loss, and what goes with it.
        env: Says what is observed and done.
        hidden: Widths of the layers of every network.
        eps: Of Adam, whose learning rate is set by `set_lr`.
        max_grad_norm: The gradient of each network is scaled down to this norm; None leaves it.
        reward: Entry of `next` that holds the reward.
        stopwatch: Books the phases loss, backward and optimizer.

    Attributes:
        loss: TorchRL's loss, which holds all parameters and targets.
        updates: Optimizer steps of the critic so far.
    """

    def __init__(
        self,
        algorithm: OffPolicy,
        env: VectorEnv,
        *,
        hidden: Sequence[int] = (256, 256),
        eps: float = 1e-8,
        max_grad_norm: float | None = None,
        reward: str = "reward",
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.algorithm, self.max_grad_norm = algorithm, max_grad_norm
        self._wiring = _WIRING[algorithm.loss]
        self.loss = self._wiring.make(algorithm, env, hidden)
        self.loss.set_keys(reward=reward)
        if algorithm.tau == 1.0:
            # TorchRL counts its interval from 0, so that 0 is every call; the interval is ours.
            self._targets = HardUpdate(self.loss, value_network_update_interval=0)
        else:
            self._targets = SoftUpdate(self.loss, tau=algorithm.tau)
        self._parameters = [p for p in self.loss.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam(self._parameters, lr=0.0, eps=eps, fused=True)
        self.updates = 0
        self._watch = stopwatch or Stopwatch()

    def act(self, observation: Tensor) -> Tensor:
        """Return the greedy actions for observations [N, O]."""
        return self._wiring.act(self.loss, observation)

    def explore(self, observation: Tensor) -> Tensor:
        """Return actions drawn from the policy, or the greedy ones of those that have none."""
        if self.algorithm.entropy is None:
            return self.act(observation)
        return self.loss.actor_network.distribution(observation).sample()

    def values(self, observation: Tensor) -> Tensor:
        """Return DQN's values of all actions, [N, A], for observations [N, O]."""
        return self.loss.value_network.net(observation)

    def largest_weight(self) -> Tensor:
        """Return the greatest magnitude of all parameters that are trained, a scalar."""
        norms = [torch.linalg.vector_norm(p.detach(), math.inf) for p in self._parameters]
        return torch.stack(norms).max()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all networks."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def __call__(self, batch: TensorDictBase, size: int) -> dict[str, Tensor]:
        """Take an optimizer step on every `size` transitions, and return mean metrics.

        Args:
            batch: [K·size] transitions, with `priority_weight` where they count differently.
                A batch of one minibatch gets the entry `td_error`, |δ|, [size].
            size: Transitions per step.

        Raises:
            ValueError: If the batch is not a multiple of `size`.
        """
        if len(batch) % size:
            raise ValueError(f"size must divide the {len(batch)} transitions, got {size}")
        fresh = batch.exclude("td_error")  # what an earlier call left
        history: list[dict[str, Tensor]] = []
        for minibatch in self._minibatches(fresh, size):
            metrics, error = self._step(minibatch)
            history.append(metrics)
        if len(batch) == size:
            batch.set("td_error", error)
        names = dict.fromkeys(name for step in history for name in step)
        return {
            name: torch.stack([step[name] for step in history if name in step]).mean()
            for name in names
        }

    def _minibatches(self, batch: TensorDictBase, size: int) -> Iterator[Entries]:
        if self._wiring.target is None:
            yield from [batch] if len(batch) == size else batch.split(size)
            return
        begin = 0
        while begin < len(batch):  # all minibatches up to the next update of the target at once
            count = self.algorithm.target_every - self.updates % self.algorithm.target_every
            part = self._wiring.target(self.loss, batch[begin : begin + count * size])
            self._watch.lap("loss")
            for rows in zip(*(entry.split(size) for entry in part.values()), strict=True):
                yield dict(zip(part, rows, strict=True))
            begin += count * size

    def _step(self, minibatch: Entries) -> tuple[dict[str, Tensor], Tensor]:
        watch, algorithm = self._watch, self.algorithm
        per_item, error = self._wiring.critic(self.loss, minibatch)
        weight = minibatch.get("priority_weight", None)
        terms = {"loss_critic": (per_item if weight is None else per_item * weight).mean()}
        error = error.detach()
        measured = {"td_error": error}
        self.updates += 1
        if self._wiring.policy is not None and self.updates % algorithm.policy_every == 0:
            policy, about = self._wiring.policy(self.loss, minibatch)
            terms |= policy
            measured |= about
        total = torch.stack(list(terms.values())).sum() if len(terms) > 1 else terms["loss_critic"]
        watch.lap("loss")
        for parameter in self._parameters:
            parameter.grad = None  # no gradient, no step: the policy may wait
        total.backward()
        watch.lap("backward")
        if self.max_grad_norm is not None:
            for parameter in self._parameters:  # each network is one, and twins are
                if parameter.grad is not None:
                    norm = torch.linalg.vector_norm(parameter.grad)
                    parameter.grad.mul_((self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        if self.updates % algorithm.target_every == 0:
            self._targets.step()
        watch.lap("optimizer")
        return {name: term.detach() for name, term in terms.items()} | measured, error


Terms = tuple[dict[str, Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class _Wiring:
    """What differs between the losses.

    Attributes:
        make: Builds the loss.
        critic: Returns the critic's loss and |δ|, [B] each.
        act: Returns greedy actions.
        policy: Returns losses and other metrics, scalars; None where the critic is the policy.
        target: Returns what the critic needs of a batch, with the targets of its values; None
            where the critic values them itself.
    """

    make: Callable[[OffPolicy, VectorEnv, Sequence[int]], LossModule]
    critic: Callable[[LossModule, Any], tuple[Tensor, Tensor]]
    act: Callable[[LossModule, Tensor], Tensor]
    policy: Callable[[LossModule, TensorDictBase], Terms] | None = None
    target: Callable[[LossModule, TensorDictBase], dict[str, Tensor]] | None = None


def _make_sac(algorithm: OffPolicy, env: VectorEnv, hidden: Sequence[int]) -> LossModule:
    policy = GaussianPolicy(env, hidden)
    make = functools.partial(
        SACLoss,
        policy,
        loss_function=algorithm.value_loss,
        action_spec=env.action_spec_unbatched,
        scalar_output_mode="exclude",
        **_entropy(algorithm, env),
        **_SHARED,
    )
    loss = with_twins(make, [QOfStateAction(env, hidden) for _ in range(2)])
    loss.make_value_estimator(gamma=algorithm.gamma)
    return loss


def _make_discrete_sac(algorithm: OffPolicy, env: VectorEnv, hidden: Sequence[int]) -> LossModule:
    policy = LogitPolicy(env, hidden)
    make = functools.partial(
        DiscreteSACLoss,
        policy,
        loss_function=algorithm.value_loss,
        action_space=env.action_spec_unbatched,
        num_actions=widths_of(env)[1],
        scalar_output_mode="exclude",
        **_entropy(algorithm, env),
        **_SHARED,
    )
    loss = with_twins(make, [QOfActions(env, hidden) for _ in range(2)])
    loss.make_value_estimator(gamma=algorithm.gamma)
    return loss


def _make_td3(algorithm: OffPolicy, env: VectorEnv, hidden: Sequence[int]) -> LossModule:
    space = env.action_spec_unbatched.space
    half = (space.high - space.low) / 2
    policy = DeterministicPolicy(env, hidden)
    make = functools.partial(
        TD3Loss,
        policy,
        bounds=(space.low, space.high),
        loss_function=algorithm.value_loss,
        policy_noise=algorithm.smoothing.noise * half,
        noise_clip=algorithm.smoothing.clip * half,
        **_SHARED,
    )
    loss = with_twins(make, [QOfStateAction(env, hidden) for _ in range(2)])
    loss.make_value_estimator(gamma=algorithm.gamma)
    return loss


def _make_ddpg(algorithm: OffPolicy, env: VectorEnv, hidden: Sequence[int]) -> LossModule:
    loss = DDPGLoss(
        DeterministicPolicy(env, hidden),
        QOfStateAction(env, hidden),
        loss_function=algorithm.value_loss,
        delay_actor=True,
        delay_value=True,
        **_SHARED,
    )
    loss.make_value_estimator(gamma=algorithm.gamma)
    return loss


def _make_dqn(algorithm: OffPolicy, env: VectorEnv, hidden: Sequence[int]) -> LossModule:
    loss = DQNLoss(
        QOfActions(env, hidden),
        loss_function=algorithm.value_loss,
        delay_value=True,
        double_dqn=algorithm.double,
        action_space=env.action_spec_unbatched,
        **_SHARED,
    )
    loss.make_value_estimator(gamma=algorithm.gamma)
    return loss


def _entropy(algorithm: OffPolicy, env: VectorEnv) -> dict[str, object]:
    entropy, target = algorithm.entropy, algorithm.entropy.target
    if target is None and algorithm.discrete:
        target = "auto"
    elif target is None:
        space = env.action_spec_unbatched.space
        target = float((((space.high - space.low) / 2).log() - 1.0).sum())
    return {
        "alpha_init": entropy.alpha,
        "fixed_alpha": not entropy.tuned,
        "target_entropy": target,
    }


def _sac_critic(loss: LossModule, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    critic = loss.qvalue_v2_loss if isinstance(loss, SACLoss) else loss.qvalue_loss
    per_item, about = critic(batch)
    return per_item, about["td_error"]


def _td3_critic(loss: LossModule, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    per_item, about = loss.value_loss(batch)
    return per_item, about["td_error"].amax(0).sqrt()


def _ddpg_critic(loss: LossModule, batch: TensorDictBase) -> tuple[Tensor, Tensor]:
    per_item, about = loss.loss_value(batch)
    return per_item, about["td_error"].sqrt()


@torch.no_grad()
def _dqn_target(loss: LossModule, batch: TensorDictBase) -> dict[str, Tensor]:
    """The targets if the next action is the best one, [B, 1]; Double DQN's for each one, [B, A]."""
    reached = batch.get("next")
    net, weights = loss.value_network.net, loss.target_value_network_params.get(("net", "weights"))
    later = net.run(weights, reached.get("observation"))
    if not loss.double_dqn:
        later = later.amax(-1, keepdim=True)
    gamma = loss.value_estimator.gamma
    if (steps := batch.get("steps_to_next_obs", None)) is not None:
        gamma = gamma ** steps.view(-1, 1)
    later = gamma * ~reached.get("terminated") * later
    entries = {name: batch.get(name) for name in ("observation", "action")}
    entries["value_target"] = reached.get(loss.tensor_keys.reward) + later
    if loss.double_dqn:
        entries["reached"] = reached.get("observation")
    if (weight := batch.get("priority_weight", None)) is not None:
        entries["priority_weight"] = weight
    return entries


def _dqn_critic(loss: LossModule, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    net, target = loss.value_network.net, batch["value_target"]
    if loss.double_dqn:
        with torch.no_grad():
            target = target.gather(-1, net(batch["reached"]).argmax(-1, keepdim=True))
    value = net(batch["observation"]).gather(-1, batch["action"].unsqueeze(-1))
    per_item = distance_loss(value, target, loss.loss_function)
    return per_item.squeeze(-1), (value.detach() - target).abs().squeeze(-1)


def _sac_policy(loss: LossModule, batch: TensorDictBase) -> Terms:
    per_item, about = loss.actor_loss(batch)
    log_prob = about["log_prob"]
    terms = {"loss_actor": per_item.mean()}
    if loss.log_alpha.requires_grad:
        terms["loss_alpha"] = loss.alpha_loss(log_prob).mean()
    return terms, {"entropy": -log_prob.mean(), "alpha": loss.log_alpha.detach().exp()}


def _td3_policy(loss: LossModule, batch: TensorDictBase) -> Terms:
    return {"loss_actor": loss.actor_loss(batch)[0].mean()}, {}


def _ddpg_policy(loss: LossModule, batch: TensorDictBase) -> Terms:
    return {"loss_actor": loss.loss_actor(batch)[0].mean()}, {}


def _act_by_distribution(loss: LossModule, observation: Tensor) -> Tensor:
    return loss.actor_network.distribution(observation).deterministic_sample


def _act_by_network(loss: LossModule, observation: Tensor) -> Tensor:
    return loss.actor_network.action(observation)


def _act_by_value(loss: LossModule, observation: Tensor) -> Tensor:
    return loss.value_network.net(observation).argmax(-1)


_WIRING = {
    "sac": _Wiring(_make_sac, _sac_critic, _act_by_distribution, _sac_policy),
    "discrete_sac": _Wiring(_make_discrete_sac, _sac_critic, _act_by_distribution, _sac_policy),
    "td3": _Wiring(_make_td3, _td3_critic, _act_by_network, _td3_policy),
    "ddpg": _Wiring(_make_ddpg, _ddpg_critic, _act_by_network, _ddpg_policy),
    "dqn": _Wiring(_make_dqn, _dqn_critic, _act_by_value, target=_dqn_target),
}
